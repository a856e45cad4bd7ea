"""Images/s from tables and records, and amounts with a 95 % interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdbench.analysis.compare import CompareFlags
from sdbench.base.errors import ConfigError
from sdbench.record.row import format_csv, make_row
from sdbench.record.store import BENCHMARK, OK, kind_of
from sdbench.report.figures import (
    MEASURED,
    as_text,
    mark_copies,
    read_figures,
    select_rows,
    write_out,
)
from sdbench.report.runs import read_record
from sdbench.report.tables import Field
from sdbench.report.terminal import format_number
from sdbench.settings.kinds import PATH
from sdbench.settings.setting import setting, shared
from sdbench.statistics.intervals import between_runs_interval, mean_rate

Row = dict[str, Any]
# A value and the low and high ends of its 95 % interval. NaN: unknown.
Amount = np.ndarray

# Figures that differ in one of these columns are of different work.
KIND_OF_WORK = ("gpu", "latents", "precision", "ema", "model", "preset", "engine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFlags:
    """The figures that a training is timed by."""

    tables: tuple[Path, ...] = setting(
        PATH,
        (),
        "figures in CSV, or folders of runs",
        is_positional=True,
        takes_several=True,
        spelling="[TABLE ...]",
    )
    where: tuple[str, ...] = shared(CompareFlags, "where")


def read_rows(arguments: TableFlags) -> list[Row]:
    """Read the rows with a figure that meet the conditions of --where, each run once."""
    required = ("num_gpus", "images_per_second")
    rows = mark_copies(
        row
        for path in arguments.tables
        for row in ([_row_of_run(path)] if path.is_dir() else read_figures(path, required=required))
    )
    rows = select_rows(rows, arguments.where)
    rows = [
        row
        for row in rows
        if row.get("status") in (None, OK)
        and row["images_per_second"] is not None
        and row["num_gpus"]
    ]
    if not rows:
        raise ConfigError(
            "no row has a figure of a GPU",
            value=" ".join(map(str, arguments.tables)),
            allowed="rows with num_gpus and images_per_second whose status is ok",
            flag="TABLE and --where",
        )
    _check_each_once(rows)
    return rows


def _row_of_run(folder: Path) -> Row:
    record = read_record(folder, flag="TABLE")
    if kind_of(record) != BENCHMARK:
        raise ConfigError(
            "only runs that measure training have a figure to count with",
            value=f"{folder}: {kind_of(record)}",
            allowed="runs of benchmark.py",
            flag="TABLE",
        )
    return make_row(record)


def _check_each_once(rows: Sequence[Row]) -> None:
    """Refuse a repeated figure, which a mean would count twice."""
    different = {frozenset(cell for cell in row.items() if cell[1] is not None) for row in rows}
    if len(different) < len(rows):
        raise ConfigError(
            "a row occurs twice, and would count as two figures",
            value=f"{len(rows)} rows, {len(different)} of them different",
            allowed="each figure once; repeated measurements differ in a column, e.g. source",
            flag="TABLE",
        )


def check_one_kind(rows: Sequence[Row], columns: Sequence[str] = KIND_OF_WORK) -> None:
    """Refuse rows that differ in one of the columns. Empty cells do not count."""
    for column in columns:
        values = known_values(rows, column)
        if len(values) > 1:
            raise ConfigError(
                f"the figures mix several values of {column}, and a cost is for one",
                value=" and ".join(map(as_text, values)),
                allowed=f"one {column}",
                flag=f"--where {column}=...",
            )


def known_values(rows: Sequence[Row], column: str) -> list[Any]:
    """Return the distinct values of a column without empty cells."""
    return list(dict.fromkeys(row[column] for row in rows if row.get(column) is not None))


def first_known(rows: Sequence[Row], column: str) -> Any:
    """Return the first value of a column; None if the column is empty."""
    return next(iter(known_values(rows, column)), None)


def describe_sources(rows: Sequence[Row]) -> str:
    """The sources of the rows, or their number if there are many."""
    sources = known_values(rows, "source")
    return f"{len(sources)} sources" if len(sources) > 3 else " and ".join(map(as_text, sources))


def rate_of(rows: Sequence[Row]) -> Amount:
    """Return images/s of one configuration; three or more runs give a between-runs interval."""
    check_one_kind(rows, ("kind", "micro_batch", "global_batch"))
    figures = [float(row["images_per_second"]) for row in rows]
    if len(rows) == 1:
        ends = (rows[0].get(f"images_per_second_{end}") for end in ("low", "high"))
        return make_amount(figures[0], *ends)
    if any(row.get("kind") != MEASURED for row in rows):
        check_one_kind(rows, ("source",))
    mean, interval = mean_rate(figures), between_runs_interval(figures)
    return make_amount(mean, interval.low, interval.high) if interval else make_amount(mean)


def make_amount(value: float, low: float | None = None, high: float | None = None) -> Amount:
    """Make an amount; an end that is None is unknown."""
    return np.array([value, low, high], dtype=float)


def swap_ends(amount: Amount) -> Amount:
    """Return the amount with swapped ends, to divide by it."""
    return amount[[0, 2, 1]]


def _in_words(amount: Amount) -> str:
    """The interval of an amount in words; a single unknown end is 0 or unbounded."""
    _, low, high = amount
    if math.isnan(low) and math.isnan(high):
        return ""
    begin = format_number(low) if math.isfinite(low) else "0"
    end = format_number(high) if math.isfinite(high) else "unbounded"
    return f"{begin} to {end}"


def value_field(heading: str, name: str) -> Field:
    """The column of the values of an amount."""
    return Field(heading, lambda row: _known(row[name][0]))


def whole_field(heading: str, name: str) -> Field:
    """The same, rounded to whole numbers."""
    return Field(heading, lambda row: None if math.isnan(row[name][0]) else round(row[name][0]))


def range_field(heading: str, name: str) -> Field:
    """The column of the intervals of an amount."""
    return Field(heading, lambda row: _in_words(row[name]))


def write_rows(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to the CSV file of --out, if there is one; an amount has three columns."""
    if path is None:
        return
    written = []
    for row in rows:
        cells = dict(row)
        for name, value in row.items():
            if isinstance(value, np.ndarray):
                ends = zip(("", "_low", "_high"), value, strict=True)
                cells |= {f"{name}{end}": _known(number) for end, number in ends}
        written.append(cells)
    print()
    write_out(path, format_csv(written, columns=tuple(written[0])))


def _known(number: float) -> float | None:
    return None if math.isnan(number) else float(number)
