"""Puts generated parts into texts written by hand.

A generated part is between a line ``<!-- begin generated: NAME -->`` and a line
``<!-- end generated: NAME -->``. The text around them stays as it is.
"""

from __future__ import annotations

from pathlib import Path

from sdbench.base.errors import ConfigError

BEGIN = "<!-- begin generated: {} -->"
END = "<!-- end generated: {} -->"


def fill_block(text: str, content: str, *, begin: str, end: str, path: Path) -> str:
    """Put `content` in place of what is between two markers.

    Args:
        text: The whole text.
        content: The new part.
        begin: The marker above it.
        end: The marker below it.
        path: The text's file, for the message.

    Raises:
        ConfigError: If a marker is missing.
    """
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ConfigError(
            f"{path} has no place for a table",
            value=f"no {end if found_begin else begin}",
            allowed=f"a line {begin} and below it a line {end}",
            flag="--results",
        )
    return f"{before}{begin}\n{content}\n{end}{after}"
