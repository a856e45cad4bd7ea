"""Removes shared memory that killed runs of MosaicML Streaming have left.

Streaming registers its cache folders in shared memory, under names that begin with six digits, and
refuses a registered folder even when the run that registered it is dead. Streaming's own
`clean_stale_shared_memory` also removes registrations of living runs; here one is stale only if no
process on this machine has it mapped. Linux only: elsewhere shared memory is not visible as files,
and nothing is removed. Processes in other containers that share /dev/shm cannot be seen: each
container needs its own.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

FOLDER = Path("/dev/shm")
# The runs of a user take the next free number. Tests, which look at what is left, get NUM_OWN
# numbers of their own, beginning with this one.
VARIABLE = "SDBENCH_SHARED_MEMORY"
NUM_OWN, NUM_ALL = 1_000, 1_000_000
# streaming/base/constant.py, which cannot be imported without torch; data/compat.py compares them.
SHARED_NAMES = (
    "locals",
    "barrier",
    "next_epoch",
    "cache_usage",
    "shard_states",
    "shard_access_times",
    "resume",
    "epoch_shape",
    "epoch_data",
)
LOCK_NAMES = ("barrier_filelock", "cache_filelock")


def numbers() -> range:
    """The numbers, six digits each, that shared memory of this process may have."""
    first = os.environ.get(VARIABLE)
    return range(NUM_ALL) if first is None else range(int(first), int(first) + NUM_OWN)


def remove_stale_shared_memory() -> int:
    """Remove stale shared memory of this user with its lock files; returns the number of pieces."""
    stale = find_stale()
    for path in stale:
        path.unlink(missing_ok=True)
        prefix = path.name.partition("_")[0]
        for lock in (Path(tempfile.gettempdir(), f"{prefix}_{name}") for name in LOCK_NAMES):
            if _is_own(lock):
                lock.unlink(missing_ok=True)
    return len(stale)


def find_stale() -> list[Path]:
    """Stale shared memory of this user."""
    if not FOLDER.is_dir():
        return []
    pattern = re.compile(rf"(\d{{6}})_({'|'.join(SHARED_NAMES)})")
    in_use, ours = _mapped_prefixes(), numbers()
    matches = ((path, pattern.fullmatch(path.name)) for path in FOLDER.iterdir())
    return [
        path
        for path, match in matches
        if match and int(match[1]) in ours and match[1] not in in_use and _is_own(path)
    ]


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:  # its run has ended meanwhile
        return False


def _mapped_prefixes() -> set[str]:
    """The six-digit prefixes of Streaming's shared memory that living processes have mapped."""
    prefixes = set()
    device = FOLDER.stat().st_dev
    # proc_pid_maps(5): address, permissions, offset, major:minor in hexadecimal, inode, path.
    here = f"{os.major(device):02x}:{os.minor(device):02x}"
    pattern = re.compile(rf"{here} \d+ +{FOLDER}/(\d{{6}})_")
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            # The process has ended meanwhile, or is another user's, whose files stay.
            continue
        prefixes.update(pattern.findall(text))
    return prefixes
