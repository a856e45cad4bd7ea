"""Loads the two sides of a comparison: tables in CSV, or folders with records."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.record.configuration import IN_COLUMNS, settings_of
from sdbench.record.row import make_row
from sdbench.record.store import BENCHMARK, OK, RECORD_NAME, kind_of
from sdbench.report.figures import (
    as_text,
    find_name,
    mark_copies,
    nearest_names,
    read_figures,
    run_of,
)
from sdbench.report.runs import read_record, read_time, use_each

Row = dict[str, Any]

# Columns that rows of records have and rows of tables lack: versions, environment variables, ...
VERSION_PREFIX = "version of "
VARIABLE_PREFIX = "variable "
# ... and other facts. Only the time of the run is also in rows of tables.
WHEN = "time of the run"
UNCOMMITTED = "uncommitted changes"
WEIGHTS = "weights of the model"
POWER_LIMIT = "power limit of the GPU in W"
UNREADABLE = "record that cannot be read"


@dataclasses.dataclass(frozen=True)
class Side:
    """The rows of one side that have a rate, and the number of rows left out by reason."""

    name: str
    rows: Sequence[Row]
    left_out: Counter[str]

    def describe_left_out(self) -> str:
        """The rows left out, e.g. ``2 x oom, 1 x failed``."""
        return ", ".join(f"{number} x {reason}" for reason, number in self.left_out.items())


def load_rows(path: Path) -> list[Row]:
    """Read a table in CSV, or the records in a folder at any depth.

    A further copy of a run has the status `COPY`. A record that cannot be read is named on stderr
    and has a row with the status `UNREADABLE`.
    """
    if not path.is_dir():
        rows = read_figures(path, required=("images_per_second",))
        return mark_copies(
            {**row, WHEN: read_time(row.get("started_utc"), of=path)} for row in rows
        )
    files = sorted(path.rglob(RECORD_NAME))
    if not files:
        raise ConfigError(
            "this folder holds no run",
            value=str(path),
            allowed=f"a folder with a {RECORD_NAME} in it or below, or a table in CSV",
            flag="the path given",
        )
    rows, unreadable = use_each(files, _load_run)
    return [*mark_copies(rows), *({"status": UNREADABLE} for _ in unreadable)]


def make_side(name: str, rows: Iterable[Row]) -> Side:
    """Make a side of the rows that have a rate. Raises ConfigError if no row has one."""
    side = Side(name, [], Counter())
    for row in rows:
        if row.get("status") not in (None, OK):
            side.left_out[row["status"]] += 1
        elif row.get("images_per_second") is None:
            side.left_out["no images_per_second"] += 1
        else:
            side.rows.append(row)
    if not side.rows:
        raise ConfigError(
            f"no row on this side has a figure ({side.describe_left_out() or 'it has no rows'})",
            value=name,
            allowed="at least one row with images_per_second and the status ok",
            flag="the path given, --where, --baseline or --candidate",
        )
    return side


def check_distinct(baseline: Side, candidate: Side) -> None:
    """Raise ConfigError if a run, or the whole table, is on both sides."""
    runs = {run_of(row) for row in baseline.rows} - {None}
    both = [run for row in candidate.rows if (run := run_of(row)) in runs]
    if both or baseline.rows == candidate.rows:
        raise ConfigError(
            f"{len(both) or 'all'} of the {'runs' if both else 'figures'} are on both sides",
            value=both[0] if both else f"{baseline.name} and {candidate.name}",
            allowed="two sides with different runs",
            flag="A B or --where",
        )


def split(
    rows: Sequence[Row], *, column: str, baseline: str | None, candidate: str | None
) -> tuple[Side, Side]:
    """Split rows by two values of a column, given by their beginnings unless it has only two."""
    names = list(dict.fromkeys(as_text(row[column]) for row in rows if row.get(column) is not None))
    if not names:
        raise ConfigError(
            "no row has a value in this column",
            value=column,
            allowed=nearest_names(column, sorted({name for row in rows for name in row})),
            flag="--between",
        )
    if len(names) != 2 and None in (baseline, candidate):
        raise ConfigError(
            f"the column {column} has {len(names)} values, and two are compared",
            value=[name for name in (baseline, candidate) if name is not None],
            allowed=f"two of {nearest_names('', names)}",
            flag="--baseline and --candidate",
        )
    sides = []
    for name, other, flag in (
        (baseline, names[0], "--baseline"),
        (candidate, names[-1], "--candidate"),
    ):
        what = f"no row has this {column}"
        found = other if name is None else find_name(name, names, what=what, flag=flag)
        sides.append(make_side(found, [row for row in rows if as_text(row.get(column)) == found]))
    return tuple(sides)


def _load_run(file: Path) -> Row:
    record = read_record(file, flag="the path given")
    if kind_of(record) != BENCHMARK:
        return {"status": f"{kind_of(record)}, which is not a training run"}
    return row_of_run(record)


def row_of_run(record: dict[str, Any]) -> Row:
    """The row of a run of benchmark.py, with the columns that only records have."""
    settings = {
        name: value for name, value in settings_of(record).items() if name not in IN_COLUMNS
    }
    versions = {name: one or "not installed" for name, one in record["versions"].items()}
    versions["driver"] = record["machine"]["driver"]
    gpu = (record["summary"] or {}).get("gpu") or {}
    time = read_time(record["started_utc"], of=record["run_id"])
    return {
        **settings,
        **make_row(record),
        **{f"{VERSION_PREFIX}{name}": version for name, version in versions.items()},
        **{f"{VARIABLE_PREFIX}{name}": value for name, value in record["environment"].items()},
        UNCOMMITTED: record["git"]["dirty"],
        WEIGHTS: record["workload"]["weights"],
        POWER_LIMIT: gpu.get("power_limit_w"),
        WHEN: time._replace(duration_s=record["duration_s"] or 0.0),
    }
