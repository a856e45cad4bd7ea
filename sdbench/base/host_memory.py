"""Tells glibc's allocator how to use main memory: keep what is freed, ask for huge pages.

By default glibc returns large blocks to the kernel, which zeroes every page when they are allocated
again. Each step of SD2 on a CPU allocates several GiB.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sdbench.base.errors import ConfigError

# Names and numbers of glibc's malloc.h; values as in the manual page mallopt(3).
M_TRIM_THRESHOLD, NEVER_TRIM = -1, -1
M_TOP_PAD, TOP_PAD_BYTES = -2, 256 * 1024**2
M_MMAP_MAX, NO_MMAP = -4, 0

# Read by glibc when a process starts: it asks the kernel for huge pages (madvise) wherever its heap
# grows. glibc's manual, Memory Allocation Tunables.
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
FIRST_GLIBC_WITH_HUGE_PAGES = (2, 35)
# Says in brackets whether the kernel gives them always, to who asks (madvise), or never.
KERNELS_CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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


def can_use_huge_pages() -> bool:
    """Whether the C library can ask for huge pages, and the kernel gives them."""
    if not can_keep_freed_memory() or not KERNELS_CHOICE.is_file():
        return False
    libc = ctypes.CDLL(None)
    libc.gnu_get_libc_version.restype = ctypes.c_char_p
    version = libc.gnu_get_libc_version().decode().split(".")[:2]
    is_known = tuple(map(int, version)) >= FIRST_GLIBC_WITH_HUGE_PAGES
    return is_known and "[never]" not in KERNELS_CHOICE.read_text()


def begin_with_huge_pages(argv: Sequence[str] | None) -> None:
    """Begin this process anew under `HUGE_PAGES`, unless it has begun so.

    Args:
        argv: The arguments of the program as it was called; None: those of the process.

    Raises:
        ConfigError: The program was called within a process that has other work.
    """
    tunables = os.environ.get(TUNABLES, "")
    if HUGE_PAGES in tunables.split(":"):
        return
    if argv is not None:
        raise ConfigError(
            "glibc is told of huge pages before a process starts, and this one runs already",
            value="--huge_pages",
            allowed=f"{TUNABLES}={HUGE_PAGES} in its environment, or --no_huge_pages",
            flag="--huge_pages",
        )
    tunables = f"{tunables}:{HUGE_PAGES}" if tunables else HUGE_PAGES
    if os.environ.get("RANK", "0") == "0":
        print(f"--huge_pages: begins again with {TUNABLES}={tunables}", file=sys.stderr, flush=True)
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**os.environ, TUNABLES: tunables})
