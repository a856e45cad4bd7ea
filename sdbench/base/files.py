"""Files that are either as before or complete, for readers, after a crash and on a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdbench.base.secrets import redact_environment, redact_values

READ_BYTES = 2**24


def replace_file(path: Path, content: str | bytes, *, reserve: Path | None = None) -> None:
    """Write a file atomically.

    In a text secrets of the environment are replaced by their names. Other secrets are the caller's
    to remove (`redact`), who knows where a value ends and which URL is a link.

    Args:
        path: Of the file.
        content: A text, or bytes, which are written as they are.
        reserve: A file that is overwritten and renamed if the disk is full.

    Raises:
        OSError: The file cannot be written.
    """
    if not path.name:  # `/`, or the working folder
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    data = redact_environment(content).encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _replace(path, data, temporary, mode="wb")
    except OSError:
        temporary.unlink(missing_ok=True)
        if reserve is None or not reserve.exists():
            raise
        # Overwritten, not deleted first: another process could take the freed space.
        _replace(path, data, reserve, mode="r+b")


def _replace(path: Path, data: bytes, temporary: Path, *, mode: str) -> None:
    try:
        with temporary.open(mode) as file:
            file.write(data)
            file.truncate()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # an error of `write` has no file name
        raise OSError(error.errno, error.strerror, str(path)) from error


def crc32_of(path: Path) -> tuple[int, int]:
    """CRC-32 and number of bytes of a file.

    Raises:
        OSError: It cannot be read.
    """
    crc32 = 0
    with path.open("rb") as file:
        while read := file.read(READ_BYTES):
            crc32 = zlib.crc32(read, crc32)
        return crc32, file.tell()


def write_json(path: Path, content: Any, *, reserve: Path | None = None) -> Any:
    """Write a value as JSON, atomically and without secrets.

    Returns:
        The value as written.

    Raises:
        ValueError: A number is not finite.
        OSError: It cannot be written.
    """
    content = redact_values(content)
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    replace_file(path, text, reserve=reserve)
    return content


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces `path` when the block ends.

    Only this user can read the file. Its temporary name cannot be guessed, and a link at `path` is
    replaced, not followed.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".sdbench-") as folder:
        new = Path(folder, path.name)
        yield new
        new.chmod(0o600)
        new.replace(path)


class GrowingFile:
    """A text file that grows by whole lines; what the disk does not take is kept for later."""

    def __init__(self, path: Path) -> None:
        """Write nothing yet.

        Args:
            path: Of the file; it may exist.
        """
        self.path = path
        self._kept = b""
        self._has_whole_lines = False

    def append(self, lines: str) -> None:
        """Append lines behind those that are kept; the first time that fails, a warning is printed.

        They are written at once: a kill leaves whole lines. Nothing waits for the device, so a
        power failure may take the last ones.
        """
        warns = not self._kept
        self._kept += lines.encode()
        try:
            if not self._has_whole_lines:  # what a kill has cut off is no part of the next line
                self._kept = _end_of_cut_line(self.path) + self._kept
                self._has_whole_lines = True
            _append(self.path, self._kept)
        except OSError as error:
            if warns:
                print(
                    f"warning: {self.path} cannot be written ({error.strerror}): its lines are "
                    "kept in memory until it can",
                    file=sys.stderr,
                )
        else:
            self._kept = b""

    def close(self) -> None:
        """Try once more to write the lines that are kept, and tell of those that are lost."""
        if not self._kept:
            return
        self.append("")
        if self._kept:
            num_lines = self._kept.count(b"\n")
            print(f"warning: {num_lines} lines of {self.path} are lost", file=sys.stderr)


def _end_of_cut_line(path: Path) -> bytes:
    """A line feed where the last line of a file has none."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return b"" if file.read(1) == b"\n" else b"\n"
    except OSError:  # no such file, or an empty one
        return b""


def _append(path: Path, content: bytes) -> None:
    """Append all of the content, or raise OSError and leave the file as it was."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        if os.write(file, content) < len(content):  # the disk took what it had room for
            os.ftruncate(file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)
