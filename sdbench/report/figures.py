"""Reads tables of figures in CSV, and selects rows of them.

A table has a header and one row per figure: results/throughput.csv, other people's figures in
results/quoted/, or a user's own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.carried import find_table
from sdbench.base.errors import ConfigError
from sdbench.base.escape import for_terminal
from sdbench.base.files import refused_unless_read, refused_unless_written, replace_file
from sdbench.base.names import by_similarity
from sdbench.base.outside import LARGEST, SMALLEST, is_bounded, open_table, shorten
from sdbench.settings.kinds import TEXT
from sdbench.settings.setting import setting

# Columns of names, which stay text even if one looks like a number: a GPU called 4090.
TEXT_COLUMNS = frozenset(
    (
        *("source", "kind", "gpu", "device", "latents", "precision", "engine", "status", "model"),
        *("preset", "data_format", "submitter", "read_from", "started_utc", "git_commit", "flags"),
        "reason",
    )
)
# The seconds of a whole run.
TIME = "run_time_s"
# Rates and times must be positive, and counts whole and not negative; cells may be empty.
POSITIVE_COLUMNS = (
    *("images_per_second", "images_per_second_low", "images_per_second_high", "matmul_tflops"),
    *(TIME, "minutes_to_target", "teraflop_per_image"),
)
COUNT_COLUMNS = (
    *("num_gpus", "image_size", "global_batch", "images_per_step", "num_runs", "num_images"),
)
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
MEASURED = "measured"
COPY = "copy of a run that is counted"
# Names in an error message.
MAX_NAMES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceFlags:
    """The flag of all commands that use some rows of a table: see `select_rows`."""

    where: tuple[str, ...] = setting(
        TEXT,
        (),
        "COLUMN=VALUE: use only rows with this value, given in full or by an unambiguous beginning",
        takes_several=True,
    )


def read_figures(path: Path, *, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read the rows of a table of figures, each with every column of the header as a key.

    The path is one for `find_table`, which may be the name of a table of the suite.
    An empty cell is None, numbers are int or float within bounds, ``true`` and ``false`` are bool.
    Raises ConfigError if the file cannot be read or is no such table.
    """
    allowed = (
        "a CSV file with a header such as source,gpu,num_gpus,image_size,latents,"
        f"images_per_second, see results/quoted/, and numbers of {SMALLEST:g} to {LARGEST:g}"
    )
    path = find_table(path)
    with refused_unless_read(path, "the table", allowed=allowed, flag="the path given"):
        reader = open_table(path, required=required)
        header = reader.fieldnames or []
        if not header or len(set(header)) < len(header) or not all(header):
            names = shorten(",".join(header))
            raise ValueError(f"its header is empty, or has empty or repeated names: {names!r}")
        return [_parse_row(row, number=number) for number, row in enumerate(reader, start=1)]


def _parse_row(cells: Mapping[str | None, str | None], *, number: int) -> dict[str, Any]:
    """The values of a row of `csv.DictReader`."""
    if None in cells or None in cells.values():
        raise ValueError(f"row {number} has more or fewer cells than the header")
    row = {column: _parse_cell(cell, column) for column, cell in cells.items()}
    for column, value in row.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_wrong = (
            (is_number and not is_bounded(value))
            or (column in POSITIVE_COLUMNS and not (is_number and value > 0))
            or (column in COUNT_COLUMNS and not (type(value) is int and value >= 0))
        )
        if value is not None and is_wrong:
            raise ValueError(f"{shorten(cells[column])!r} as {shorten(column)} in row {number}")
    return row


def _parse_cell(cell: str, column: str) -> Any:
    if not cell:
        return None
    if column in TEXT_COLUMNS:
        return cell
    if cell in ("true", "false"):
        return cell == "true"
    if WHOLE_NUMBER.fullmatch(cell):
        return int(cell)
    return float(cell) if NUMBER.fullmatch(cell) else cell


def run_of(row: Mapping[str, Any]) -> str | None:
    """The run id of a row; None if it is not a run of this suite."""
    return row.get("source") if row.get("kind") == MEASURED and row.get("started_utc") else None


def device_of(row: Mapping[str, Any]) -> str | None:
    """The device of a figure: its GPU if it has one."""
    return row.get("gpu") or row.get("device")


def describe_source(row: Mapping[str, Any]) -> str | None:
    """The source of a figure, with who submitted it and where it was read."""
    parts = (row.get(name) for name in ("source", "submitter", "read_from"))
    return ", ".join(str(part) for part in parts if part is not None) or None


def describe_origin(row: Mapping[str, Any]) -> str:
    """The source of a figure; of measured ones, the ``folder`` with their runs."""
    if row["kind"] == MEASURED:
        return row["folder"]
    return describe_source(row) or "source not told"


def mark_copies(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give further rows of a run the status `COPY`. Rows of one run that differ are refused."""
    first: dict[str, dict[str, Any]] = {}
    marked = []
    for row in rows:
        run = run_of(row)
        original = row if run is None else first.setdefault(run, row)
        differing = [name for name in row if row[name] != original.get(name, row[name])]
        if differing:
            name = differing[0]
            raise ConfigError(
                f"two rows or records with one run id differ in {name}, so they are not one run",
                value=f"{run}: {as_text(original[name])} and {as_text(row[name])}",
                allowed="a run as it was recorded, any number of times",
                flag="the path given",
            )
        marked.append(row if original is row else {**row, "status": COPY})
    return marked


def select_rows(rows: Sequence[dict[str, Any]], conditions: Sequence[str]) -> list[dict[str, Any]]:
    """Keep the rows that meet every condition of --where: a value, or the beginning of one."""
    values = {}
    for text in conditions:
        column, equals, values[column] = text.partition("=")
        if not (column and equals):
            raise ConfigError(
                "a condition has no column or no value",
                value=text,
                allowed="COLUMN=VALUE, e.g. image_size=512; an empty value is an empty cell",
                flag="--where",
            )
    for column, value in values.items():
        columns = sorted({name for row in rows for name in row})
        if column not in columns:
            raise ConfigError(
                "no row has this column",
                value=column,
                allowed=nearest_names(column, columns),
                flag="--where",
            )
        texts = list(dict.fromkeys(as_text(row.get(column)) for row in rows))
        wanted = find_name(value, texts, what=f"no row has this {column}", flag="--where")
        rows = [row for row in rows if as_text(row.get(column)) == wanted]
    return list(rows)


def find_name(name: str, names: Sequence[str], *, what: str, flag: str) -> str:
    """The name that equals this text, or the only one that begins with it; else a ConfigError."""
    if name in names:
        return name
    beginning = [one for one in names if name and one.lower().startswith(name.lower())]
    if len(beginning) == 1:
        return beginning[0]
    raise ConfigError(
        "several names begin like this" if beginning else what,
        value=name,
        allowed=nearest_names(name, beginning or names),
        flag=flag,
    )


def nearest_names(name: str, names: Sequence[str]) -> str:
    """The names most like this one, nearest first, for an error message."""
    shown = " | ".join(by_similarity(name, names)[:MAX_NAMES])
    more = len(names) - MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def as_text(value: Any) -> str:
    """The text of a value in a CSV file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def write_out(path: Path, text: str) -> None:
    """Write the output of a command to the file given with --out."""
    with refused_unless_written(path, what="the file", flag="--out"):
        replace_file(path, text)
    print(f"wrote {for_terminal(path.absolute())}")
