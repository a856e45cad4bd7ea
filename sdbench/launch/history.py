"""Estimates the duration of runs from earlier ones."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.launch.sweep_state import Run
from sdbench.record.store import BENCHMARK, OK, RECORD_NAME, kind_of, load_record
from sdbench.settings.config import FIELDS

HISTORY = Path("runs")
# The settings that matter most for the duration of a run.
DECISIVE = ("model_name", "image_size", "latents")


def estimate_durations(pending: Sequence[Run], *, done: Sequence[Run]) -> list[float | None]:
    """Seconds that each run may take.

    Args:
        pending: The runs to come.
        done: Runs of the same sweep that have ended.

    Returns:
        For each the median over the runs of this sweep that ended well, or else over those in runs/
        of the same model and size; None where there are neither.
    """
    ended = [run.outcome() for run in done]
    durations_s = [outcome["duration_s"] for outcome in ended if outcome["status"] == OK]
    if durations_s:
        return [statistics.median(durations_s)] * len(pending)
    records = [_load(path) for path in sorted(HISTORY.rglob(RECORD_NAME))]
    earlier = [record for record in records if record is not None]
    return [_from(earlier, run.cell.settings) for run in pending]


def _load(path: Path) -> dict[str, Any] | None:
    """A record with a duration, or None; a record that cannot be read is named on stderr."""
    try:
        record = load_record(path)
    except (ValueError, OSError) as error:
        print(f"no duration from a record that cannot be read: {error}", file=sys.stderr)
        return None
    return record if kind_of(record) == BENCHMARK and record["status"] == OK else None


def _from(records: Sequence[dict[str, Any]], settings: Any) -> float | None:
    wanted = {name: settings.get(name, FIELDS[name].default) for name in DECISIVE}
    same = [
        record["duration_s"]
        for record in records
        # None is what the machine chooses, so that a record from here has chosen it as well.
        if all(value in (None, record["config"][name]) for name, value in wanted.items())
    ]
    return statistics.median(same) if same else None
