"""The formulas of a record's derived figures: a run is summed up by them, and a reader checks them.

A figure is derived if others of the record, or the rows of its steps.csv, decide it. Intervals and
the judgement of drift are no such figures: they are estimates, and later versions estimate better.
Each function returns figures of the record's `summary` by name; steps have the attributes of
`timer.Step`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sdbench
from sdbench.base.shape import Shape

WARMUP = "warmup"
MEASURED = "measured"
PROFILED = "profiled"
DRIFT = "drift"

PEAKS_FILE = Path(sdbench.__file__).with_name("measure") / "peaks.json"
# On an idle machine the standard deviation of the step times is below a tenth of their mean.
MAX_VARIATION_PERCENT = 10
# With a larger share outside all phases, the breakdown does not explain the step.
MAX_OTHER = 0.05
# Under load a GPU normally runs at its power cap. Other reasons for a lower clock mean that it is
# slower than other GPUs of its model.
NORMAL_REASON = "power cap"
# What NCCL calls a network without EFA or InfiniBand.
SOCKETS = "Socket"


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Peak TFLOP/s of dense matrix products on one device, from peaks.json, if listed."""
    peaks = facts_of(device_name).get("peaks", {})
    return peaks.get(precision.removeprefix("amp_"))


def facts_of(device_name: str) -> dict[str, Any]:
    """What peaks.json tells of a device; empty if it is not listed."""
    rows = json.loads(PEAKS_FILE.read_text(encoding="utf-8"))
    return next((row for row in rows if device_name in row["devices"]), {})


def total_s(seconds: Mapping[str, float | None]) -> float:
    """The time of all phases; one that was not told apart is None."""
    return sum(value for value in seconds.values() if value is not None)


def rate_of(num_images: float, seconds: float) -> float:
    """Images/s; a rate is images over time, never a mean of rates."""
    return num_images / seconds


def of_window(
    num_steps: int, data_waits_s: Iterable[float], *, images_per_step: float, window_s: float
) -> dict[str, Any]:
    """The figures of a measured window that every task has."""
    return {
        "images_per_second": rate_of(images_per_step * num_steps, window_s),
        "num_measured_steps": num_steps,
        "window_s": window_s,
        "data_wait_percent": 100 * sum(data_waits_s) / window_s,
    }


def times_without_shapes(steps: Sequence[Any], *, as_ratios: bool = False) -> list[float]:
    """The step times without the differences between shapes, which are no scatter."""
    from sdbench.statistics import intervals  # loads numpy, which not every command needs

    times_s = [step.step_time_s for step in steps]
    return intervals.level(times_s, [step.shape for step in steps], as_ratios=as_ratios)


def of_steps(steps: Sequence[Any], *, images_per_step: int, window_s: float) -> dict[str, Any]:
    """The figures of all steps of a run, of which some are measured."""
    import numpy as np

    from sdbench.statistics.intervals import count_outliers

    measured = [step for step in steps if step.phase == MEASURED]
    times_s = [step.step_time_s for step in measured]
    ratios = times_without_shapes(measured, as_ratios=True)
    variation = np.std(ratios, ddof=1) / np.mean(ratios) if measured[1:] else None
    waits_s = [step.data_wait_s for step in measured]
    return {
        **of_window(len(measured), waits_s, images_per_step=images_per_step, window_s=window_s),
        "num_warmup_steps": sum(step.phase == WARMUP for step in steps),
        "step_time_p50_s": float(np.percentile(times_s, 50)),
        "step_time_p95_s": float(np.percentile(times_s, 95)),
        "step_time_cv_percent": None if variation is None else 100 * float(variation),
        "num_outliers": count_outliers(ratios),
        "loss_first": steps[0].loss,
        "loss_last": steps[-1].loss,
    }


def rows_of_shapes(steps: Iterable[Any], num_samples: Mapping[str, int]) -> list[dict[str, Any]]:
    """The field `shapes`: measured steps by shape; `num_samples` are those of the data by shape."""
    times_s: dict[str, list[float]] = {shape: [] for shape in num_samples}
    for step in steps:
        if step.phase == MEASURED:
            times_s.setdefault(str(step.shape), []).append(step.step_time_s)
    return [
        {
            "shape": shape,
            "share": num_samples.get(shape, 0) / sum(num_samples.values()),
            "num_steps": len(some),
            "step_time_s": sum(some) / len(some) if some else None,
        }
        for shape, some in times_s.items()
    ]


