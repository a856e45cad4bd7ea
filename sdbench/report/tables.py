"""Tables of results, and their text in markdown and for a terminal."""

from __future__ import annotations

import dataclasses
import html
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sdbench.base.escape import for_markdown, for_terminal
from sdbench.report.terminal import NOT_KNOWN, format_number

# Rows that a page shows of a table.
MAX_ROWS = 1000
# Extra columns that tell where a row comes from, which no caption repeats.
ORIGIN = ("run ids", "command")


@dataclasses.dataclass(frozen=True)
class Cell:
    """The text of a cell, and the value that the column is sorted by (None sorts last)."""

    text: str
    value: float | str | None


# The cell of a figure that does not exist, such as the gain of the baseline over itself.
EMPTY = Cell("", None)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        is_number: Whether its cells are right-aligned.
        is_extra: Whether it is shown on an HTML page alone, and there only when it is chosen.
    """

    name: str
    is_number: bool = False
    is_extra: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with a caption.

    Attributes:
        name: Anchor of the table in an HTML page, e.g. ``512px-online``.
        caption: One line of plain text.
        columns: One for each cell of a row.
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

    @property
    def constants(self) -> dict[int, str]:
        """Text of each column that says the same in all of several rows, by its index.

        Figures with decimals are none of them, nor is the column that says whether a row was
        measured: rows are filtered by it.
        """
        if len(self.rows) < 2:
            return {}
        return {
            index: self.rows[0][index].text
            for index in range(len(self.columns))
            if index != self.kind_column
            and not isinstance(self.rows[0][index].value, float)
            and len({row[index].text for row in self.rows}) == 1
        }

    @property
    def folded_columns(self) -> set[int]:
        """Indices of the columns that a page hides until they are chosen."""
        extra = {index for index, column in enumerate(self.columns) if column.is_extra}
        return extra | self.constants.keys()

    @property
    def common(self) -> str:
        """What is the same in all rows, e.g. ``px 256, EMA no``; empty if nothing is."""
        return ", ".join(
            f"{self.columns[index].name} {text}"
            for index, text in self.constants.items()
            if text and self.columns[index].name not in ORIGIN
        )

    def without_empty_columns(self) -> Table:
        """The table without the columns whose value is None in every row."""
        return self._with_columns(
            index
            for index in range(len(self.columns))
            if any(row[index].value is not None for row in self.rows)
        )

    def without_folded_columns(self) -> Table:
        """The table without the columns that a page hides; the caption says what is common."""
        folded, common = self.folded_columns, self.common
        table = self._with_columns(
            index for index in range(len(self.columns)) if index not in folded
        )
        caption = f"{self.caption}. In all rows: {common}" if common else self.caption
        return dataclasses.replace(table, caption=caption)

    def _with_columns(self, indices: Iterable[int]) -> Table:
        kept = list(indices)
        return dataclasses.replace(
            self,
            columns=[self.columns[index] for index in kept],
            rows=[[row[index] for index in kept] for row in self.rows],
        )


@dataclasses.dataclass(frozen=True)
class Fold:
    """Tables that are seen when a reader opens their line.

    Attributes:
        summary: The line, plain text.
        tables: What is behind it.
    """

    summary: str
    tables: Sequence[Table]


def make_table(
    rows: Iterable[Mapping[str, Any]],
    *,
    name: str = "",
    caption: str = "",
    left: Collection[str] = (),
    extra: Collection[str] = (),
) -> Table:
    """Make a table from rows by heading. Columns are in the order in which headings first occur.

    Args:
        rows: Cells, or values for `make_cell`. A heading that a row lacks is an unknown value.
        name: See `Table`.
        caption: See `Table`.
        left: Headings of columns to left-align. Columns with text are left-aligned anyway, all
            others are right-aligned.
        extra: Headings of columns that are on an HTML page alone.
    """
    rows = [
        {heading: value if isinstance(value, Cell) else make_cell(value) for heading, value in row}
        for row in map(dict.items, rows)
    ]
    headings = dict.fromkeys(heading for row in rows for heading in row)
    missing = make_cell(None)
    cells = [[row.get(heading, missing) for heading in headings] for row in rows]
    columns = [
        Column(
            heading,
            heading not in left and not any(isinstance(one.value, str) for one in each),
            heading in extra,
        )
        for heading, each in zip(headings, zip(*cells, strict=True), strict=True)
    ]
    return Table(name, caption, columns, cells)


def make_cell(value: Any, *, num_digits: int = 4, unknown: str = NOT_KNOWN) -> Cell:
    """Make a cell of a value.

    Args:
        value: Text, a number, a bool or None.
        num_digits: Significant figures of a float. Integers are shown in full.
        unknown: Text for None.
    """
    if value is None:
        return Cell(unknown, None)
    if isinstance(value, bool):
        return Cell("yes" if value else "no", "yes" if value else "no")
    if isinstance(value, float):
        return Cell(format_number(value, num_digits=num_digits), value)
    return Cell(str(value), value if isinstance(value, int) else str(value))


def optional_cell(value: Any) -> Cell:
    """The cell of a value, empty for None."""
    return make_cell(value, unknown="")


def median_cell(
    values: Iterable[float | None], *, num_digits: int = 4, unknown: str = NOT_KNOWN
) -> Cell:
    """The median of the values that are not None, as `make_cell` shows it."""
    known = [value for value in values if value is not None]
    median = float(statistics.median(known)) if known else None
    return make_cell(median, num_digits=num_digits, unknown=unknown)


def to_markdown(table: Table) -> str:
    """The table in markdown, without its caption."""
    lines = [
        [column.name for column in table.columns],
        *([cell.text for cell in row] for row in table.shown_rows),
    ]
    heading, *rows = (f"| {' | '.join(map(for_markdown, line))} |" for line in lines)
    marks = ("---:" if column.is_number else "---" for column in table.columns)
    rest = ["", f"{table.num_hidden_rows} more rows are left out."] if table.num_hidden_rows else []
    return "\n".join([heading, f"|{'|'.join(marks)}|", *rows, *rest])


def to_captioned_markdown(tables: Iterable[Table]) -> str:
    """Tables in markdown, each below its caption, which has what is the same in all rows."""
    shown = [table.without_folded_columns() for table in tables]
    return "\n\n".join(
        f"**{for_markdown(table.caption)}**\n\n{to_markdown(table)}" for table in shown
    )


def to_folded_markdown(folds: Iterable[Fold]) -> str:
    """Folds in the HTML that markdown may have, with their tables in markdown."""
    return "\n\n".join(
        f"<details>\n<summary>{html.escape(for_terminal(fold.summary))}</summary>\n\n"
        f"{to_captioned_markdown(fold.tables)}\n\n</details>"
        for fold in folds
    )


def to_terminal(table: Table) -> str:
    """The table in aligned columns of plain text, without its caption."""
    lines = [[for_terminal(column.name) for column in table.columns]]
    lines += [[for_terminal(cell.text) for cell in row] for row in table.rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  "
        + "  ".join(
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(line, widths, table.columns, strict=True)
        ).rstrip()
        for line in lines
    )
