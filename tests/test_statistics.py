"""Intervals and comparisons against values worked out by hand, and their coverage."""

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


def test_nine_steps_have_no_interval():
    assert intervals.within_run_interval([1.0, 2.0, 3.0] * 3, images_per_step=1) is None


def test_many_steps_make_twenty_blocks():
    # Blocks of two steps, each with mean 1.5 s: what varies inside a block does not count.
    interval = intervals.within_run_interval([1.0, 2.0] * 20, images_per_step=3)
    assert interval.num_samples == 20
    assert interval.low == interval.high == pytest.approx(2.0)


def test_an_interval_wider_than_its_mean_has_no_upper_bound():
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


def test_between_runs_interval_needs_three_runs():
    assert intervals.between_runs_interval([10.0, 11.0]) is None
    # Logs 0 and +-ln 2: mean 0, sd ln 2, standard error 0.400188, t(0.975, 2) = 4.302653.
    interval = intervals.between_runs_interval([0.5, 1.0, 2.0])
    assert interval.low == pytest.approx(math.exp(-4.302653 * 0.4001887), rel=1e-5)
    assert interval.high == pytest.approx(1 / interval.low)
    assert interval.kind == "between-runs"


def test_compare_says_faster_only_when_shown():
    faster = intervals.compare([2.00, 2.01, 1.99], [1.00, 1.01, 0.99])
    assert faster.verdict == "faster"
    assert faster.ratio == pytest.approx(2.0, rel=1e-3)
    assert faster.interval.low < 2.0 < faster.interval.high
    assert intervals.compare([1.00, 1.01, 0.99], [2.00, 2.01, 1.99]).verdict == "slower"


def test_compare_ignores_a_change_below_two_percent_however_sure():
    rates = np.array([1.0, 1.0001, 0.9999])
    assert intervals.compare(rates * 1.015, rates).verdict == "no difference shown"
    assert intervals.compare(rates * 1.025, rates).verdict == "faster"


def test_compare_does_not_test_a_single_run():
    comparison = intervals.compare([1.3], [1.0])
    assert (comparison.verdict, comparison.interval) == ("not tested", None)
    assert comparison.ratio == pytest.approx(1.3)


def correlated_steps(generator, *, num_trials, num_steps, correlation, variation=0.03):
    """Step times around 1 s whose deviations are a first-order autoregression."""
    noise = generator.normal(size=(num_trials, num_steps))
    steps = np.empty_like(noise)
    steps[:, 0] = noise[:, 0]
    for index in range(1, num_steps):
        new = math.sqrt(1 - correlation**2) * noise[:, index]
        steps[:, index] = correlation * steps[:, index - 1] + new
    return 1 + variation * steps


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_within_run_interval_covers_the_truth_with_correlated_steps(correlation):
    # An i.i.d. interval over single steps covers 70 % of the time at 0.5 and 44 % at 0.8. With 1000
    # trials at a true coverage of 95 % the standard error is 0.7 %.
    trials = correlated_steps(
        np.random.default_rng(0), num_trials=1000, num_steps=200, correlation=correlation
    )
    covered = 0
    for trial in trials:
        interval = intervals.within_run_interval(list(trial), images_per_step=1)
        covered += interval.low <= 1.0 <= interval.high
    assert 0.93 <= covered / len(trials) <= 0.98


@pytest.mark.parametrize(
    ("num_steps", "correlation", "least"),
    [(10, 0.0, 0.93), (10, 0.5, 0.92), (10, 0.8, 0.88), (20, 0.5, 0.93), (20, 0.8, 0.90)],
)
def test_windows_as_short_as_the_defaults_cover_nearly_as_often(num_steps, correlation, least):
    # The standard error of 1500 trials is 0.6 %.
    trials = correlated_steps(
        np.random.default_rng(3), num_trials=1500, num_steps=num_steps, correlation=correlation
    )
    covered = 0
    for trial in trials:
        interval = intervals.within_run_interval(list(trial), images_per_step=1)
        covered += interval.low <= 1.0 <= interval.high
    assert least <= covered / len(trials) <= 0.99


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_stopping_at_a_precision_hardly_costs_coverage(correlation):
    # WindowPolicy at 20, 40, ... 320 steps for 5 %, as --target_precision has them.
    trials = correlated_steps(
        np.random.default_rng(1),
        num_trials=400,
        num_steps=320,
        correlation=correlation,
        variation=0.1,
    )
    covered = 0
    for trial in trials:
        looks = (20, 40, 80, 160, 320)
        length = next(
            (n for n in looks if intervals.is_precise(list(trial[:n]), target=0.05)), looks[-1]
        )
        interval = intervals.within_run_interval(list(trial[:length]), images_per_step=1)
        covered += interval.low <= 1.0 <= interval.high
    # The standard error of 400 trials is 1.3 %.
    assert 0.89 <= covered / len(trials) <= 0.985


def test_a_trend_is_drift_and_noise_is_not():
    generator = np.random.default_rng(2)
    settled = correlated_steps(generator, num_trials=200, num_steps=100, correlation=0.5)
    false_alarms = sum(not intervals.check_steady(list(trial)).is_steady for trial in settled)
    assert false_alarms <= 20  # a tenth
    trend = np.linspace(1.10, 1.0, 100)
    found = sum(not intervals.check_steady(list(trial * trend)).is_steady for trial in settled)
    assert found >= 190


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
