"""Reads numbers, texts, tables and JSON from outside, which may hold anything.

A number is 0, or between `SMALLEST` and `LARGEST` in size: what is computed from a few of them is
finite. A file has a bounded length, and its content a bounded depth, unique keys, and only texts
that can be written as UTF-8.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError

# Everything measured, bought or counted here lies between them, and every loss that fp32 can hold.
SMALLEST, LARGEST = 1e-100, 3e38
# Records have 5 levels, and the deepest config files of others 8.
MAX_DEPTH = 32
TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
# No text that a person wrote has the character.
HAS_NUL = (
    "has the character NUL, as UTF-16 without a mark has where UTF-8 is read: save it as UTF-8"
)
# A sweep of 16,000 cells that are written out has 200,000.
MAX_VALUES = 1_000_000
MAX_FILE_BYTES = 4 * 2**20  # records take about 10 KB
MAX_TABLE_BYTES = 64 * 2**20  # a row of a record takes 1 KB, an event of a training run 200 bytes


def is_bounded(number: float) -> bool:
    """Whether a number is 0, or between `SMALLEST` and `LARGEST` in size; NaN is not."""
    return number == 0 or SMALLEST <= abs(number) <= LARGEST


def read_text(path: Path, *, max_bytes: int = MAX_FILE_BYTES, errors: str = "strict") -> str:
    """Read a UTF-8 text, with or without a byte order mark; else an OSError or a ValueError."""
    if not path.exists():
        raise FileNotFoundError("no such file")
    if not path.is_file():
        raise ValueError("it is not a regular file")  # reading a pipe would block
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is longer than {max_bytes // 2**20} MiB")
    return content.decode("utf-8-sig", errors)


def open_table(path: Path, *, required: Sequence[str] = ()) -> csv.DictReader[str]:
    """The rows of a CSV table; raises as `read_text`, and ValueError if a header lacks a column."""
    return parse_table(read_text(path, max_bytes=MAX_TABLE_BYTES), required=required)


def parse_table(text: str, *, required: Sequence[str] = ()) -> csv.DictReader[str]:
    """The rows of a table as CSV; ValueError if its header lacks a column."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    missing = [column for column in required if column not in (reader.fieldnames or required)]
    if missing:
        raise ValueError(f"it lacks the column {', '.join(missing)}")
    return reader


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; raises as `read_json`."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def read_json(path: Path) -> Any:
    """Read a JSON file from outside; raises as `read_text` and `parse_json`."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Parse JSON; raises ValueError if it is invalid, or a value is out of bounds."""
    try:
        value = json.loads(text, object_pairs_hook=refuse_repeated_keys)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_values(value)
    return value


def check_values(value: Any, *, max_values: int = MAX_VALUES) -> None:
    """Check the content of a JSON or YAML file: its depth, its size, and each number and text.

    A ValueError names the key.
    """
    # Sizes of lists and mappings, by identity and depth. YAML aliases share them: the sum is huge.
    sizes: dict[tuple[int, int], int] = {}

    def size_of(one: Any, place: str, depth: int) -> int:
        if not isinstance(one, dict | list):
            _check_leaf(place, one)
            return 1
        if depth == MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        if (id(one), depth) in sizes:
            return sizes[id(one), depth]
        size = 1
        if isinstance(one, dict):
            for name, part in one.items():
                _check_leaf(place, name)
                size += size_of(part, f"{place}.{name}", depth + 1)
        else:
            for index, part in enumerate(one):
                size += size_of(part, f"{place}[{index}]", depth + 1)
        if size > max_values:
            raise ValueError(f"it has more than {max_values:,} values, aliases included")
        sizes[id(one), depth] = size
        return size

    size_of(value, "$", 0)


def shorten(text: str, *, length: int = 60) -> str:
    """The text, or its beginning if it is long."""
    return text if len(text) <= length else f"{text[:length]}..."


@contextlib.contextmanager
def refuse_errors(what: str, *, value: Any, allowed: str, flag: str) -> Iterator[None]:
    """Make a ConfigError of each error of the block: libraries that read files raise all kinds."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        said = shorten(" ".join(str(error).split()), length=200)
        raise ConfigError(f"{what} ({said})", value=value, allowed=allowed, flag=flag) from error


def _check_leaf(place: str, value: Any) -> None:
    if isinstance(value, int | float) and not is_bounded(value):
        # Python refuses to write a longer integer as text.
        shown = "an integer" if isinstance(value, int) and value.bit_length() > 1000 else value
        raise ValueError(
            f"{place}: {shorten(str(shown))} is no finite number from {SMALLEST:g} to "
            f"{LARGEST:g} in size, or 0"
        )
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{place}: half of a character (a lone surrogate)") from None


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook of `json.loads`: a ValueError for a key that is there twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shorten(repeated)!r} is there twice")
    return content
