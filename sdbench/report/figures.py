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
from sdbench.record.columns import COLUMNS, COUNT, NAME, POSITIVE
from sdbench.settings.kinds import TEXT
from sdbench.settings.setting import setting

# The seconds of a whole run.
TIME = "run_time_s"
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
WORD = re.compile(r"[^\W_]+")
# Columns with the names of devices.
DEVICES = ("gpu", "device")
MEASURED, QUOTED = "measured", "quoted"
COPY = "copy of a run that is counted"
# Names in an error message.
MAX_NAMES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceFlags:
    """The flag of all commands that use some rows of a table: see `select_rows`."""

    where: tuple[str, ...] = setting(
        TEXT,
        (),
        "COLUMN=VALUE: use only rows with this value, given in full, or by a beginning or words "
        "that no other has; gpu=A100 means each GPU with A100 in its name",
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
        holds = holds_of(column)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_wrong = (
            (is_number and not is_bounded(value))
            or (holds == POSITIVE and not (is_number and value > 0))
            or (holds == COUNT and not (type(value) is int and value >= 0))
        )
        if value is not None and is_wrong:
            raise ValueError(f"{shorten(cells[column])!r} as {shorten(column)} in row {number}")
    return row


def holds_of(column: str | None) -> str | None:
    """What the cells of a column hold, a word of `columns`; None: not known."""
    return COLUMNS[column].holds if column in COLUMNS else None


def _parse_cell(cell: str, column: str) -> Any:
    if not cell:
        return None
    if holds_of(column) == NAME:
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


def names_device(text: str, name: str) -> bool:
    """Whether a text means a device: all of its words are in the device's name, in any case.

    So ``A100`` means both A100-40GB and NVIDIA A100-SXM4-80GB, and ``H100 PCIe`` no other H100. A
    number may lack its unit, and letters their number: ``A100 SXM 80``, but no ``A10`` or ``A``.
    """
    words, of_name = (WORD.findall(one.lower()) for one in (text, name))
    return bool(words) and all(any(_means(one, other) for other in of_name) for one in words)


def _means(word: str, other: str) -> bool:
    rest = other.removeprefix(word)
    lacks_number = len(word) > 1 and word.isalpha() and rest.isdigit()
    lacks_unit = word.isdigit() and rest.isalpha()
    return word == other or (other.startswith(word) and (lacks_number or lacks_unit))


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
    """Keep the rows that meet every condition of --where: a value, or what `find_name` finds.

    A GPU may be named by words that several have, as ``A100`` is; the rows of all of them stay.
    """
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
        wanted = [one for one in texts if column in DEVICES and names_device(value, one)]
        if value in texts or not wanted:
            wanted = [find_name(value, texts, what=f"no row has this {column}", flag="--where")]
        rows = [row for row in rows if as_text(row.get(column)) in wanted]
    return list(rows)


def find_name(name: str, names: Sequence[str], *, what: str, flag: str) -> str:
    """The name that equals this text, or the only one that it can mean; else a ConfigError.

    It means those that begin with it, or if there are none those that have all of its words.
    """
    if name in names:
        return name
    meant = [one for one in names if name and one.lower().startswith(name.lower())]
    meant = meant or [one for one in names if names_device(name, one)]
    if len(meant) == 1:
        return meant[0]
    raise ConfigError(
        "this may mean several names" if meant else what,
        value=name,
        allowed=nearest_names(name, meant or names),
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
