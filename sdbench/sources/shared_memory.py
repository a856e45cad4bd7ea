"""What did killed runs leave in shared memory that would stop this one?"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import torch
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, SHM_TO_CLEAN
from streaming.base.distributed import get_local_rank

SHARED_MEMORY_FOLDER = Path("/dev/shm")


def remove_stale_shared_memory() -> None:
    """Remove what killed runs left behind, which would stop this one.

    Streaming refuses a cache folder that a registration in shared memory names, even when the run
    that registered it is dead. Its own `clean_stale_shared_memory` removes those of living runs as
    well; here a registration is stale only when no process on this machine has it mapped. Local
    rank 0 does it, before any rank looks, and the others wait. Linux only: elsewhere shared memory
    is not visible as files, and nothing is removed. Processes of other containers that share
    /dev/shm cannot be seen: give each container its own.
    """
    if get_local_rank() == 0 and SHARED_MEMORY_FOLDER.is_dir():
        pattern = re.compile(rf"(\d{{6}})_({'|'.join(SHM_TO_CLEAN)})")
        in_use = mapped_prefixes()
        for path in SHARED_MEMORY_FOLDER.iterdir():
            match = pattern.fullmatch(path.name)
            if match and match[1] not in in_use and path.stat().st_uid == os.getuid():
                path.unlink(missing_ok=True)
                for name in (BARRIER_FILELOCK, CACHE_FILELOCK):
                    Path(tempfile.gettempdir(), f"{match[1]}_{name}").unlink(missing_ok=True)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def mapped_prefixes() -> set[str]:
    """The six-digit prefixes of Streaming's shared memory that living processes have mapped."""
    prefixes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            # The process has ended meanwhile, or is another user's, whose files we leave alone.
            continue
        prefixes.update(re.findall(rf"{SHARED_MEMORY_FOLDER}/(\d{{6}})_", text))
    return prefixes
