"""Escapes texts of records and tables, with one function per kind of output.

A device name, a path or a reason may hold line breaks, markdown, or what a spreadsheet takes for a
formula. HTML is escaped by its template.
"""

from __future__ import annotations

import re
from typing import Any

# Excel, LibreOffice and Google Sheets take these for the beginning of a formula (OWASP, "CSV
# Injection"); the last four are the full-width forms. A leading apostrophe makes it a text.
FORMULA_BEGINNINGS = (*"=+-@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# The dollar sign begins a formula on GitHub.
MARKDOWN_MARKS = {mark: f"\\{mark}" for mark in "\\|`*_[#~$"}
# ECMA-48: colours, moves of the cursor, the title of the window; then the rest of C0 and C1, and
# the marks that change the direction of writing.
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
HTML_MARKS = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def for_markdown(value: Any) -> str:
    """A value as a cell of a markdown table: one line of plain text."""
    return for_terminal(value).translate(str.maketrans({**MARKDOWN_MARKS, **HTML_MARKS}))


def for_csv(value: Any) -> Any:
    """A value as a CSV cell that no spreadsheet takes for a formula; numbers stay as they are."""
    if isinstance(value, str) and value.startswith(FORMULA_BEGINNINGS):
        return f"'{value}"
    return value


def for_terminal(value: Any) -> str:
    """A value as one line of printable text, without control characters."""
    text = " ".join(str(value).split())
    return "".join(character if character.isprintable() else "?" for character in text)


def without_controls(text: str) -> str:
    """Lines of text without characters that act on a terminal."""
    return as_utf8(CONTROL.sub("?", CONTROL_SEQUENCE.sub("", text)))


def as_utf8(text: str) -> str:
    """A text that UTF-8 can encode: a lone surrogate becomes its number.

    Python decodes a byte of a file name that is not UTF-8 as a lone surrogate.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def for_plot(value: Any) -> str:
    """A value as a label of matplotlib, which takes text between dollar signs for a formula."""
    return for_terminal(value).replace("$", r"\$")
