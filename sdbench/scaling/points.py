"""Figures from tables and records, steps divided among GPUs, and amounts with a 95 % interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdbench.analysis.compare import CompareFlags
from sdbench.base.errors import ConfigError
from sdbench.base.escape import for_terminal
from sdbench.base.output import fit
from sdbench.measure.phases import GRADIENT_COMMUNICATION
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
from sdbench.report.tables import Field, Table, to_terminal
from sdbench.report.terminal import format_number
from sdbench.settings.kinds import MAX_COUNT, PATH, Kind
from sdbench.settings.setting import setting, shared
from sdbench.statistics.intervals import between_runs_interval, mean_rate
from sdbench.statistics.law import Point, Setup

Row = dict[str, Any]
# A value and the low and high ends of its 95 % interval. NaN: unknown or unbounded.
Amount = np.ndarray

# Figures that differ in one of these columns follow different laws.
KIND_OF_WORK = ("gpu", "latents", "precision", "ema", "model", "preset", "engine")
IMAGE_SIZE = "image_size"
# Seconds that a step waits for gradients: communication that the backward pass does not hide.
COMMUNICATION_S = "gradient_communication_s"
MODELLED = "modelled"
MAX_COUNTS = 1000
OUT_HELP = "write the rows, of the kind modelled, as CSV"


def _parse_counts(text: str) -> tuple[int, ...]:
    """Parse ``8,16,32``, or ``8,16,...,512``, which continues by a factor of 2 or a difference."""
    start, is_continued, end = text.partition(",...,")
    counts = [int(number) for number in start.split(",")]
    if is_continued:
        before, last = counts[-2:]
        doubles, step = last == 2 * before, last - before
        if step <= 0:
            raise ValueError
        while (last := 2 * last if doubles else last + step) <= int(end):
            counts.append(last)
            if len(counts) > MAX_COUNTS:  # here, before a billion of them fill the memory
                raise ValueError
    if len(counts) > MAX_COUNTS or not 1 <= min(counts) <= max(counts) <= MAX_COUNT:
        raise ValueError
    return tuple(sorted(counts))


COUNTS = Kind(
    f"whole numbers above 0, e.g. 8,16,64 or 8,16,...,512; at most {MAX_COUNTS} of them, up to "
    f"{MAX_COUNT:,}",
    _parse_counts,
    "TEXT",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFlags:
    """The figures that a command works with."""

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
    """Read the rows with a figure that meet the conditions of --where, each run once.

    The row of a run also has the seconds that a step waits for gradients.
    """
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
            "a run that does not measure training has no figure for the law",
            value=f"{folder}: {kind_of(record)}",
            allowed="runs of benchmark.py",
            flag="TABLE",
        )
    row = make_row(record)
    summary = record["summary"] or {}
    breakdown = summary.get("breakdown")
    if record["status"] == OK and breakdown and record["ranks"]["world_size"] > 1:
        step_time_s = record["config"]["batch_size"] / summary["images_per_second"]
        # Timing the phases makes a step slower, so their shares are scaled to a measured step. A
        # record of an older version may lack a phase.
        seconds = breakdown["seconds"].get(GRADIENT_COMMUNICATION, 0.0)
        row[COMMUNICATION_S] = step_time_s / breakdown["step_time_s"] * seconds
    return row


def _check_each_once(rows: Sequence[Row]) -> None:
    """Refuse a repeated figure, which the law would count twice."""
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
                f"the figures mix several values of {column}, which have no law in common",
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


def make_points(rows: Sequence[Row], *, micro_batch: int | None = None) -> list[Point]:
    """Make points for a law from rows of one kind of work and one image size.

    Modelled rows are left out. `micro_batch` is for rows without one.
    """
    points = []
    for row in rows:
        if row.get("kind") != MODELLED:
            setup = _make_setup(row, micro_batch=micro_batch)
            rate = float(row["images_per_second"])
            seconds = row.get(COMMUNICATION_S)
            step_time_s = setup.images_per_step / rate
            is_number = isinstance(seconds, int | float)
            if seconds is not None and not (is_number and 0 <= seconds < step_time_s):
                raise ConfigError(
                    "the seconds that a step waits for gradients are not a part of the step",
                    value=as_text(seconds),
                    allowed=f"0 to {step_time_s:.4g}, the whole step (num_gpus {row['num_gpus']})",
                    flag=f"the column {COMMUNICATION_S}",
                )
            points.append(Point(setup, rate, seconds))
    return points


def _make_setup(row: Row, *, micro_batch: int | None) -> Setup:
    size = row["micro_batch"] if row.get("micro_batch") is not None else micro_batch
    images = row.get("images_per_step") or row.get("global_batch")
    for column, value, flag in (
        ("micro_batch", size, "--micro_batch, for rows without one"),
        ("global_batch", images, "the column global_batch or images_per_step"),
    ):
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"a row has no {column} that is a whole number above 0",
                value=as_text(row.get(column)),
                allowed=f"a {column} in every row (num_gpus {row['num_gpus']}, "
                f"{row.get('source')})",
                flag=flag,
            )
    if row.get("images_per_step") and images % row["num_gpus"]:
        raise ConfigError(
            "the images of a step cannot be shared out among the GPUs",
            value=f"images_per_step {images} on {row['num_gpus']} GPUs",
            allowed="a multiple of num_gpus",
            flag="the column images_per_step",
        )
    return split_batch(global_batch=images, num_gpus=row["num_gpus"], micro_batch=size)


def split_batch(*, global_batch: int, num_gpus: int, micro_batch: int) -> Setup:
    """Divide a global batch evenly among GPUs; the remainder is dropped."""
    if global_batch < num_gpus:
        raise ConfigError(
            "a GPU would have no image in a step",
            value=f"{num_gpus} GPUs for a global batch of {global_batch}",
            allowed=f"at most {global_batch} GPUs, or a larger batch",
            flag="--num_gpus and --global_batch",
        )
    return Setup(num_gpus, global_batch // num_gpus, micro_batch)


def setup_columns(setup: Setup) -> Row:
    """The columns of a setup in CSV files and tables."""
    names = ("num_gpus", "images_per_step", "micro_batch", "num_micro_batches", "last_micro_batch")
    return {name: getattr(setup, name) for name in names}


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


def _in_words(amount: Amount, *, unknown: str) -> str:
    """The interval of an amount in words; one end that is not finite is 0 or unbounded."""
    _, low, high = amount
    if math.isnan(low) and math.isnan(high):
        return unknown
    begin = format_number(low) if math.isfinite(low) else "0"
    end = format_number(high) if math.isfinite(high) else "unbounded"
    return f"{begin} to {end}"


def value_field(heading: str, name: str, *, digits: int = 4) -> Field:
    """The column of the values of an amount."""
    return Field(heading, lambda row: _known(row[name][0]), digits)


def whole_field(heading: str, name: str) -> Field:
    """The same, rounded to whole numbers."""
    return Field(heading, lambda row: None if math.isnan(row[name][0]) else round(row[name][0]))


def range_field(heading: str, name: str, *, unknown: str = "") -> Field:
    """The column of the intervals of an amount."""
    return Field(heading, lambda row: _in_words(row[name], unknown=unknown))


def show(lines: Iterable[str], *tables: Table) -> None:
    """Print lines, and tables below them."""
    print("\n".join(fit(for_terminal(line), hanging=2) for line in lines))
    for table in tables:
        print(f"\n{to_terminal(table)}")


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
