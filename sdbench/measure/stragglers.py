"""Finds ranks that are slower than the others.

Ranks that average gradients end every step together, at the pace of the slowest, so step times do
not show which rank is slow. The time that a rank works before it waits for others does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.measure.phases import GRADIENT_COMMUNICATION

# Two profiled steps on devices of one kind vary by less than a fifth.
MIN_TIMES_MEDIAN = 1.2


def own_step_time_s(breakdown: Mapping[str, Any]) -> float:
    """Time of a profiled step without the communication of gradients.

    Args:
        breakdown: Of one rank, see `phases.merge_phases`. With sharded weights, waiting is part of
            forward and backward passes and is not left out.
    """
    return breakdown["step_time_s"] - breakdown["seconds"][GRADIENT_COMMUNICATION]


def find_stragglers(
    own_step_times_s: Sequence[float], *, ranks_per_node: int
) -> list[dict[str, Any]]:
    """Ranks that take a fifth longer than the median rank, the slowest first.

    Args:
        own_step_times_s: Of each rank. With an even number of ranks the lower median is taken, so
            that one of two ranks can be slow.
        ranks_per_node: Number of ranks on each node.
    """
    median_s = statistics.median_low(own_step_times_s)
    found = [
        {
            "rank": rank,
            "node": rank // ranks_per_node,
            "own_step_time_s": own_s,
            "times_median": own_s / median_s,
        }
        for rank, own_s in enumerate(own_step_times_s)
        if own_s >= MIN_TIMES_MEDIAN * median_s and own_s > median_s
    ]
    return sorted(found, key=lambda rank: -rank["own_step_time_s"])
