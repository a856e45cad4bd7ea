"""Keeps a second run out of a run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from sdbench.base.errors import ConfigError

LOCK_NAME = ".lock"


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder while the block runs; called by the first rank.

    The system frees the lock when the process ends, however it ends. Forked workers do not keep it
    (with `fcntl.flock` they would). The process must not lock the folder a second time.
    """
    with (folder / LOCK_NAME).open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # which of them depends on the system
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ConfigError(
                "Another run is at work in this folder",
                value=str(folder),
                allowed=f"one run at a time; now it is {holder}",
                flag="--resume",
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
        file.truncate(0)
