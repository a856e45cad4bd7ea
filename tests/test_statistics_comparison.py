"""Comparisons, many of them together and their mean, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sdbench.statistics import intervals


def test_a_change_below_two_percent_is_ignored_and_a_single_run_is_not_tested():
    rates = np.array([1.0, 1.0001, 0.9999])
    assert intervals.compare(rates * 1.015, rates).verdict == "no difference shown"
    assert intervals.compare(rates * 1.025, rates).verdict == "faster"
    single = intervals.compare([1.3], [1.0])
    assert (single.verdict, single.interval) == ("not tested", None)
    assert single.ratio == pytest.approx(1.3)


def test_runs_without_any_variation_have_a_point_for_an_interval():
    same = intervals.compare([2.0, 2.0], [2.0, 2.0])
    assert (same.verdict, same.p_value) == ("no difference shown", 1.0)
    double = intervals.compare([2.0, 2.0], [1.0, 1.0])
    assert (double.verdict, double.p_value) == ("faster", 0.0)
    assert double.interval.low == double.interval.high == pytest.approx(2.0)


def test_the_geometric_mean_of_two_comparisons_by_hand():
    # Logs of the candidate +-d around 0, of the baseline 0 and 0: with two runs the variance of a
    # mean is (2 d^2) / 2 = d^2 on 1 degree of freedom, the baseline's is 0. Two such comparisons
    # have a mean of variance (d1^2 + d2^2) / 4 and, with d1 = d2 = d, 2 degrees of freedom:
    # (d^2/2)^2 / (2 (d^2/4)^2 / 1) = 2, and t(0.975, 2) = 4.302653.
    spread = 0.01
    rates = [math.exp(spread), math.exp(-spread)]
    comparisons = [
        intervals.compare([ratio * rate for rate in rates], [1.0, 1.0]) for ratio in (1.2, 1.5)
    ]
    mean = intervals.geometric_mean(comparisons)
    half = 4.302653 * math.sqrt(spread**2 / 2)
    assert mean.ratio == pytest.approx(math.sqrt(1.2 * 1.5))
    assert mean.degrees_of_freedom == pytest.approx(2)
    assert mean.interval.low == pytest.approx(mean.ratio * math.exp(-half), rel=1e-6)
    assert mean.interval.high == pytest.approx(mean.ratio * math.exp(half), rel=1e-6)
    assert mean.verdict == "faster"

    # With an untested comparison the mean is not tested.
    mean = intervals.geometric_mean([comparisons[0], intervals.compare([8.0], [1.0])])
    assert mean.ratio == pytest.approx(math.sqrt(1.2 * 8))
    assert (mean.interval, mean.verdict) == (None, "not tested")


@pytest.mark.parametrize(
    ("p_values", "kept"),
    [
        # 0.001 <= 0.05/4 passes, 0.02 > 0.05/3 stops all others.
        ((0.03, 0.001, 0.04, 0.02), [1]),
        # 0.012 <= 0.05/4, 0.016 <= 0.05/3, 0.02 <= 0.05/2 and 0.04 <= 0.05/1.
        ((0.04, 0.016, 0.012, 0.02), [0, 1, 2, 3]),
        # An untested comparison does not count.
        ((0.04, *[None] * 20), [0]),
    ],
)
def test_holm_takes_back_the_verdicts_that_chance_explains(p_values, kept):
    interval = intervals.Interval(1.05, 1.15, 0.95, "between-runs", 5)
    comparisons = [
        intervals.compare([2.0], [1.0])
        if p_value is None
        else intervals.Comparison(1.1, interval, "faster", 0.0004, 8.0, p_value)
        for p_value in p_values
    ]
    corrected = intervals.correct_verdicts(comparisons)
    assert [index for index, one in enumerate(corrected) if one.verdict == "faster"] == kept
    assert [one.interval for one in corrected] == [one.interval for one in comparisons]
