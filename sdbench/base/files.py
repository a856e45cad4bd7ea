"""Atomic writing: a file is either as before or complete, for readers and after a crash."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdbench.base.secrets import redact_environment, redact_values


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
