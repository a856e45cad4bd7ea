"""Which ranks count as slower than the others. In a run: tests/engines/test_slow_ranks.py."""

from __future__ import annotations

from sdbench.measure.phases import PHASES, find_stragglers


def seconds(**phases):
    """The phases of a step on one rank."""
    return {**dict.fromkeys(PHASES, 0.0), **phases}


def test_a_rank_is_slow_from_a_fifth_above_the_median_on():
    # The median is 2.0 s: 2.375 s is 19 % more, 2.5 s 25 %.
    own_s = [2.0, 1.5, 2.0, 4.0, 2.5, 2.375, 1.75]
    ranks = [seconds(backward=time_s, rank_wait=4.0 - time_s) for time_s in own_s]
    slow = {"slow_phase": "backward"}
    assert find_stragglers(ranks, ranks_per_node=2) == [
        {"rank": 3, "node": 1, "own_step_time_s": 4.0, "times_median": 2.0, **slow},
        {"rank": 4, "node": 2, "own_step_time_s": 2.5, "times_median": 1.25, **slow},
    ]


def test_the_phase_is_the_one_that_takes_longer_than_on_the_median_rank():
    quick = seconds(backward=2.0, optimizer=0.25, gradient_communication=0.75)
    slow = seconds(backward=2.125, optimizer=0.875)
    assert find_stragglers([slow, quick], ranks_per_node=2) == [
        {
            "rank": 0,
            "node": 0,
            "own_step_time_s": 3.0,
            "times_median": 3.0 / 2.25,
            "slow_phase": "optimizer",
        }
    ]


def test_equal_ranks_have_no_straggler():
    assert find_stragglers([seconds(), seconds()], ranks_per_node=1) == []
    assert find_stragglers([seconds(ema=1.0)], ranks_per_node=1) == []
