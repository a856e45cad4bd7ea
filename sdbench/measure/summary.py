"""Computes the summary of a run from its step times and counters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sdbench.measure.bottleneck import name_bottleneck
from sdbench.measure.gpu_monitor import is_throttled, merge_readings
from sdbench.measure.phases import OTHER, find_stragglers, merge_phases
from sdbench.measure.startup import StartupClock, breaks_graphs
from sdbench.measure.timer import PROFILED, WARMUP, Step, Timings, merge_ranks
from sdbench.measure.watch import StepWatch
from sdbench.statistics import intervals
from sdbench.statistics.intervals import Interval

if TYPE_CHECKING:
    from sdbench.data.buckets import Mixture

# On an idle machine the standard deviation of the step times is below a tenth of their mean.
MAX_VARIATION = 0.10
# With a larger share outside all phases, the breakdown does not explain the step.
MAX_OTHER = 0.05


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
    uses_sockets: bool = False,
    is_busy: bool = False,
    mixture: Mixture | None = None,
) -> dict[str, Any]:
    """The record's `summary` of a run, from measurements that are merged over all ranks.

    `config` has the run's settings by name, `num_devices` is the number of ranks. `peak_tflops` is
    the peak of dense matrix products on a device, `matmul_tflops` the measured rate of one; None:
    not known. `startup` is that of the first rank; `uses_sockets`: NCCL uses TCP between nodes;
    `is_busy`: other processes used the CPUs before. `mixture` has the buckets of the data, if any.
    """
    timings, gpu, breakdown = measurements.timings, measurements.gpu, measurements.breakdown
    measured = timings.measured
    shapes = [step.shape for step in measured]
    # Shapes take different times, which is no scatter.
    raw_times_s = [step.step_time_s for step in measured]
    step_times_s = intervals.level(raw_times_s, shapes)
    ratios = intervals.level(raw_times_s, shapes, as_ratios=True)
    window = summarize_window(
        step_times_s,
        [step.data_wait_s for step in measured],
        images_per_step=config["batch_size"],
        window_s=timings.window_s,
    )
    rate_per_device = window["images_per_second"] / num_devices
    of_shapes: dict[str, Any] = {}
    rate_of_flops = rate_per_device
    if mixture is not None:
        of_shapes = _summarize_shapes(measured, mixture, config["batch_size"])
        # FLOPs per image are the mean over the data, whose shapes the window has by chance.
        rate_of_epoch = of_shapes["images_per_second_of_epoch"]
        rate_of_flops = (rate_of_epoch or window["images_per_second"]) / num_devices
    achieved_tflops = rate_of_flops * flops_per_image / 1e12
    steadiness = intervals.check_steady(step_times_s)
    variation = float(np.std(ratios, ddof=1) / np.mean(ratios)) if measured[1:] else None
    target = config.get("target_precision")
    stragglers = bottleneck = None
    if breakdown is not None:
        stragglers = find_stragglers(measurements.rank_phases, ranks_per_node=ranks_per_node)
        bottleneck = name_bottleneck(
            breakdown,
            config,
            device_batch_size=config["batch_size"] // num_devices,
            stragglers=stragglers,
        )
    flags = {
        "drift": steadiness is not None and not steadiness.is_steady,
        "noisy": variation is not None and variation > MAX_VARIATION,
        "throttled": gpu is not None and is_throttled(gpu),
        "shared": gpu is not None and bool(gpu["num_other_processes"]),
        "busy": is_busy,
        "other_time": breakdown is not None
        and breakdown["seconds"][OTHER] > MAX_OTHER * breakdown["step_time_s"],
        "straggler": bool(stragglers),
        "sockets": uses_sockets,
        "shapes": any(shape["num_steps"] < 2 for shape in of_shapes.get("shapes", ())),
        "graph_breaks": breaks_graphs(),
        "precision_not_reached": target is not None
        and not intervals.is_precise(step_times_s, target=target),
    }
    num_warmup_steps = sum(step.phase == WARMUP for step in timings.steps)
    return {
        **window,
        "images_per_second_per_device": rate_per_device,
        "num_warmup_steps": num_warmup_steps,
        "step_time_p50_s": float(np.percentile(raw_times_s, 50)),
        "step_time_p95_s": float(np.percentile(raw_times_s, 95)),
        "step_time_cv_percent": None if variation is None else 100 * variation,
        "num_outliers": intervals.count_outliers(ratios),
        "stability": None
        if steadiness is None
        else ("steady" if steadiness.is_steady else "drift"),
        "flags": [name for name, is_raised in flags.items() if is_raised],
        "breakdown": breakdown,
        "stragglers": stragglers,
        "attention_kernels": measurements.attention_kernels,
        "bottleneck": bottleneck,
        "startup": None if startup is None else startup.summary(num_warmup_steps=num_warmup_steps),
        "peak_memory_gib": measurements.peak_memory_gib,
        "gpu": gpu,
        "gpu_utilization_percent": None if gpu is None else gpu["utilization_percent"],
        "achieved_tflops_per_device": achieved_tflops,
        "mfu_percent": None if peak_tflops is None else 100 * achieved_tflops / peak_tflops,
        "matmul_tflops": matmul_tflops,
        "mfu_of_matmul_percent": None
        if matmul_tflops is None
        else 100 * achieved_tflops / matmul_tflops,
        "loss_first": timings.steps[0].loss,
        "loss_last": timings.steps[-1].loss,
        **of_shapes,
    }


def _summarize_shapes(
    measured: Sequence[Step], mixture: Mixture, images_per_step: int
) -> dict[str, Any]:
    """Rates in pixels, and steps by shape.

    A window rarely has the shapes in the proportions of the data: `images_per_second_of_epoch` is
    the rate at the means of its steps, each shape with its share of the samples. None if the window
    lacks a shape.
    """
    times_s = {shape: [] for shape in mixture.shapes}
    for step in measured:
        times_s[step.shape].append(step.step_time_s)
    means_s = [sum(some) / len(some) if some else None for some in times_s.values()]
    num_pixels = images_per_step * sum(step.shape.num_pixels for step in measured)
    rows = zip(mixture.shapes, mixture.shares, times_s.values(), means_s, strict=True)
    return {
        "megapixels_per_second": num_pixels / 1e6 / sum(step.step_time_s for step in measured),
        "images_per_second_of_epoch": None
        if None in means_s
        else images_per_step / mixture.mean(means_s),
        "shapes": [
            {"shape": str(shape), "share": share, "num_steps": len(some), "step_time_s": mean_s}
            for shape, share, some, mean_s in rows
        ],
    }


def summarize_window(
    step_times_s: Sequence[float],
    data_waits_s: Sequence[float],
    *,
    images_per_step: float,
    window_s: float,
) -> dict[str, Any]:
    """The figures of a measured window that every task has in its record's `summary`."""
    interval = intervals.within_run_interval(step_times_s, images_per_step=images_per_step)
    return {
        "images_per_second": images_per_step * len(step_times_s) / window_s,
        "images_per_second_interval": interval_for_record(interval),
        "num_measured_steps": len(step_times_s),
        "window_s": window_s,
        "data_wait_percent": 100 * sum(data_waits_s) / window_s,
    }


def interval_for_record(interval: Interval | None) -> dict[str, Any] | None:
    """An interval as JSON, in which an infinite end is None."""
    if interval is None:
        return None
    high = interval.high if math.isfinite(interval.high) else None
    return {**dataclasses.asdict(interval), "high": high}
