"""`find_stragglers` finds ranks that are slower than the others.

Ranks that average gradients end every step together, at the pace of the slowest, so step times do
not show which rank is slow. The time that a rank works without waiting for others does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.measure.phases import PHASES, WAITS

# Two profiled steps on devices of one kind vary by less than a fifth.
MIN_TIMES_MEDIAN = 1.2


def find_stragglers(
    ranks: Sequence[Mapping[str, float]], *, ranks_per_node: int
) -> list[dict[str, Any]]:
    """Ranks that work a fifth longer on a step than the median rank, the slowest first.

    Args:
        ranks: Seconds of each phase of a profiled step on each rank. FSDP's waits are part of
            forward and backward passes: a rank that is slow in those alone may not be found.
        ranks_per_node: Number of ranks on each node.

    Returns:
        Number, node, time of a step without the phases `WAITS`, and the phase that exceeds the
        median rank's by most. With an even number of ranks the lower median is taken, so that one
        of two ranks can be slow.
    """
    own = [{phase: rank[phase] for phase in PHASES if phase not in WAITS} for rank in ranks]
    own_step_times_s = [sum(rank.values()) for rank in own]
    median_s = statistics.median_low(own_step_times_s)
    medians_s = {phase: statistics.median_low(rank[phase] for rank in own) for phase in own[0]}
    found = [
        {
            "rank": rank,
            "node": rank // ranks_per_node,
            "own_step_time_s": own_s,
            "times_median": own_s / median_s,
            "slow_phase": max(medians_s, key=lambda phase: own[rank][phase] - medians_s[phase]),
        }
        for rank, own_s in enumerate(own_step_times_s)
        if own_s >= MIN_TIMES_MEDIAN * median_s and own_s > median_s
    ]
    return sorted(found, key=lambda rank: -rank["own_step_time_s"])
