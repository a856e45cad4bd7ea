"""Finds figures of a record that cannot all be true, such as a rate outside its own interval."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sdbench.base.outside import open_table

# The window and the steps have clocks of their own: host times at the edges of the window, events
# of the GPU in between. In the 154 published records with steps, all of CPUs and so of one clock,
# they agree to 1e-6. What a short window of a GPU needs was not measured: this is an allowance.
MAX_CLOCK_DIFFERENCE = 0.1


def find_contradictions(record: Mapping[str, Any], steps_file: Path) -> Iterator[str]:
    """Yield, as a sentence each, the rates that differ from the rate of a record's summary.

    Args:
        record: A record that satisfies its schema.
        steps_file: steps.csv of its run, which need not exist.
    """
    summary = record["summary"]
    if summary is None or summary.get("images_per_second") is None:
        return
    rate = summary["images_per_second"]
    interval = summary.get("images_per_second_interval")
    if interval is not None:
        low = interval["low"] * (1 - MAX_CLOCK_DIFFERENCE)
        high = (interval["high"] or math.inf) * (1 + MAX_CLOCK_DIFFERENCE)
        if not low <= rate <= high:
            yield (
                f"images_per_second is {rate:.6g}, which is outside of its interval, "
                f"{interval['low']:.6g} to {interval['high'] or math.inf:.6g}"
            )
    if "kind" in record:  # only a run of benchmark.py has the figures below
        return
    images_per_step, num_devices = record["config"]["batch_size"], record["ranks"]["world_size"]
    of_devices = num_devices * summary["images_per_second_per_device"]
    if not math.isclose(of_devices, rate, rel_tol=1e-6):
        yield (
            f"images_per_second is {rate:.6g}, but {num_devices} times "
            f"images_per_second_per_device is {of_devices:.6g}"
        )
    num_steps = summary["num_measured_steps"]
    of_window = images_per_step * num_steps / summary["window_s"]
    if not math.isclose(of_window, rate, rel_tol=1e-6):
        yield (
            f"images_per_second is {rate:.6g}, but {num_steps} steps of {images_per_step} "
            f"images in {summary['window_s']:.6g} s are {of_window:.6g}"
        )
    times_s = _read_step_times(steps_file)
    of_steps = images_per_step * len(times_s) / sum(times_s) if sum(times_s) else rate
    if not math.isclose(of_steps, rate, rel_tol=MAX_CLOCK_DIFFERENCE):
        yield (
            f"images_per_second is {rate:.6g}, but the steps of {steps_file.name} give "
            f"{of_steps:.6g}"
        )


def _read_step_times(file: Path) -> list[float]:
    """The times of the measured steps in seconds; empty without a table that has them."""
    try:
        rows = [row for row in csv.DictReader(open_table(file)) if row["phase"] == "measured"]
        return [float(row["step_time_s"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return []  # what draws the steps names the fault
