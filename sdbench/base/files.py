"""Files that a reader, or a crash, sees as they were before or whole, never in part."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdbench.base.secrets import redact_environment, redact_values


def replace_file(path: Path, text: str, *, reserve: Path | None = None) -> None:
    """Write a text file in one piece.

    Secrets of the environment are left out of it. What else may be one is for the caller to leave
    out, who knows where a value ends, and which URL is a link of a page.

    Args:
        path: Of the file.
        text: Its content.
        reserve: A file whose space is taken where the disk has no other.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _replace(path, text, temporary, mode="w")
    except OSError:
        temporary.unlink(missing_ok=True)
        if reserve is None or not reserve.exists():
            raise
        # Written over and renamed: nobody else can take the space in between.
        _replace(path, text, reserve, mode="r+")


def _replace(path: Path, text: str, temporary: Path, *, mode: str) -> None:
    try:
        with temporary.open(mode, encoding="utf-8") as file:
            file.write(redact_environment(text))
            file.truncate()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # one of a write does not say of which file
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, content: Any, *, reserve: Path | None = None) -> Any:
    """Write a value as JSON, as `replace_file` does, and without secrets.

    Returns:
        What was written.

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
    """Where to write a file that only this user can read and that becomes `path` when it is whole.

    No other process can foresee the name, and a link at `path` is replaced, not followed.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".sdbench-") as folder:
        new = Path(folder, path.name)
        yield new
        new.chmod(0o600)
        new.replace(path)
