"""Keeps main memory that a freed tensor leaves behind, for the next one.

By default glibc hands large blocks back to the kernel, which has to fill every page with zeros when
the next step asks for them again. A step of SD2 on a CPU allocates several GiB anew each time.
"""

from __future__ import annotations

import ctypes

# Names and numbers of glibc's malloc.h; values as in the manual page mallopt(3).
M_TRIM_THRESHOLD, NEVER_TRIM = -1, -1
M_TOP_PAD, TOP_PAD_BYTES = -2, 256 * 1024**2
M_MMAP_MAX, NO_MMAP = -4, 0


def can_keep_freed_memory() -> bool:
    """Whether this C library is glibc, whose allocator can be told to keep memory."""
    return hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def keep_freed_memory() -> None:
    """Let this process keep what it frees and use it again; to be called before weights are built.

    No block is mapped by itself any more, so that none is unmapped when it is freed; the heap grows
    in large pieces and is never cut back.
    """
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((M_MMAP_MAX, NO_MMAP), (M_TRIM_THRESHOLD, NEVER_TRIM), (M_TOP_PAD, TOP_PAD_BYTES))
    for parameter, value in settings:
        assert mallopt(parameter, value) == 1, f"mallopt refused parameter {parameter}"
