"""`StoredFile`, a file that may be a copy, and `read_whole`, which throws damaged copies away."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.secrets import redact
from sdbench.data.remote import fetch, shown

Content = TypeVar("Content")

# Of reading a copy: loader processes that find it damaged throw it away beside each other.
MAX_ATTEMPTS = 10


@dataclass(frozen=True)
class StoredFile(os.PathLike):
    """A file on this machine, and as text what messages are to call it.

    Attributes:
        path: Where it lies.
        source: What it is a copy of; None for the user's own file.
    """

    path: Path
    source: str | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path) if self.source is None else shown(self.source)


def state_of(stat: os.stat_result) -> tuple[int, ...]:
    """Return numbers that differ if another file, or another version, has the same name."""
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def read_whole(
    file: StoredFile,
    read: Callable[[StoredFile], Content],
    *,
    copy_again: Callable[[StoredFile], None] | None = None,
) -> Content:
    """Read a file; a copy that is found damaged is thrown away, and made again once.

    So no damaged copy outlives the run that finds it, whether the fault is the copy's or the
    source's.

    Args:
        file: The file. Other processes may read it at the same time, and throw it away.
        read: Reads it; raises `ConfigError` or `RunError` if it is damaged.
        copy_again: Makes the copy again, if it is not there; None for `fetch`.
    """
    damage: ConfigError | RunError | None = None
    for _ in range(MAX_ATTEMPTS):
        try:
            state = state_of(os.stat(file))
            return read(file)
        except FileNotFoundError as error:
            if file.source is None:
                raise RunError(f"{file} cannot be read any more: {error}.") from error
        except (ConfigError, RunError) as error:
            if file.source is None:
                raise
            with contextlib.suppress(FileNotFoundError):
                # Another process may have made a new copy of that name.
                if state_of(os.stat(file)) == state:
                    os.unlink(file)
            if damage is not None:
                raise
            damage = error
            # Printed from loader processes too, whose errors may not reach the user.
            print(redact(f"{error} Its copy is thrown away, and made again."), file=sys.stderr)
        if copy_again is not None:
            copy_again(file)
        elif fetch(file.source, cache=file.path.parent) != file.path:
            raise RunError(f"{file} has been changed since it was copied.")
    raise damage or RunError(f"{file} cannot be read: its copy is removed again and again.")
