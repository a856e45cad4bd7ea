"""Keeps freed main memory in the process for reuse.

By default glibc returns large blocks to the kernel, which zeroes every page when they are allocated
again. Each step of SD2 on a CPU allocates several GiB.
"""

from __future__ import annotations

import ctypes

# Names and numbers of glibc's malloc.h; values as in the manual page mallopt(3).
M_TRIM_THRESHOLD, NEVER_TRIM = -1, -1
M_TOP_PAD, TOP_PAD_BYTES = -2, 256 * 1024**2
M_MMAP_MAX, NO_MMAP = -4, 0
M_MMAP_THRESHOLD, LARGE_BYTES = -3, 128 * 1024


def can_keep_freed_memory() -> bool:
    """Return True if the C library is glibc, whose allocator has this setting."""
    return hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def keep_freed_memory() -> None:
    """Keep freed memory in this process; to be called before weights are allocated.

    All blocks are allocated on the heap, which grows in large steps and never shrinks.
    """
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((M_MMAP_MAX, NO_MMAP), (M_TRIM_THRESHOLD, NEVER_TRIM), (M_TOP_PAD, TOP_PAD_BYTES))
    for parameter, value in settings:
        assert mallopt(parameter, value) == 1, f"mallopt refused parameter {parameter}"


def return_large_blocks() -> None:
    """Give each large block back to the kernel when it is freed, so that no freed memory is held.

    By default glibc soon keeps blocks of up to 32 MiB on the heap. What is freed between blocks
    that stay is then split, and too small for the next block.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) == 1
