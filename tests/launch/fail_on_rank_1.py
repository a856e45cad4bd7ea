"""benchmark.py on a node that shares no disk, whose rank 1 runs out of memory after two steps.

Usage: composer ... fail_on_rank_1.py <flags of benchmark.py>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmark
from sdbench.measure.watch import StepWatch
from sdbench.record.store import RunFolder

step_ends = StepWatch.step_ends


def fail_after_two_steps(self, *, loss):
    """Do what the watch does, and then run out of memory."""
    step_ends(self, loss=loss)
    if self.timer.num_steps == 2:
        raise MemoryError("no room here")


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        StepWatch.step_ends = fail_after_two_steps
        RunFolder.claim_failure = lambda self: False
    sys.exit(benchmark.main())
