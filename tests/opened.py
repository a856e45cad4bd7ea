"""`opened_below`: the files that any process and library opens while a block runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

# Of Linux's inotify: a file was opened; the event is about a folder.
IN_OPEN, IN_ISDIR = 0x20, 0x40000000
HEADER = struct.Struct("iIII")


@contextlib.contextmanager
def opened_below(folder: Path) -> Iterator[set[str]]:
    """Yield a set that has, after the block, the files opened below a folder, relative to it."""
    inotify = ctypes.CDLL(None, use_errno=True)
    queue = inotify.inotify_init1(os.O_NONBLOCK)
    folders = [path for path in (folder, *folder.rglob("*")) if path.is_dir()]
    watched = {
        inotify.inotify_add_watch(queue, os.fsencode(path), ctypes.c_uint32(IN_OPEN)): path
        for path in folders
    }
    assert queue >= 0 and len(watched) == len(folders), os.strerror(ctypes.get_errno())
    found: set[str] = set()
    try:
        yield found
        with contextlib.suppress(BlockingIOError):
            while events := os.read(queue, 2**16):
                found.update(_files_in(events, watched, folder))
    finally:
        os.close(queue)


def _files_in(events: bytes, watched: dict[int, Path], folder: Path) -> Iterator[str]:
    position = 0
    while position < len(events):
        number, mask, _, length = HEADER.unpack_from(events, position)
        assert number >= 0, "more files were opened than the queue holds"
        position += HEADER.size + length
        name = events[position - length : position].rstrip(b"\0")
        if not mask & IN_ISDIR:
            yield str((watched[number] / os.fsdecode(name)).relative_to(folder))
