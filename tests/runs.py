"""Runs and their records; `finished_run` trains once in a process of tests, and copies that."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sdbench.record import formulas
from sdbench.record.store import load_record

# A quick run. Each of several ranks on this machine would take all cores for itself, and wait for
# the threads of the others.
TINY = (
    *("--model_name", "tiny", "--engine", "torch", "--use_synth_data", "--num_workers", "0"),
    *("--num_threads", "1"),
)

_RESULTS: dict[tuple[str, ...], Path] = {}


def finished_run(main: Callable[[Sequence[str]], int], *argv: str, results: Path) -> Path:
    """Have the results of a run that has ended well, and return its folder in a copy of them.

    For tests of what is done with a run. Tests of how it is made start one of their own.
    """
    key = (main.__module__, *argv)
    if key not in _RESULTS:
        made = Path(tempfile.mkdtemp(prefix="finished-"), "runs")
        assert main([*argv, "--results_dir", str(made)]) == 0
        _RESULTS[key] = made
    shutil.copytree(_RESULTS[key], results)
    (record,) = results.glob("*/record.json")
    return record.parent


def only_record(results: Path) -> dict[str, Any]:
    """The record of the one run in a results folder."""
    (path,) = results.glob("*/record.json")
    return load_record(path)


def run_and_load(
    main: Callable[[Sequence[str]], int], results: Path, *argv: str
) -> tuple[dict[str, Any] | None, int]:
    """Run a program in this process: the record of the one new run, or None, and the exit code."""
    before = set(results.glob("*/record.json"))
    exit_code = main([*argv, "--results_dir", str(results)])
    new = set(results.glob("*/record.json")) - before
    assert len(new) <= 1
    return (load_record(new.pop()) if new else None), exit_code


def follow_rate(record: dict[str, Any]) -> dict[str, Any]:
    """Set the figures of a record of benchmark.py that follow from its images/s; returns it."""
    summary = record["summary"]
    if summary is None or "kind" in record:
        return record
    ranks, workload = record["ranks"], record["workload"]
    ranks["ranks_per_node"] = ranks["world_size"] // ranks["num_nodes"]
    if record["machine"]["device_type"] == "cuda":
        record["machine"]["num_devices"] = ranks["ranks_per_node"]
    rate, images_per_step = summary["images_per_second"], record["config"]["batch_size"]
    num_measured = summary["num_measured_steps"]
    old_rate = workload["num_images"] / workload["num_steps"] * num_measured / summary["window_s"]
    window_s = images_per_step * num_measured / rate
    for name in ("step_time_p50_s", "step_time_p95_s"):
        summary[name] *= window_s / summary["window_s"]
    if (interval := summary["images_per_second_interval"]) is not None:
        high = interval["high"] and interval["high"] * rate / old_rate
        scaled = {"low": interval["low"] * rate / old_rate, "high": high}
        summary["images_per_second_interval"] = interval | scaled
    summary["window_s"] = window_s
    record["duration_s"] = max(record["duration_s"], 10 * window_s)
    workload["num_images"] = images_per_step * workload["num_steps"]
    summary |= formulas.of_devices(
        rate,
        num_devices=ranks["world_size"],
        flops_per_image=workload["flops_per_image"],
        peak=formulas.peak_tflops(record["machine"]["device_name"], record["config"]["precision"]),
        matmul=summary["matmul_tflops"],
    )
    return record
