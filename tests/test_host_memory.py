"""Memory that a process keeps, and the pages that it comes in, told by the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sdbench.base.host_memory import can_keep_freed_memory

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Prints the KiB that came in huge pages: before 48 MiB are written, while they are there, and the
# page faults of writing them once more after they were freed.
CHILD = """
import re, resource, sys
from pathlib import Path
from sdbench.base.host_memory import keep_freed_memory, take_huge_pages
def huge_kib():
    return int(re.search(r"AnonHugePages: +(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])
keep_freed_memory()
take_huge_pages(float(sys.argv[1]))
before = huge_kib()
array = bytearray(b"1") * (48 << 20)
during = huge_kib()
del array
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
array = bytearray(b"1") * (48 << 20)
print(during - before, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""

pytestmark = pytest.mark.skipif(not can_keep_freed_memory(), reason="no glibc")


def run(repository: Path, memory_gib: float) -> tuple[int, int]:
    command = [sys.executable, "-c", CHILD, str(memory_gib)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    huge_kib, num_faults = map(int, done.stdout.split())
    return huge_kib, num_faults


@pytest.mark.skipif(
    not MODES.exists() or "[madvise]" not in MODES.read_text(),
    reason="the kernel does not leave it to processes to ask for huge pages",
)
def test_the_memory_that_was_announced_comes_in_huge_pages(repository) -> None:
    huge_kib, num_faults = run(repository, 0.125)
    # All but the ends; and fragmented memory may have a few huge pages too few.
    assert 40 << 10 <= huge_kib <= 48 << 10
    assert num_faults < 100  # of 12,288 small pages: the freed memory was kept


def test_memory_that_no_machine_has_is_not_asked_for(repository) -> None:
    huge_kib, num_faults = run(repository, 2.0**30)
    assert huge_kib == 0
    assert num_faults < 100
