"""What is a table, before it becomes markdown or HTML?

Both outputs are made from one `Table`, so that no figure can differ between them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from sdbench.base.escape import for_markdown
from sdbench.report.terminal import NOT_KNOWN, format_number

# A browser, and whoever reads markdown, chokes on more; the CSV files have every row.
MAX_ROWS = 1000


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one cell shows, and the value that it is sorted by (None sorts last)."""

    text: str
    value: float | str | None


@dataclasses.dataclass(frozen=True)
class Column:
    """A column's heading, and whether its cells are numbers, which stand to the right."""

    name: str
    is_number: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with a caption.

    Attributes:
        name: Names the table in a URL, e.g. ``512px-online``.
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
        """Where the kind of a row (measured, quoted, modelled) stands, if anywhere."""
        names = [column.name for column in self.columns]
        return names.index("kind") if "kind" in names else None

    @property
    def shown_rows(self) -> Sequence[Sequence[Cell]]:
        """The first rows, as many as a page bears."""
        return self.rows[:MAX_ROWS]

    @property
    def num_hidden_rows(self) -> int:
        """Rows beyond those."""
        return len(self.rows) - len(self.shown_rows)

    def without_empty_columns(self) -> Table:
        """The same without the columns of which nothing is known in any row."""
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


def make_cell(value: Any, *, num_digits: int = 4, unknown: str = NOT_KNOWN) -> Cell:
    """A value as a cell.

    Args:
        value: Text, a number, a yes or no, or None.
        num_digits: Significant figures of a float; whole numbers are shown in full.
        unknown: What stands for None.
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
    """The median of what is known, as `make_cell` shows it."""
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
