"""Reads tables of figures and selects rows of them.

A table is CSV with a header, one row per figure: results/throughput.csv, the copies of other
people's in results/quoted/, or a user's own. It may have any of their columns.
"""

from __future__ import annotations

import csv
import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.escape import for_terminal
from sdbench.base.files import replace_file

# These are names, also where one looks like a number: a GPU called 4090, a commit of digits only.
TEXT_COLUMNS = frozenset(
    {
        "source",
        "kind",
        "gpu",
        "device",
        "latents",
        "precision",
        "engine",
        "status",
        "model",
        "preset",
        "data_format",
        "submitter",
        "read_from",
        "started_utc",
        "git_commit",
        "flags",
        "reason",
    }
)
# Rates and counts must be numbers, or empty cells.
RATE_COLUMNS = ("images_per_second", "images_per_second_low", "images_per_second_high")
COUNT_COLUMNS = ("num_gpus", "image_size", "global_batch", "images_per_step")
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
MEASURED = "measured"
COPY = "copy of a run that is counted"
# Names that an error message offers.
MAX_NAMES = 8


def read_figures(path: Path, *, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read a table of figures.

    Args:
        path: The CSV file, UTF-8.
        required: Columns that the table must have.

    Returns:
        The rows in order, each with every column of the header as a key; an empty cell is None,
        numbers are int or float, ``true`` and ``false`` are bool.

    Raises:
        ConfigError: If the file cannot be read or is no such table.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = _check_header(next(reader, []), path=path, required=required)
            return list(_read_rows(reader, header=header, path=path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _no_table(path, f"cannot be read ({error})") from None


def _check_header(header: list[str], *, path: Path, required: Sequence[str]) -> list[str]:
    if not header:
        raise _no_table(path, "is empty")
    if len(set(header)) < len(header) or not all(header):
        raise _no_table(path, f"has a header with empty or repeated names: {','.join(header)!r}")
    missing = [column for column in required if column not in header]
    if missing:
        raise _no_table(path, f"lacks the column {', '.join(missing)}")
    return header


def _read_rows(
    reader: Iterator[list[str]], *, header: list[str], path: Path
) -> Iterator[dict[str, Any]]:
    parsers = [_parser_of(column) for column in header]
    for number, cells in enumerate(reader, start=1):
        if not cells:
            continue  # a blank line
        if len(cells) != len(header):
            raise _no_table(path, f"has {len(cells)} cells in row {number}, not {len(header)}")
        try:
            values = [parse(cell) for parse, cell in zip(parsers, cells, strict=True)]
        except ValueError as error:
            raise _no_table(path, f"has {error} in row {number}") from None
        yield dict(zip(header, values, strict=True))


def _parser_of(column: str) -> Any:
    if column in TEXT_COLUMNS:
        return _parse_text
    if column in RATE_COLUMNS:
        return functools.partial(_parse_number, column=column, zero_allowed=False)
    if column in COUNT_COLUMNS:
        return functools.partial(_parse_number, column=column, zero_allowed=True)
    return _parse_any


def _parse_text(cell: str) -> str | None:
    return cell or None


@functools.lru_cache(maxsize=4096)
def _parse_any(cell: str) -> Any:
    if not cell:
        return None
    if cell in ("true", "false"):
        return cell == "true"
    if WHOLE_NUMBER.fullmatch(cell):
        return int(cell)
    return float(cell) if NUMBER.fullmatch(cell) else cell


def _parse_number(cell: str, *, column: str, zero_allowed: bool) -> int | float | None:
    value = _parse_any(cell)
    if value is None:
        return None
    if isinstance(value, bool | str) or not (
        0 < value < float("inf") or (zero_allowed and value == 0)
    ):
        raise ValueError(f"{cell!r} as {column}")
    return value


def run_of(row: Mapping[str, Any]) -> str | None:
    """The id of the run that a row is; None if it is no run of this suite."""
    return row.get("source") if row.get("kind") == MEASURED and row.get("started_utc") else None


def mark_copies(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark every further row of a run with the status `COPY`, so that it counts once.

    Args:
        rows: Rows of tables or records.

    Raises:
        ConfigError: If two rows of one run differ in a column that both have.
    """
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


def _no_table(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"the table {what}",
        value=str(path),
        allowed="a CSV file with a header such as source,gpu,num_gpus,image_size,latents,"
        "images_per_second, see results/quoted/",
        flag="the path given",
    )


def parse_conditions(texts: Sequence[str], *, flag: str) -> dict[str, str]:
    """Turn ``COLUMN=VALUE`` texts into conditions on rows.

    Args:
        texts: The conditions.
        flag: The flag that they gave it with.

    Raises:
        ConfigError: For a text without ``=``.
    """
    conditions = {}
    for text in texts:
        column, equals, value = text.partition("=")
        if not (column and equals):
            raise ConfigError(
                "a condition has no column or no value",
                value=text,
                allowed="COLUMN=VALUE, e.g. image_size=512; an empty value is an empty cell",
                flag=flag,
            )
        conditions[column] = value
    return conditions


def select_rows(
    rows: Sequence[dict[str, Any]], conditions: Mapping[str, str], *, flag: str
) -> list[dict[str, Any]]:
    """Keep the rows that meet every condition.

    Args:
        rows: Rows of a table.
        conditions: A value, or the unique beginning of one, by column.
        flag: The flag that they came from.

    Raises:
        ConfigError: If no row has the column, or the value in those that met the conditions before.
    """
    for column, value in conditions.items():
        if not any(column in row for row in rows):
            columns = sorted({column for row in rows for column in row})
            raise ConfigError(
                "no row has this column",
                value=column,
                allowed=nearest(column, columns),
                flag=flag,
            )
        texts = list(dict.fromkeys(as_text(row.get(column)) for row in rows))
        wanted = find_name(value, texts, what=f"no row has this {column}", flag=flag)
        rows = [row for row in rows if as_text(row.get(column)) == wanted]
    return list(rows)


def find_name(name: str, names: Sequence[str], *, what: str, flag: str) -> str:
    """The name that is equal to this one, or the only one that begins with it.

    Args:
        name: The text to look for.
        names: The names that exist.
        what: The error if there is none.
        flag: The flag that they gave it with.

    Raises:
        ConfigError: If none or several of them begin so; it names the nearest.
    """
    if name in names:
        return name
    beginning = [one for one in names if name and one.lower().startswith(name.lower())]
    if len(beginning) == 1:
        return beginning[0]
    if beginning:
        raise ConfigError(
            "several names begin like this",
            value=name,
            allowed=" | ".join(beginning[:MAX_NAMES]),
            flag=flag,
        )
    raise ConfigError(what, value=name, allowed=nearest(name, names), flag=flag)


def nearest(name: str, names: Sequence[str]) -> str:
    """The names most like this one, nearest first, for an error message."""
    by_likeness = sorted(
        names,
        key=lambda one: difflib.SequenceMatcher(None, name.lower(), one.lower()).ratio(),
        reverse=True,
    )
    more = len(names) - MAX_NAMES
    return " | ".join(by_likeness[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def as_text(value: Any) -> str:
    """A value of a row as its cell in the file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def write_out(path: Path, text: str) -> None:
    """Write what a command has made to the file of --out.

    Raises:
        ConfigError: If it cannot be written.
    """
    try:
        replace_file(path, text)
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written ({error.strerror})",
            value=str(path),
            allowed="a file in a folder that exists and that this user may write",
            flag="--out",
        ) from None
    print(f"wrote {for_terminal(path)}")
