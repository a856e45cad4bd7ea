"""Keeps freed main memory in the process for reuse, and has it in huge pages.

By default glibc returns large blocks to the kernel, which zeroes every page when they are allocated
again. Each step of SD2 on a CPU allocates several GiB.
"""

from __future__ import annotations

import ctypes
import mmap

from sdbench.base.units import BYTES_PER_GIB

# Names and numbers of glibc's malloc.h; values as in the manual page mallopt(3).
M_TRIM_THRESHOLD, NEVER_TRIM = -1, -1
M_TOP_PAD, TOP_PAD_BYTES = -2, 256 * 1024**2
M_MMAP_MAX, NO_MMAP = -4, 0
HUGE_PAGE_BYTES = 2 * 1024**2


def can_keep_freed_memory() -> bool:
    """Whether the C library is glibc, whose allocator has this setting."""
    return hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def keep_freed_memory() -> None:
    """Keep freed memory in this process; to be called before weights are allocated.

    All blocks are allocated on the heap, which grows in large steps and never shrinks; none is
    mapped, and so unmapped, by itself.
    """
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((M_MMAP_MAX, NO_MMAP), (M_TRIM_THRESHOLD, NEVER_TRIM), (M_TOP_PAD, TOP_PAD_BYTES))
    for parameter, value in settings:
        assert mallopt(parameter, value) == 1, f"mallopt refused parameter {parameter}"


def take_huge_pages(memory_gib: float) -> None:
    """Have so much memory to come in pages of 2 MiB; to be called behind `keep_freed_memory`.

    By default many kernels give them only to who asks, and else a step's first touch of each 4 KiB
    is a call of the kernel. Nothing is touched here: the heap gets its addresses at once, and keeps
    them as free. Where it cannot grow so far, or the kernel has no huge pages, all stays as it was.

    Args:
        memory_gib: That will be used; what goes beyond it has small pages.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_bytes = int(memory_gib * BYTES_PER_GIB)
    start = libc.malloc(num_bytes)
    if start is None:
        return
    begin = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (start + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end > begin:
        libc.madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
    libc.free(start)
