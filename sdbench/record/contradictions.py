"""Finds figures of a record that cannot all be true, such as a rate outside its own interval."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sdbench.base.outside import open_table

# The host times the window, and on a GPU its events time the steps. In the 154 published records
# with steps, all of CPUs and so of one clock, both agree to 1e-6. How far they differ in a short
# window of a GPU was not measured: this is an allowance.
MAX_CLOCK_DIFFERENCE = 0.1


def find_contradictions(record: Mapping[str, Any], steps_file: Path) -> Iterator[str]:
    """Yield a sentence for each figure that differs from the rate of a record's summary.

    The record satisfies its schema; steps.csv of its run need not exist.
    """
    summary = record["summary"]
    if summary is None or summary.get("images_per_second") is None:
        return
    rate = summary["images_per_second"]
    interval = summary.get("images_per_second_interval") or {"low": 0.0, "high": None}
    low, high = interval["low"], interval["high"] or math.inf
    if not low * (1 - MAX_CLOCK_DIFFERENCE) <= rate <= high * (1 + MAX_CLOCK_DIFFERENCE):
        yield f"images_per_second is {rate:.6g}, outside of its interval, {low:.6g} to {high:.6g}"
    if "kind" in record:  # only a run of benchmark.py has the figures below
        return
    images_per_step, num_devices = record["config"]["batch_size"], record["ranks"]["world_size"]
    num_steps, window_s = summary["num_measured_steps"], summary["window_s"]
    times_s = _read_step_times(steps_file)
    of_devices = num_devices * summary["images_per_second_per_device"]
    of_window = images_per_step * num_steps / window_s
    of_steps = images_per_step * len(times_s) / sum(times_s) if sum(times_s) else rate
    for source, other, tolerance in (
        (f"{num_devices} times images_per_second_per_device", of_devices, 1e-6),
        (f"{num_steps} steps of {images_per_step} images in {window_s:.6g} s", of_window, 1e-6),
        (f"the steps of {steps_file.name}", of_steps, MAX_CLOCK_DIFFERENCE),
    ):
        if not math.isclose(other, rate, rel_tol=tolerance):
            yield f"images_per_second is {rate:.6g}, but {source} give {other:.6g}"


def _read_step_times(file: Path) -> list[float]:
    """The times of the measured steps in seconds; empty without a table that has them."""
    try:
        rows = open_table(file, required=("phase", "step_time_s"))
        return [float(row["step_time_s"]) for row in rows if row["phase"] == "measured"]
    except (OSError, ValueError, TypeError, csv.Error):
        return []  # the code that draws the steps reports the fault
