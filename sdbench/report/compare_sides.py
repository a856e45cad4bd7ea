"""The two sides of a comparison: two tables or folders with records, or one split by a column."""

from __future__ import annotations

import dataclasses
import datetime
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
from sdbench.report.runs import read_record, use_each
from sdbench.statistics.occasions import Time

Row = dict[str, Any]

VERSION_PREFIX = "version of "
VARIABLE_PREFIX = "variable "
NOT_INSTALLED = "not installed"
# Columns that records have and tables have not: the time of the run, ...
WHEN = "time of the run"
# ... figures of the machine at that time, each with its name in the record and its unit, ...
PRODUCT = "matmul_tflops"
GPU_READINGS = {
    "clock of the GPU": ("sm_clock_mhz", "MHz"),
    "temperature of the GPU": ("temperature_c", "C"),
}
MACHINE_FIGURES = {
    PRODUCT: ("matrix product", "TFLOP/s"),
    **{name: (name, unit) for name, (_, unit) in GPU_READINGS.items()},
}
# ... and other facts that are not settings.
UNCOMMITTED = "uncommitted changes"
WEIGHTS = "weights of the model"
POWER_LIMIT = "power limit of the GPU in W"
FACTS = (UNCOMMITTED, WEIGHTS, POWER_LIMIT)
UNREADABLE = "record that cannot be read"


class NothingToCompareError(ConfigError):
    """No figure of one side has a counterpart on the other."""


@dataclasses.dataclass(frozen=True)
class Side:
    """The figures of one side, and the number of rows left out by reason."""

    name: str
    rows: Sequence[Row]
    left_out: Counter[str]

    @property
    def is_of_records(self) -> bool:
        """Whether all rows are from records, which have every setting."""
        return all(f"{VERSION_PREFIX}python" in row for row in self.rows)

    def describe_left_out(self) -> str:
        """Rows left out, e.g. ``2 x oom, 1 x failed``."""
        return ", ".join(f"{number} x {reason}" for reason, number in self.left_out.items())


def load_rows(path: Path) -> list[Row]:
    """Read a table in CSV, or the records in a folder at any depth.

    A further copy of a run has the status `COPY`. A record that cannot be read is named on stderr
    and has a row with the status `UNREADABLE`.
    """
    if not path.is_dir():
        rows = read_figures(path, required=("images_per_second",))
        return mark_copies([{**row, **tell_time(row.get("started_utc"), of=path)} for row in rows])
    files = sorted(path.rglob(RECORD_NAME))
    if not files:
        raise ConfigError(
            "this folder holds no run",
            value=str(path),
            allowed=f"a folder with a {RECORD_NAME} in it or below, or a table in CSV",
            flag="the path given",
        )
    rows, left_out = use_each(files, _load_run)
    return [*mark_copies(rows), *({"status": UNREADABLE} for _ in left_out)]


def make_side(name: str, rows: Iterable[Row]) -> Side:
    """Keep the rows that have a figure, of which there must be one, and count the others."""
    kept, left_out = [], Counter()
    side = Side(name, kept, left_out)
    for row in rows:
        if row.get("status") not in (None, OK):
            left_out[row["status"]] += 1
        elif row.get("images_per_second") is None:
            left_out["no images_per_second"] += 1
        else:
            kept.append(row)
    if not kept:
        raise NothingToCompareError(
            f"no row on this side has a figure ({side.describe_left_out() or 'it has no rows'})",
            value=name,
            allowed="at least one row with images_per_second and the status ok",
            flag="the path given, --where, --baseline or --candidate",
        )
    return side


def check_distinct(baseline: Side, candidate: Side) -> None:
    """Raise a ConfigError if a run, or the whole table, is on both sides."""
    runs = [dict.fromkeys(map(run_of, side.rows)) for side in (baseline, candidate)]
    both = [run for run in runs[0] if run is not None and run in runs[1]]
    if both or baseline.rows == candidate.rows:
        raise ConfigError(
            f"{len(both) or 'all'} of the {'runs' if both else 'figures'} are on both sides, and "
            "what is compared with itself shows nothing",
            value=both[0] if both else f"{baseline.name} and {candidate.name}",
            allowed="two sides that share none",
            flag="A B or --where",
        )


def split(
    rows: Sequence[Row], *, column: str, baseline: str | None, candidate: str | None
) -> tuple[Side, Side]:
    """Split rows into two sides by the value in a column.

    Without `baseline` and `candidate`, values or their beginnings, the column must have two values.
    """
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
            f"two values of {column} are compared, and there are {len(names)} to choose from",
            value=[name for name in (baseline, candidate) if name is not None],
            allowed=nearest_names("", names),
            flag="--baseline and --candidate",
        )
    what = f"no row has this {column}"
    first, second = names[0], names[-1]
    if baseline is not None:
        first = find_name(baseline, names, what=what, flag="--baseline")
    if candidate is not None:
        second = find_name(candidate, names, what=what, flag="--candidate")
    if first == second:
        raise ConfigError(
            "baseline and candidate are the same",
            value=first,
            allowed=f"two different ones of {nearest_names(first, names)}",
            flag="--baseline and --candidate",
        )
    return tuple(
        make_side(name, [row for row in rows if as_text(row.get(column)) == name])
        for name in (first, second)
    )


def _load_run(file: Path) -> Row:
    record = read_record(file, flag="the path given")
    if kind_of(record) != BENCHMARK:
        return {"status": f"{kind_of(record)}, which is no training"}
    return row_of_run(record)


def row_of_run(record: dict[str, Any]) -> Row:
    """The row of a run of benchmark.py, with the columns that only records have."""
    settings = {
        name: value for name, value in settings_of(record).items() if name not in IN_COLUMNS
    }
    versions = {name: one or NOT_INSTALLED for name, one in record["versions"].items()}
    versions["driver"] = record["machine"].get("driver")
    gpu = (record["summary"] or {}).get("gpu") or {}
    return {
        **settings,
        **make_row(record),
        **{f"{VERSION_PREFIX}{name}": version for name, version in versions.items()},
        **{f"{VARIABLE_PREFIX}{name}": value for name, value in record["environment"].items()},
        **{name: gpu.get(reading) for name, (reading, _) in GPU_READINGS.items()},
        UNCOMMITTED: record["git"]["dirty"],
        WEIGHTS: record["workload"]["weights"],
        POWER_LIMIT: gpu.get("power_limit_w"),
        **tell_time(
            record["started_utc"], of=record["run_id"], duration_s=record["duration_s"] or 0.0
        ),
    }


def tell_time(
    started_utc: str | None, *, of: str | Path, duration_s: float = 0.0
) -> dict[str, Time]:
    """The cell with the time of a run, given in ISO 8601; empty without one."""
    if started_utc is None:
        return {}
    try:
        # Python 3.10 reads no Z. A time without a zone is in UTC.
        started = datetime.datetime.fromisoformat(started_utc.removesuffix("Z"))
        if started.tzinfo is None:
            started = started.replace(tzinfo=datetime.timezone.utc)
        return {WHEN: Time(started.timestamp(), duration_s)}
    except (ValueError, OverflowError):
        raise ConfigError(
            "when a run was started cannot be read",
            value=started_utc,
            allowed="a time such as 2026-11-21T05:48:24+00:00",
            flag=f"started_utc of {of}",
        ) from None
