"""Which ranks count as slower than the others. In a run: tests/engines/test_slow_ranks.py."""

from __future__ import annotations

from sdbench.measure.phases import PHASES, find_stragglers


def seconds(**phases):
    """The phases of a step on one rank."""
    return {**dict.fromkeys(PHASES, 0.0), **phases}


def found(ranks):
    """Rank, node, time, ratio to the median and phase of each straggler, on nodes of two ranks."""
    return [tuple(one.values()) for one in find_stragglers(ranks, ranks_per_node=2)]


def test_a_rank_is_slow_from_a_fifth_above_the_median_on():
    # The median is 2.0 s: 2.375 s is 19 % more, 2.5 s 25 %.
    own_s = [2.0, 1.5, 2.0, 4.0, 2.5, 2.375, 1.75]
    ranks = [seconds(backward=time_s, rank_wait=4.0 - time_s) for time_s in own_s]
    assert found(ranks) == [(3, 1, 4.0, 2.0, "backward"), (4, 2, 2.5, 1.25, "backward")]
    assert found([seconds(), seconds()]) == found([seconds(ema=1.0)]) == []


def test_the_phase_is_the_one_that_takes_longer_than_on_the_median_rank():
    quick = seconds(backward=2.0, optimizer=0.25, gradient_communication=0.75)
    slow = seconds(backward=2.125, optimizer=0.875)
    assert found([slow, quick]) == [(0, 0, 3.0, 3.0 / 2.25, "optimizer")]
