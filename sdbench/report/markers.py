"""Fills the generated parts of texts that are written by hand.

A generated part lies between a line ``<!-- begin generated: NAME -->`` and a line
``<!-- end generated: NAME -->``. The text around them stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sdbench.base.errors import ConfigError

BEGIN = "<!-- begin generated: {} -->"
END = "<!-- end generated: {} -->"


def fill_blocks(text: str, contents: Mapping[str, str], *, path: Path) -> str:
    """Replace the generated parts of a text, given by name. A missing marker is a ConfigError."""
    for name, content in contents.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ConfigError(
                f"{path} has no place for a table",
                value=f"no {end if found_begin else begin}",
                allowed=f"a line {begin} and below it a line {end}",
                flag="--folder",
            )
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text
