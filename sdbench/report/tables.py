"""A table of cells, which markdown, HTML and the terminal show alike."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sdbench.base.escape import for_markdown
from sdbench.report.terminal import NOT_KNOWN, format_number

# The most rows that a page shows; the CSV files have all.
MAX_ROWS = 1000


@dataclasses.dataclass(frozen=True)
class Cell:
    """The text that a cell shows and the value that it is sorted by (None sorts last)."""

    text: str
    value: float | str | None


@dataclasses.dataclass(frozen=True)
class Column:
    """A column's heading and whether its cells are aligned right."""

    name: str
    is_number: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with a caption.

    Attributes:
        name: Anchor of the table in a page, e.g. ``512px-online``.
        caption: One line of plain text.
        columns: As many as every row has cells.
        rows: Cells by row.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    @property
    def kind_column(self) -> int | None:
        """Index of the column that says whether a row is measured, quoted or modelled."""
        names = [column.name for column in self.columns]
        return names.index("kind") if "kind" in names else None

    @property
    def shown_rows(self) -> Sequence[Sequence[Cell]]:
        """The first `MAX_ROWS` rows."""
        return self.rows[:MAX_ROWS]

    @property
    def num_hidden_rows(self) -> int:
        """Number of rows beyond `MAX_ROWS`."""
        return len(self.rows) - len(self.shown_rows)

    def without_empty_columns(self) -> Table:
        """The table without the columns whose value is None in every row."""
        kept = [
            index
            for index in range(len(self.columns))
            if any(row[index].value is not None for row in self.rows)
        ]
        return dataclasses.replace(
            self,
            columns=[self.columns[index] for index in kept],
            rows=[[row[index] for index in kept] for row in self.rows],
        )


def make_table(
    rows: Iterable[Mapping[str, Any]],
    *,
    name: str = "",
    caption: str = "",
    left: Collection[str] = (),
) -> Table:
    """A table from rows by heading; columns are in the order in which headings first occur.

    Args:
        rows: Cells, or values for `make_cell`. A heading that a row lacks is an unknown value.
        name: See `Table`.
        caption: See `Table`.
        left: Headings of columns that are aligned left; so is every column with a text in it.
            The others are aligned right.
    """
    rows = [
        {heading: value if isinstance(value, Cell) else make_cell(value) for heading, value in row}
        for row in map(dict.items, rows)
    ]
    headings = dict.fromkeys(heading for row in rows for heading in row)
    missing = make_cell(None)
    cells = [[row.get(heading, missing) for heading in headings] for row in rows]
    columns = [
        Column(heading, heading not in left and not any(isinstance(one.value, str) for one in each))
        for heading, each in zip(headings, zip(*cells, strict=True), strict=True)
    ]
    return Table(name, caption, columns, cells)


def make_cell(value: Any, *, num_digits: int = 4, unknown: str = NOT_KNOWN) -> Cell:
    """A value as a cell.

    Args:
        value: Text, a number, a yes or no, or None.
        num_digits: Significant figures of a float; whole numbers are shown in full.
        unknown: Text for None.
    """
    if value is None:
        return Cell(unknown, None)
    if isinstance(value, bool):
        return Cell("yes" if value else "no", "yes" if value else "no")
    if isinstance(value, float):
        return Cell(format_number(value, num_digits=num_digits), value)
    return Cell(str(value), value if isinstance(value, int) else str(value))


def median_cell(
    values: Iterable[float | None], *, num_digits: int = 4, unknown: str = NOT_KNOWN
) -> Cell:
    """The median of the values that are not None, as `make_cell` shows it."""
    known = [value for value in values if value is not None]
    median = float(statistics.median(known)) if known else None
    return make_cell(median, num_digits=num_digits, unknown=unknown)


def to_markdown(table: Table) -> str:
    """The table without its caption."""
    lines = [
        _line(for_markdown(column.name) for column in table.columns),
        "|" + "|".join("---:" if column.is_number else "---" for column in table.columns) + "|",
        *(_line(for_markdown(cell.text) for cell in row) for row in table.shown_rows),
    ]
    if table.num_hidden_rows:
        lines += ["", f"{table.num_hidden_rows} more rows are in the CSV file."]
    return "\n".join(lines)


def to_captioned_markdown(tables: Iterable[Table]) -> str:
    """Tables one below the other, each under its caption."""
    return "\n\n".join(
        f"**{for_markdown(table.caption)}**\n\n{to_markdown(table)}" for table in tables
    )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
