"""Completion of command lines: what a shell offers for the word being typed, by argcomplete.

The shell's function starts the program anew, with the line in its environment.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection

# Where the program stands among the words of the line, counted from 1.
PLACE = "_ARGCOMPLETE"


def is_asked() -> bool:
    """Return True if a shell asks for completions only."""
    return PLACE in os.environ


def typed_command(commands: Collection[str]) -> str | None:
    """The command on the line; its own parser completes the words after it."""
    from argcomplete.lexers import split_line

    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    place = int(os.environ[PLACE])
    if len(words) <= place or words[place] not in commands:
        return None
    os.environ[PLACE] = str(place + 1)
    return words[place]


def offer(action: argparse.Action, choices: Collection[str]) -> None:
    """Offer values after a flag; the shell offers files by default."""
    action.completer = lambda **_: choices  # type: ignore[attr-defined]


def complete(parser: argparse.ArgumentParser) -> None:
    """Hand completions to the shell and end the process."""
    import argcomplete

    argcomplete.autocomplete(parser)
