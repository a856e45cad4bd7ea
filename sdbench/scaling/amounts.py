"""Amounts with a 95 % interval: how they are computed, shown in a table and written to CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdbench.base.escape import for_terminal
from sdbench.record.row import format_csv
from sdbench.report.figures import write_out
from sdbench.report.tables import Field, Table, to_terminal
from sdbench.report.terminal import format_number

# A value and the low and high ends of its 95 % interval. NaN: unknown or unbounded.
Amount = np.ndarray


def make_amount(value: float, low: float | None = None, high: float | None = None) -> Amount:
    """Make an amount; an end that is None is unknown."""
    return np.array([value, low, high], dtype=float)


def swap_ends(amount: Amount) -> Amount:
    """Return the amount with swapped ends, to divide by it."""
    return amount[[0, 2, 1]]


def in_words(amount: Amount, *, unknown: str) -> str:
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
    return Field(heading, lambda row: in_words(row[name], unknown=unknown))


def show(lines: Iterable[str], *tables: Table) -> None:
    """Print lines, and tables below them."""
    print("\n".join(map(for_terminal, lines)))
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
