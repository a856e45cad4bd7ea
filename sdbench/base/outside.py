"""Bounds of what comes from outside: numbers, and files of others, which may hold anything.

A number is finite, at most `LARGEST` and, unless it is 0, at least `SMALLEST`: what is computed
from a few of them is finite too. A file has a bounded length, and its content a bounded depth, no
key twice, and only texts that can be written as UTF-8.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Between them is all that is measured, bought or counted here, and the losses that fp32 can hold.
SMALLEST, LARGEST = 1e-100, 3e38
# Records have 5 levels, and the deepest config files of others 8.
MAX_DEPTH = 32
MAX_FILE_BYTES = 4 * 2**20  # records take about 10 KB
MAX_TABLE_BYTES = 64 * 2**20  # a row of a record takes 1 KB, an event of a training run 200 bytes


def is_bounded(number: float) -> bool:
    """Whether a number is 0, or between `SMALLEST` and `LARGEST` in size; NaN is not."""
    return number == 0 or SMALLEST <= abs(number) <= LARGEST


def read_text(path: Path, *, max_bytes: int = MAX_FILE_BYTES, errors: str = "strict") -> str:
    """Read a text in UTF-8, with or without a byte order mark.

    Args:
        path: Of the file.
        max_bytes: Longest file that is read.
        errors: ``replace`` takes bytes that are no UTF-8 as well, as `bytes.decode` has it.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no file, longer than `max_bytes`, or no UTF-8.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")  # a pipe would be waited for
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is longer than {max_bytes // 2**20} MiB")
    return content.decode("utf-8-sig", errors)


def open_table(path: Path) -> io.StringIO:
    """Read a table in CSV, as `csv.reader` takes it.

    Raises:
        OSError: The file cannot be read.
        ValueError: As `read_text`.
    """
    return io.StringIO(read_text(path, max_bytes=MAX_TABLE_BYTES), newline="")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        OSError: The file cannot be read.
        ValueError: As `read_json`, or it holds something else.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def read_json(path: Path) -> Any:
    """Read a JSON file of another program or another machine.

    Raises:
        OSError: The file cannot be read.
        ValueError: As `read_text`; it is no JSON, or a value of it is out of bounds.
    """
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: It is none, or a value of it is out of bounds.
    """
    try:
        value = json.loads(text, object_pairs_hook=refuse_repeated_keys)
    except RecursionError:
        raise ValueError(too_deep()) from None
    check_values(value)
    return value


def check_values(value: Any) -> None:
    """Check what was read from a file.

    Args:
        value: Mappings, lists, texts, numbers; others are left to their reader.

    Raises:
        ValueError: It is too deep, or a number or a text is out of bounds; says where.
    """
    left = [("$", value, 0)]
    while left:
        place, one, depth = left.pop()
        if isinstance(one, dict | list) and depth == MAX_DEPTH:
            raise ValueError(too_deep())
        if isinstance(one, dict):
            for name in one:
                _check_leaf(place, name)
        left += ((inner, part, depth + 1) for inner, part in _parts_of(place, one))
        _check_leaf(place, one)


def too_deep() -> str:
    """What is wrong with a file that is nested too deeply."""
    return f"it is nested more than {MAX_DEPTH} levels deep"


def shorten(text: str, *, length: int = 60) -> str:
    """The text, or its beginning if it is long."""
    return text if len(text) <= length else f"{text[:length]}..."


def _parts_of(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{place}.{name}", part) for name, part in value.items())
    elif isinstance(value, list):
        yield from ((f"{place}[{index}]", part) for index, part in enumerate(value))


def _check_leaf(place: str, value: Any) -> None:
    if isinstance(value, int | float) and not is_bounded(value):
        # The text of a longer integer is refused by Python.
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
    """The object of these pairs, as `object_pairs_hook` of `json.loads`.

    Raises:
        ValueError: A key is there twice: one of its values would be lost.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shorten(repeated)!r} is there twice")
    return content
