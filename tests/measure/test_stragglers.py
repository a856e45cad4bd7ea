"""Which ranks count as slower than the others. In a run: tests/test_two_ranks.py."""

from __future__ import annotations

from sdbench.measure.stragglers import find_stragglers


def test_a_rank_is_slow_from_a_fifth_above_the_median_on():
    # The median is 2.0 s: 2.375 s is 19 % more, 2.5 s 25 %.
    found = find_stragglers([2.0, 1.5, 2.0, 4.0, 2.5, 2.375, 1.75], ranks_per_node=2)
    assert found == [
        {"rank": 3, "node": 1, "own_step_time_s": 4.0, "times_median": 2.0},
        {"rank": 4, "node": 2, "own_step_time_s": 2.5, "times_median": 1.25},
    ]


def test_ranks_alike_have_no_straggler():
    assert find_stragglers([0.0, 0.0], ranks_per_node=1) == []
    assert find_stragglers([1.0], ranks_per_node=1) == []
