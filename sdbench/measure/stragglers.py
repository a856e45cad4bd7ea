"""Finds ranks that are slower than the others.

Ranks that average their gradients end every step together, at the pace of the slowest: the time of
a step tells nothing about a single rank. What a rank does before it waits for others is its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.measure.phases import GRADIENT_COMMUNICATION

# A fifth more than the median is past what two profiled steps vary by on one kind of device.
MIN_TIMES_MEDIAN = 1.2


def own_step_time_s(breakdown: Mapping[str, Any]) -> float:
    """Time of a profiled step without the waiting for gradients of other ranks.

    Args:
        breakdown: Of one rank, see `phases.merge_phases`. With weights that the ranks share,
            waiting is part of the passes and cannot be told from work.
    """
    return breakdown["step_time_s"] - breakdown["seconds"][GRADIENT_COMMUNICATION]


def find_stragglers(
    own_step_times_s: Sequence[float], *, ranks_per_node: int
) -> list[dict[str, Any]]:
    """Ranks that take a fifth longer than the median rank, the slowest first.

    Args:
        own_step_times_s: Of each rank. Of an even number the lower of the two in the middle is the
            median, so that of two ranks one can be slow.
        ranks_per_node: Ranks with one number of a node.
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
