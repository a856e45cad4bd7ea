"""Escapes a text for markdown, CSV, a terminal or a plot.

A device name, a path or a reason may hold anything: line breaks, the marks of markdown, what a
spreadsheet takes for a formula. One function per kind of output; HTML is escaped by its template.
"""

from __future__ import annotations

from typing import Any

# What Excel, LibreOffice and Google Sheets take for the beginning of a formula (OWASP, "CSV
# Injection"); the last four are the full-width forms. A leading apostrophe makes it text again.
FORMULA_BEGINNINGS = (*"=+-@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
MARKDOWN_MARKS = {
    "\\": "\\\\",
    "|": "\\|",
    "`": "\\`",
    "*": "\\*",
    "_": "\\_",
    "[": "\\[",
    "#": "\\#",
    "~": "\\~",
    "$": "\\$",  # formulas, on GitHub
}
HTML_MARKS = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def for_markdown(value: Any) -> str:
    """A value as the text of a markdown table's cell: one line, without any mark-up of its own."""
    return for_terminal(value).translate(str.maketrans({**MARKDOWN_MARKS, **HTML_MARKS}))


def for_csv(value: Any) -> Any:
    """A value as a CSV cell that no spreadsheet takes for a formula; numbers stay as they are."""
    if isinstance(value, str) and value.startswith(FORMULA_BEGINNINGS):
        return f"'{value}"
    return value


def for_terminal(value: Any) -> str:
    """A value as one line of printable text: a control character cannot move the cursor."""
    text = " ".join(str(value).split())
    return "".join(character if character.isprintable() else "?" for character in text)


def for_plot(value: Any) -> str:
    """A value as a label: matplotlib would read text between two dollar signs as a formula."""
    return for_terminal(value).replace("$", r"\$")
