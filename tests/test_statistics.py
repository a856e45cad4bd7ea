"""Intervals, drift and comparisons, many of them together, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sdbench.statistics import intervals


def test_within_run_interval_of_ten_steps_is_a_t_interval_over_single_steps():
    # Mean 2 s, sample standard deviation sqrt(10 x 0.1^2 / 9) = 0.105409 s, standard error
    # 0.105409 / sqrt(10) = 0.033333 s, t(0.975, 9 degrees) = 2.262157: half-width 0.0754052 s.
    step_times_s = [1.9, 2.1] * 5
    interval = intervals.within_run_interval(step_times_s, images_per_step=4)
    assert interval.low == pytest.approx(4 / 2.0754052, rel=1e-6)
    assert interval.high == pytest.approx(4 / 1.9245948, rel=1e-6)
    assert (interval.kind, interval.num_samples, interval.level) == ("within-run", 10, 0.95)


def test_the_within_run_interval_of_few_many_and_unequal_steps():
    assert intervals.within_run_interval([1.0, 2.0, 3.0] * 3, images_per_step=1) is None
    # Blocks of two steps, each with mean 1.5 s: what varies inside a block does not count.
    interval = intervals.within_run_interval([1.0, 2.0] * 20, images_per_step=3)
    assert interval.num_samples == 20
    assert interval.low == interval.high == pytest.approx(2.0)
    # An interval wider than its mean has no upper bound.
    interval = intervals.within_run_interval([0.01] * 5 + [100.0] * 5, images_per_step=1)
    assert interval.high == math.inf


def test_a_pause_that_was_seen_may_as_well_have_been_none_or_five():
    # The exact 95 % bounds of the mean of a Poisson variable of which 1 was seen: -ln(0.975) =
    # 0.0253178, and 5.571643, half the 0.975 quantile of chi squared with 4 degrees of freedom.
    def bounds_s(step_times_s):
        interval = intervals.within_run_interval(step_times_s, images_per_step=1)
        return 1 / interval.high, 1 / interval.low

    even = pytest.approx((1 + 0.0253178 * 2 / 10, 1 + 5.571643 * 2 / 10), rel=1e-6)
    assert bounds_s([1.0] * 9 + [3.0]) == bounds_s([1.0] * 4 + [3.0] + [1.0] * 5) == even
    # Two slow steps in a row are one pause of 2 + 1 s.
    one = pytest.approx((1 + 0.0253178 * 3 / 10, 1 + 5.571643 * 3 / 10), rel=1e-6)
    assert bounds_s([1.0] * 3 + [3.0, 2.0] + [1.0] * 5) == one
    # Apart they are two of 2 s each: of 2 seen, the bounds are 0.2422093 and 7.224688.
    two = pytest.approx((1 + 0.2422093 * 2 / 10, 1 + 7.224688 * 2 / 10), rel=1e-6)
    assert bounds_s([1.0] * 3 + [3.0, 1.0, 3.0] + [1.0] * 4) == two
    # Steps of 0.9 and 1.1 s in turn, nine of them, of mean 8.9 / 9 or 9.1 / 9: what varies within
    # them and what the number of pauses may be add up as squares.
    plain_s = [0.9, 1.1] * 4 + [0.9]
    half_s = 2.306004 * float(np.std(plain_s, ddof=1)) / 3  # t(0.975, 8 degrees)
    mean_s, added_s = (8.9 + 3) / 10, (3 - 8.9 / 9) / 10
    expected = (
        mean_s - math.hypot(half_s, added_s * (1 - 0.0253178)),
        mean_s + math.hypot(half_s, added_s * (5.571643 - 1)),
    )
    assert bounds_s([*plain_s, 3.0]) == pytest.approx(expected, rel=1e-6)


def test_precision_takes_three_steps_per_share_and_half_a_minute():
    assert not intervals.is_precise([1.0] * 299, target=0.01)
    assert intervals.is_precise([1.0] * 300, target=0.01)
    assert intervals.is_precise([1.0] * 60, target=0.05)
    assert not intervals.is_precise([0.0999] * 300, target=0.01)
    assert intervals.is_precise([0.0999] * 301, target=0.01)
    # A pause that doubles one of 300 steps adds 1 / 300, and 5.57 / 300 = 1.9 % at its bound: half
    # the width, (5.57 - 0.03) / 300 / 2, is 0.92 % of the mean. Two pauses: (7.22 - 0.24) / 600.
    even = [1.0] * 149
    assert intervals.is_precise([*even, 2.0, *even, 1.0], target=0.01)
    assert not intervals.is_precise([*even, 2.0, *even, 2.0], target=0.01)


def test_drift_is_told_by_a_slope_and_by_a_jump():
    # From 1.09 to 1.00 s in ten steps: -0.09 over the mean of 1.045; halves 1.02 and 1.07.
    finding = intervals.check_steady([1.09 - 0.01 * index for index in range(10)])
    assert not finding.is_steady
    assert finding.trend == pytest.approx(-0.09 / 1.045)
    assert finding.jump == pytest.approx(1.02 / 1.07 - 1)
    # A slow step alone is a pause, a slow stretch is not.
    assert intervals.check_steady([1.0] * 9 + [2.0]).trend == pytest.approx(0.0)
    assert intervals.check_steady([1.0] * 8 + [2.0] * 2).trend > 0.5
    # A jump has a slope as well, but the two levels are what tells it, wherever it is.
    for place in (4, 10, 16):
        finding = intervals.check_steady([1.0] * place + [1.03] * (20 - place))
        assert not finding.is_steady and finding.jump == pytest.approx(0.03)
    assert intervals.check_steady([1.0] * 20).is_steady
    assert intervals.check_steady([1.0] * 9) is None


def test_outliers_are_those_beyond_fifteen_median_deviations():
    # Median 1.0, deviations 0.01 for all but one: the bound is 1.0 +- 0.14826.
    steps = [0.99, 1.01] * 10 + [1.0]
    assert intervals.count_outliers([*steps, 1.14]) == 0
    assert intervals.count_outliers([*steps, 1.16]) == 1


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
