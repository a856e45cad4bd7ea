"""Computes the summary of a run from its step times and counters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.measure.bottleneck import name_bottleneck
from sdbench.measure.gpu_monitor import merge_readings
from sdbench.measure.phases import find_stragglers, merge_phases
from sdbench.measure.startup import StartupClock, breaks_graphs
from sdbench.measure.timer import PROFILED, Timings, merge_ranks
from sdbench.measure.watch import StepWatch
from sdbench.record import formulas
from sdbench.statistics import intervals


@dataclasses.dataclass(frozen=True)
class Measurements:
    """The measurements of a rank, or of a run after `merge_measurements`.

    Attributes:
        num_images: Images that the loader delivered in the whole run.
        peak_memory_gib: Reserved on a GPU, or resident on a CPU.
        gpu: In the measured window; None without a GPU or NVML.
        attention_kernels: `AttentionLog.kernels` of the first rank.
        rank_phases: Seconds of the phases of a step on each rank; empty without profiled steps.
    """

    timings: Timings
    num_images: int
    peak_memory_gib: float
    gpu: dict[str, Any] | None = None
    attention_kernels: list[dict[str, Any]] | None = None
    rank_phases: tuple[dict[str, float], ...] = ()

    @property
    def breakdown(self) -> dict[str, Any] | None:
        """The record's `breakdown` of a step into phases; None without profiled steps."""
        num_steps = sum(step.phase == PROFILED for step in self.timings.steps)
        return merge_phases(self.rank_phases, num_steps=num_steps) if self.rank_phases else None


def measurements_of(watch: StepWatch, *, num_images: int) -> Measurements:
    """The measurements of a rank after its training loop."""
    timings = watch.timer.timings()
    num_profiled = sum(step.phase == PROFILED for step in timings.steps)
    seconds = {name: one / max(num_profiled, 1) for name, one in watch.phases.seconds.items()}
    return Measurements(
        timings,
        num_images,
        watch.peak_memory_gib,
        watch.gpu_monitor and watch.gpu_monitor.readings,
        watch.attention.kernels,
        rank_phases=(seconds,) if num_profiled else (),
    )


def merge_measurements(ranks: Sequence[Measurements]) -> Measurements:
    """Merge ranks: times of the slowest, sum of images, largest peak, phases of each."""
    return Measurements(
        timings=merge_ranks([rank.timings for rank in ranks]),
        num_images=sum(rank.num_images for rank in ranks),
        peak_memory_gib=max(rank.peak_memory_gib for rank in ranks),
        gpu=merge_readings([rank.gpu for rank in ranks]),
        attention_kernels=ranks[0].attention_kernels,
        rank_phases=sum((rank.rank_phases for rank in ranks), ()),
    )


def summarize(
    measurements: Measurements,
    *,
    config: Mapping[str, Any],
    num_devices: int,
    ranks_per_node: int = 1,
    flops_per_image: float,
    peak_tflops: float | None,
    matmul_tflops: float | None = None,
    startup: StartupClock | None = None,
    network: str | None = None,
    is_busy: bool = False,
    samples_by_shape: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The record's `summary` of a run, from measurements that are merged over all ranks.

    `config` has the run's settings by name, `num_devices` is the number of ranks. `peak_tflops` is
    the peak of dense matrix products on a device, `matmul_tflops` the measured rate of one; None:
    not known. `startup` is that of the first rank; `uses_sockets`: NCCL uses TCP between nodes;
    `is_busy`: other processes used the CPUs before. `samples_by_shape`: those of the data,
    if they are in buckets.
    """
    timings, gpu, breakdown = measurements.timings, measurements.gpu, measurements.breakdown
    images_per_step, target = config["batch_size"], config.get("target_precision")
    stragglers = bottleneck = None
    if breakdown is not None:
        stragglers = find_stragglers(measurements.rank_phases, ranks_per_node=ranks_per_node)
        bottleneck = name_bottleneck(
            breakdown,
            config,
            device_batch_size=images_per_step // num_devices,
            stragglers=stragglers,
        )
    of_shapes: dict[str, Any] = {}
    if samples_by_shape is not None:
        shapes = formulas.rows_of_shapes(timings.steps, samples_by_shape)
        of_shapes = formulas.of_shapes(shapes, images_per_step=images_per_step) | {"shapes": shapes}
    of_steps = formulas.of_steps(
        timings.steps, images_per_step=images_per_step, window_s=timings.window_s
    )
    step_times_s = formulas.times_without_shapes(timings.measured)
    steadiness = intervals.check_steady(step_times_s)
    of_devices = formulas.of_devices(
        of_steps["images_per_second"],
        num_devices=num_devices,
        flops_per_image=flops_per_image,
        peak=peak_tflops,
        matmul=matmul_tflops,
        images_per_second_of_epoch=of_shapes.get("images_per_second_of_epoch"),
    )
    num_warmup_steps = of_steps["num_warmup_steps"]
    summary = {
        **of_steps,
        **of_devices,
        "images_per_second_interval": estimate_interval(
            step_times_s, images_per_step=images_per_step
        ),
        "stability": None
        if steadiness is None
        else ("steady" if steadiness.is_steady else formulas.DRIFT),
        "breakdown": breakdown,
        "stragglers": stragglers,
        "attention_kernels": measurements.attention_kernels,
        "bottleneck": bottleneck,
        "startup": None if startup is None else startup.summary(num_warmup_steps=num_warmup_steps),
        "peak_memory_gib": measurements.peak_memory_gib,
        "gpu": gpu,
        "gpu_utilization_percent": None if gpu is None else gpu["utilization_percent"],
        **of_shapes,
    }
    others = {
        "busy": is_busy,
        "graph_breaks": breaks_graphs(),
        "precision_not_reached": target is not None
        and not intervals.is_precise(step_times_s, target=target),
    }
    raised = [name for name, is_raised in others.items() if is_raised]
    flags = formulas.raise_flags(summary, network=network, others=raised)
    return {**summary, "flags": flags}


def summarize_window(
    step_times_s: Sequence[float],
    data_waits_s: Sequence[float],
    *,
    images_per_step: float,
    window_s: float,
) -> dict[str, Any]:
    """The figures of a measured window, with an interval."""
    of_window = formulas.of_window(
        len(step_times_s), data_waits_s, images_per_step=images_per_step, window_s=window_s
    )
    interval = estimate_interval(step_times_s, images_per_step=images_per_step)
    return {**of_window, "images_per_second_interval": interval}


def estimate_interval(
    step_times_s: Sequence[float], *, images_per_step: float
) -> dict[str, Any] | None:
    """The interval of images/s within a run, as JSON, in which an infinite end is None."""
    interval = intervals.within_run_interval(step_times_s, images_per_step=images_per_step)
    if interval is None:
        return None
    high = interval.high if math.isfinite(interval.high) else None
    return {**dataclasses.asdict(interval), "high": high}
