"""Tables of results: columns declared once, shown as text, Markdown, HTML and CSV rows."""

from __future__ import annotations

import dataclasses
import html
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sdbench.base.escape import for_markdown, for_terminal
from sdbench.report.terminal import NOT_KNOWN, format_number

# Extra columns with the origin of a row, which no caption repeats.
ORIGIN = ("run ids", "command")


class Cell(NamedTuple):
    """The text of a cell, and the value that the column is sorted by (None sorts last)."""

    text: str
    value: float | str | None


# The cell of a figure that does not exist, such as the gain of the baseline over itself.
EMPTY = Cell("", None)


class Field(NamedTuple):
    """A column of a table.

    Attributes:
        name: The heading, with the unit.
        value: Key of the value in a record, or a function of the record.
        digits: Significant figures of a float.
        unknown: Text of None.
        is_left: Whether its cells are left-aligned; a column with a text always is.
        is_extra: Whether only an HTML page has it, hidden until a reader chooses it.
    """

    name: str
    value: str | Callable[[Any], Any]
    digits: int = 4
    unknown: str = NOT_KNOWN
    is_left: bool = False
    is_extra: bool = False

    def cell_of(self, record: Any) -> Cell:
        """The cell of a record."""
        value = record.get(self.value) if isinstance(self.value, str) else self.value(record)
        if isinstance(value, Cell):
            return value
        return make_cell(value, num_digits=self.digits, unknown=self.unknown)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with a caption; its name is its anchor in an HTML page, e.g. ``ladder-1``."""

    name: str
    caption: str
    columns: Sequence[Field]
    rows: Sequence[Sequence[Cell]]

    @property
    def kind_column(self) -> int | None:
        """Index of the column that says whether a row is measured or quoted."""
        names = [column.name for column in self.columns]
        return names.index("kind") if "kind" in names else None

    @property
    def constants(self) -> dict[int, str]:
        """Text of each column that is the same in all rows, by its index; empty with a single row.

        Figures with decimals do not count, nor does the column ``kind``, which rows are filtered
        by.
        """
        if len(self.rows) < 2:
            return {}
        return {
            index: cells[0].text
            for index, cells in enumerate(zip(*self.rows, strict=True))
            if index != self.kind_column
            and not isinstance(cells[0].value, float)
            and len({cell.text for cell in cells}) == 1
        }

    @property
    def folded_columns(self) -> set[int]:
        """Indices of the columns that a page hides until they are chosen."""
        extra = {index for index, column in enumerate(self.columns) if column.is_extra}
        return extra | self.constants.keys()

    @property
    def common(self) -> str:
        """What is the same in all rows, e.g. ``px 256, EMA no``."""
        return ", ".join(
            f"{self.columns[index].name} {text}"
            for index, text in self.constants.items()
            if text and self.columns[index].name not in ORIGIN
        )

    def without_empty_columns(self) -> Table:
        """The table without the columns whose value is None in every row."""
        return self._with_columns(
            index
            for index, cells in enumerate(zip(*self.rows, strict=True))
            if any(cell.value is not None for cell in cells)
        )

    def without_folded_columns(self) -> Table:
        """The table without the columns that a page hides; the caption has what is common."""
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
    """Tables that a reader unfolds by a click on their summary, a line of plain text."""

    summary: str
    tables: Sequence[Table]


def tabulate(
    fields: Sequence[Field], records: Iterable[Any], *, name: str = "", caption: str = ""
) -> Table:
    """Make a table with a column for each field and a row for each record."""
    rows = [[field.cell_of(record) for field in fields] for record in records]
    columns = [
        field._replace(
            is_left=field.is_left or any(isinstance(row[index].value, str) for row in rows)
        )
        for index, field in enumerate(fields)
    ]
    return Table(name, caption, columns, rows)


def make_table(
    rows: Iterable[Mapping[str, Any]],
    *,
    name: str = "",
    caption: str = "",
    left: Collection[str] = (),
) -> Table:
    """Make a table of rows by heading, in the order in which the headings first occur.

    A heading that a row lacks is an unknown value. `left` names columns of numbers to left-align.
    """
    rows = list(rows)
    headings = dict.fromkeys(heading for row in rows for heading in row)
    fields = [Field(heading, heading, is_left=heading in left) for heading in headings]
    return tabulate(fields, rows, name=name, caption=caption)


def make_cell(value: Any, *, num_digits: int = 4, unknown: str = NOT_KNOWN) -> Cell:
    """Make a cell of a text, a bool, a number (significant figures of a float), or None."""
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
    """The table in markdown, without its caption."""
    lines = [
        [column.name for column in table.columns],
        *([cell.text for cell in row] for row in table.rows),
    ]
    heading, *rows = (f"| {' | '.join(map(for_markdown, line))} |" for line in lines)
    marks = ("---" if column.is_left else "---:" for column in table.columns)
    return "\n".join([heading, f"|{'|'.join(marks)}|", *rows])


def to_captioned_markdown(tables: Iterable[Table]) -> str:
    """Tables in markdown, each below its caption, which says what is the same in all rows."""
    return "\n\n".join(
        f"**{for_markdown(table.caption)}**\n\n{to_markdown(table)}"
        for table in (table.without_folded_columns() for table in tables)
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
            cell.ljust(width) if column.is_left else cell.rjust(width)
            for cell, width, column in zip(line, widths, table.columns, strict=True)
        ).rstrip()
        for line in lines
    )
