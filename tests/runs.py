"""Runs and their records; `finished_run` trains once in a process of tests, and copies that."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    rate = summary["images_per_second"]
    num_images = record["config"]["batch_size"] * summary["num_measured_steps"]
    summary["window_s"] = num_images / rate
    summary["images_per_second_per_device"] = rate / record["ranks"]["world_size"]
    interval = summary["images_per_second_interval"]
    if interval is not None and not interval["low"] <= rate <= (interval["high"] or rate):
        interval |= {"low": 0.9 * rate, "high": 1.1 * rate}
    return record
