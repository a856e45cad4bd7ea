"""Atomic writes: a file is complete or unchanged, for readers, after a crash and on a full disk."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sdbench.base.errors import ConfigError
from sdbench.base.secrets import redact_environment, redact_values

READ_BYTES = 2**24


@contextlib.contextmanager
def refused_unless_read(
    path: Path, what: str, *, allowed: str, flag: str, also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn an error of reading or parsing in the block, or one of `also`, into a refusal."""
    try:
        yield
    except (OSError, ValueError, csv.Error, *also) as error:
        what = f"{what} cannot be read ({' '.join(str(error).split())})"
        raise ConfigError(what, value=str(path), allowed=allowed, flag=flag) from None


@contextlib.contextmanager
def refused_unless_written(
    place: Path | str, *, what: str = "the results folder", flag: str = "--results_dir"
) -> Iterator[None]:
    """Turn an OSError of the block into the refusal of a place that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written ({error.strerror or error})",
            value=str(place),
            allowed="a place that this user may write, on a disk with space",
            flag=flag,
        ) from None


def check_folder(folder: Path) -> None:
    """Refuse a --folder that is neither new nor empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            "the folder exists and is not empty",
            value=str(folder),
            allowed="a new or an empty folder: name another one, or remove this one",
            flag="--folder",
        )


@contextlib.contextmanager
def new_file(path: Path, *, is_private: bool = True) -> Iterator[Path]:
    """Yield a path in a temporary folder; the file written there replaces `path` at the end.

    The temporary path cannot be guessed, and a link at `path` is replaced, not followed. Only this
    user can read a private file.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".sdbench-") as folder:
        new = Path(folder, f"new.{path.name}")
        yield new
        if is_private:
            new.chmod(0o600)
        new.replace(path)


def replace_file(path: Path, content: str | bytes, *, reserve: Path | None = None) -> None:
    """Write a file atomically, as `new_file` does; an OSError if that fails.

    In a text, secrets of the environment are replaced by their names. The caller removes other
    secrets (`redact`): it knows where a value ends and which URL is a link. If the disk is full,
    the file `reserve` is overwritten and renamed.
    """
    data = redact_environment(content).encode() if isinstance(content, str) else content
    try:
        with new_file(path, is_private=False) as new, new.open("wb") as file:
            _write_through(file, data)
    except OSError as error:
        if reserve is None or not reserve.exists():
            raise OSError(error.errno, error.strerror, str(path)) from error
        # Overwritten, not deleted first: another process could take the freed space.
        with reserve.open("r+b") as file:
            _write_through(file, data)
        reserve.replace(path)


def _write_through(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.truncate()
    os.fsync(file.fileno())


def write_json(path: Path, content: Any, *, reserve: Path | None = None) -> Any:
    """Write a value as JSON, as `replace_file`, and return it as written, without secrets.

    A number that is not finite is a ValueError.
    """
    content = redact_values(content)
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    replace_file(path, text, reserve=reserve)
    return content


def crc32_of(path: Path) -> tuple[int, int]:
    """CRC-32 and number of bytes of a file."""
    crc32 = 0
    with path.open("rb") as file:
        while read := file.read(READ_BYTES):
            crc32 = zlib.crc32(read, crc32)
        return crc32, file.tell()


def fingerprint(path: Path) -> list[Any]:
    """Size and checksum of a file's content, as JSON has them."""
    crc32, num_bytes = crc32_of(path)
    return [num_bytes, f"crc32 {crc32:08x}"]


def append_bytes(file: int, content: bytes) -> None:
    """Append all of the content to a file descriptor, or raise OSError and append nothing."""
    size = os.fstat(file).st_size
    if os.write(file, content) < len(content):  # the disk had room for a part
        os.ftruncate(file, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class GrowingFile:
    """A text file that grows by whole lines; lines that cannot be written are kept in memory."""

    def __init__(self, path: Path) -> None:
        """Prepare; the file may exist, and nothing is written yet."""
        self.path = path
        self._kept = b""
        self._has_whole_lines = False

    def append(self, lines: str) -> None:
        """Append the kept lines and these; the first time that fails, a warning is printed.

        They are written in one call: a kill leaves whole lines. Nothing is synced, so a power
        failure may lose the last lines.
        """
        warns = not self._kept
        self._kept += lines.encode()
        try:
            if not self._has_whole_lines:  # a line that a kill has cut off ends before the next
                self._kept = _end_of_cut_line(self.path) + self._kept
                self._has_whole_lines = True
            with self.path.open("ab", buffering=0) as file:
                append_bytes(file.fileno(), self._kept)
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
        """Try once more to write the kept lines, and print how many are lost."""
        if not self._kept:
            return
        self.append("")
        if self._kept:
            num_lines = self._kept.count(b"\n")
            print(f"warning: {num_lines} lines of {self.path} are lost", file=sys.stderr)


def _end_of_cut_line(path: Path) -> bytes:
    """A line feed if the last line of the file has none."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return b"" if file.read(1) == b"\n" else b"\n"
    except OSError:  # no such file, or an empty one
        return b""