def of_shapes(rows: Sequence[Mapping[str, Any]], *, images_per_step: int) -> dict[str, Any]:
    """Rates over the shapes of `rows_of_shapes`.

    A window rarely has the shapes in the proportions of the data: `images_per_second_of_epoch` is
    the rate at the means of its steps, each shape with its share of the samples. None if the window
    lacks a shape.
    """
    timed = [row for row in rows if row["step_time_s"] is not None]
    num_pixels = images_per_step * sum(
        row["num_steps"] * Shape(*map(int, row["shape"].split("x"))).num_pixels for row in timed
    )
    times_s = sum(row["num_steps"] * row["step_time_s"] for row in timed)
    mean_s = sum(row["share"] * row["step_time_s"] for row in timed)
    return {
        "megapixels_per_second": num_pixels / 1e6 / times_s,
        "images_per_second_of_epoch": images_per_step / mean_s if len(timed) == len(rows) else None,
    }


def of_devices(
    images_per_second: float,
    *,
    num_devices: int,
    flops_per_image: float,
    peak: float | None,
    matmul: float | None,
    images_per_second_of_epoch: float | None = None,
) -> dict[str, Any]:
    """What each device reaches; `peak` and `matmul` in TFLOP/s, None where they are not known.

    FLOPs per image are the mean over the data, whose shapes a window has by chance: with a rate of
    the epoch they belong to that.
    """
    rate_of_flops = (images_per_second_of_epoch or images_per_second) / num_devices
    achieved = rate_of_flops * flops_per_image / 1e12
    return {
        "images_per_second_per_device": images_per_second / num_devices,
        "achieved_tflops_per_device": achieved,
        "mfu_percent": None if peak is None else 100 * achieved / peak,
        "matmul_tflops": matmul,
        "mfu_of_matmul_percent": None if matmul is None else 100 * achieved / matmul,
    }


def is_throttled(readings: Mapping[str, Any]) -> bool:
    """Whether a GPU's power limit was lowered, or its clock for a reason other than the cap."""
    limit_w, default_w = readings["power_limit_w"], readings["default_power_limit_w"]
    is_limited = limit_w is not None and default_w is not None and limit_w < default_w
    return is_limited or any(one != NORMAL_REASON for one in readings["throttle_reasons"] or ())


def raise_flags(
    summary: Mapping[str, Any], *, network: str | None, others: Collection[str]
) -> list[str]:
    """The flags of a summary; `others` has those raised that do not follow from its figures.

    `network` is NCCL's name of the network between nodes, None if it is not known.
    """
    gpu, breakdown = summary["gpu"], summary["breakdown"]
    variation = summary["step_time_cv_percent"]
    flags = {
        "drift": summary["stability"] == DRIFT,
        "noisy": variation is not None and variation > MAX_VARIATION_PERCENT,
        "throttled": gpu is not None and is_throttled(gpu),
        "shared": gpu is not None and bool(gpu["num_other_processes"]),
        "busy": "busy" in others,
        "other_time": breakdown is not None
        and breakdown["seconds"]["other"] > MAX_OTHER * breakdown["step_time_s"],
        "straggler": bool(summary["stragglers"]),
        "sockets": network == SOCKETS,
        "shapes": any(shape["num_steps"] < 2 for shape in summary.get("shapes", ())),
        "graph_breaks": "graph_breaks" in others,
        "precision_not_reached": "precision_not_reached" in others,
    }
    return [name for name, is_raised in flags.items() if is_raised]


def of_processes(
    images_per_second: float, *, num_processes: int, num_cores: int, target: float | None
) -> dict[str, Any]:
    """What each process of a loader reaches; more processes than cores share the cores."""
    per_core = images_per_second / min(num_processes, num_cores)
    return {
        "num_processes": num_processes,
        "images_per_second_per_process": images_per_second / num_processes,
        "images_per_second_per_core": per_core,
        "num_workers_for_target": num_for_target(target, per_core),
    }


def num_for_target(target: float | None, rate_of_one: float | None) -> int | None:
    """How many workers reach a target together; None if it or their rate is not known."""
    return math.ceil(target / rate_of_one) if target and rate_of_one else None


def time_of_training(rates: Iterable[float], *, images_per_step: int) -> float:
    """Seconds that steps of a training run have taken, from the rate of each in steps.csv."""
    return sum(images_per_step / rate for rate in rates)
