"""Standard streams that keep secrets to themselves and never end a program."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from sdbench.base.secrets import redact


@contextlib.contextmanager
def protected_output() -> Iterator[None]:
    """Protect stdout and stderr while the block, or the function, runs.

    Secrets are left out of what is printed, and what cannot be printed is dropped: a pipe whose
    reader has gone, a full disk, or a stream that was closed before the start (``>&-``).
    """
    _open_standard_descriptors()
    with open(os.devnull, "w") as null:
        stdout = _ProtectedStream(sys.stdout or null)
        stderr = _ProtectedStream(sys.stderr or null)
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                yield
            finally:
                # What is left in a buffer would fail, and change the exit code, when Python ends.
                stdout.flush()
                stderr.flush()


def _open_standard_descriptors() -> None:
    """Open those of stdin, stdout and stderr that are closed, on nothing.

    Otherwise files of the run get their numbers, and what C libraries print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


class _ProtectedStream:
    """A text stream whose errors end here; all else is its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._loss_ignored():
            self._stream.write(redact(text))
        return len(text)

    def flush(self) -> None:
        with self._loss_ignored():
            self._stream.flush()

    @contextlib.contextmanager
    def _loss_ignored(self) -> Iterator[None]:
        """Where the stream cannot be written, it leads to nothing from now on."""
        try:
            yield
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
