"""A table as text for a terminal."""

from __future__ import annotations

from sdbench.base.escape import for_terminal
from sdbench.report.tables import Table


def to_terminal(table: Table) -> str:
    """The table without its caption, in columns of even width.

    Args:
        table: Its numbers are set to the right.
    """
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
