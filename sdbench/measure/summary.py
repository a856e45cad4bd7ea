"""What do the step times and counters of a run come to?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sdbench.measure.timer import Timings, merge_ranks
from sdbench.statistics import Interval, within_run_interval


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What an engine brings back from one rank.

    Attributes:
        timings: Every step, and the measured window.
        num_images: Images this rank's loader delivered over the whole run.
        peak_memory_gib: Peak of the rank: allocated on the GPU, or resident on a CPU.
        gpu_utilization_percent: Mean over the measured window; None without a GPU or NVML.
    """

    timings: Timings
    num_images: int
    peak_memory_gib: float
    gpu_utilization_percent: float | None


def merge_measurements(ranks: Sequence[Measurements]) -> Measurements:
    """The run as a whole: slowest rank, all images, largest peak, mean utilisation."""
    utilizations = [rank.gpu_utilization_percent for rank in ranks]
    known = None not in utilizations
    return Measurements(
        timings=merge_ranks([rank.timings for rank in ranks]),
        num_images=sum(rank.num_images for rank in ranks),
        peak_memory_gib=max(rank.peak_memory_gib for rank in ranks),
        gpu_utilization_percent=sum(utilizations) / len(utilizations) if known else None,
    )


def summarize(
    measurements: Measurements,
    *,
    images_per_step: int,
    num_devices: int,
    flops_per_image: float,
    peak_tflops: float | None,
) -> dict[str, Any]:
    """The figures of a run.

    Args:
        measurements: Merged over all ranks.
        images_per_step: Global batch.
        num_devices: Ranks that trained: GPUs, or CPU processes.
        flops_per_image: Model FLOPs of one image, multiply-add counted as two.
        peak_tflops: Dense peak of one device, None where unknown.

    Returns:
        The record's `summary`.
    """
    timings = measurements.timings
    measured = timings.measured
    step_times_s = [step.step_time_s for step in measured]
    images_per_second = images_per_step * len(measured) / timings.window_s
    interval = within_run_interval(step_times_s, images_per_step=images_per_step)
    achieved_tflops = images_per_second / num_devices * flops_per_image / 1e12
    return {
        "images_per_second": images_per_second,
        "images_per_second_interval": interval_for_record(interval),
        "images_per_second_per_device": images_per_second / num_devices,
        "num_measured_steps": len(measured),
        "window_s": timings.window_s,
        "step_time_p50_s": float(np.percentile(step_times_s, 50)),
        "step_time_p95_s": float(np.percentile(step_times_s, 95)),
        "data_wait_percent": 100 * sum(step.data_wait_s for step in measured) / timings.window_s,
        "peak_memory_gib": measurements.peak_memory_gib,
        "gpu_utilization_percent": measurements.gpu_utilization_percent,
        "achieved_tflops_per_device": achieved_tflops,
        "mfu_percent": None if peak_tflops is None else 100 * achieved_tflops / peak_tflops,
        "loss_first": timings.steps[0].loss,
        "loss_last": timings.steps[-1].loss,
    }


def interval_for_record(interval: Interval | None) -> dict[str, Any] | None:
    """An interval as JSON, which has no infinity: an end without a bound is None."""
    if interval is None:
        return None
    high = interval.high if math.isfinite(interval.high) else None
    return {**dataclasses.asdict(interval), "high": high}
