"""Protects the standard streams: no secrets, no control characters, no errors."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from sdbench.base.escape import without_controls
from sdbench.base.secrets import redact

# Columns of an output other than a terminal.
PLAIN_WIDTH = 100
# Words that a terminal shows in colour: at the beginning of a line, and the verdicts of `compare`.
COLOURED = {
    "red": re.compile(
        r"^ *(?:error|failed|oom|invalid|timeout)(?=:)|(?:(?<=  )|(?<=, ))slower$", re.MULTILINE
    ),
    "yellow": re.compile(r"^ *(?:warning|caution|interrupted)(?=:)", re.MULTILINE),
    "green": re.compile(r"(?:(?<=  )|(?<=, ))faster$", re.MULTILINE),
}


def terminal_width() -> int:
    """Columns of the terminal, or `PLAIN_WIDTH`."""
    return shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns


def fit(text: str, *, hanging: int = 0) -> str:
    """A line of text, on a terminal as several that it has room for, indented from the second on.

    Elsewhere, and where the words have less than half of the width, it stays as it is.
    """
    width = terminal_width()
    if not sys.stdout.isatty() or hanging > width / 2:
        return text
    wrap = functools.partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
    return wrap(text, width, subsequent_indent=" " * hanging)


@contextlib.contextmanager
def protected_output() -> Iterator[None]:
    """Protect stdout and stderr during the block, or the decorated function.

    Secrets are removed from the output. On a terminal, control characters are removed, which a
    record, a table or a file name may hold, and `COLOURED` words have colours. What cannot be
    written is dropped: to a pipe without a reader, a full disk, or a stream that was closed before
    the start (``>&-``). A character that the stream's encoding lacks comes out as its number.
    """
    _open_standard_descriptors()
    with open(os.devnull, "w") as null:
        stdout = _ProtectedStream(sys.stdout or null)
        stderr = _ProtectedStream(sys.stderr or null)
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                yield
            finally:
                # An error of flushing at Python's exit would change the exit code.
                stdout.flush()
                stderr.flush()


@contextlib.contextmanager
def results_only_on_stdout() -> Iterator[Callable[[str], None]]:
    """Redirect the output of the block, also that of C libraries, to stderr.

    Yields a function that prints a text on stdout all the same.
    """
    stdout = sys.stdout
    stdout.flush()
    descriptor = os.dup(1)

    def show(text: str) -> None:
        os.dup2(descriptor, 1)
        print(text, file=stdout, flush=True)
        os.dup2(2, 1)

    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield show
    finally:
        os.dup2(descriptor, 1)
        os.close(descriptor)


def _open_standard_descriptors() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed.

    Otherwise files of the run would get these descriptors, and with them output of C libraries.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def _in_colour(text: str) -> str:
    """A text for a terminal; termcolor knows of NO_COLOR and dumb terminals."""
    for colour, words in COLOURED.items():
        if words.search(text):
            from termcolor import colored

            text = words.sub(lambda found, colour=colour: colored(found[0], colour), text)
    return text


class _ProtectedStream:
    """A text stream that raises no errors; other attributes are the stream's."""

    def __init__(self, stream: TextIO) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        self._stream = stream

    def write(self, text: str) -> int:
        shown = redact(text)
        if self._stream.isatty():
            shown = _in_colour(without_controls(shown))
        with self._errors_ignored():
            self._stream.write(shown)
        return len(text)

    def flush(self) -> None:
        with self._errors_ignored():
            self._stream.flush()

    @contextlib.contextmanager
    def _errors_ignored(self) -> Iterator[None]:
        """If the stream cannot be written, redirect it to /dev/null."""
        try:
            yield
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
