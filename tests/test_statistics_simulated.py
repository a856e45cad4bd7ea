"""Coverage of intervals and error rates of verdicts, on simulated runs.

2,000 pairs of series of runs, as the steps of a training come: a step's time varies by 3 % and
resembles the one before it (lag-1 correlation 0.5 or 0.8), and runs differ by 1 % among themselves.
A run is 200 steps, and its rate is images over time.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from sdbench.statistics import intervals

SEED = 20261121
NUM_PAIRS = 2000
NUM_STEPS = 200
IMAGES_PER_STEP = 2048
STEP_CV = 0.03
RUN_CV = 0.01
# Share of verdicts at a true difference of 3 %, by correlation and runs on each side. The help of
# `python -m sdbench compare` rounds it to whole percents.
STATED_POWER = {
    (0.5, 3): 0.595,
    (0.5, 5): 0.915,
    (0.5, 10): 0.980,
    (0.8, 3): 0.515,
    (0.8, 5): 0.880,
    (0.8, 10): 0.965,
}


@functools.cache
def simulate_rates(correlation: float, num_runs: int) -> np.ndarray:
    """Images/s of every run, in the shape (pairs, 2 sides, runs); the true step time is 1 s."""
    generator = np.random.default_rng([SEED, round(10 * correlation), num_runs])
    shape = (NUM_PAIRS, 2, num_runs)
    run_mean_s = 1 + RUN_CV * generator.normal(size=shape)
    # First-order autoregression of unit variance, one step at a time for all runs at once.
    deviation = generator.normal(size=shape)
    total_s = np.zeros(shape)
    for _ in range(NUM_STEPS):
        total_s += run_mean_s * (1 + STEP_CV * deviation)
        innovation = generator.normal(size=shape)
        deviation = correlation * deviation + math.sqrt(1 - correlation**2) * innovation
    return NUM_STEPS * IMAGES_PER_STEP / total_s


def compare_all(correlation: float, num_runs: int, *, true_ratio: float):
    rates = simulate_rates(correlation, num_runs)
    return [intervals.compare(candidate * true_ratio, baseline) for candidate, baseline in rates]


def share_of(comparisons, verdict: str) -> float:
    return sum(comparison.verdict == verdict for comparison in comparisons) / NUM_PAIRS


@pytest.mark.parametrize(("correlation", "num_runs"), STATED_POWER)
def test_intervals_cover_the_truth_verdicts_are_right_and_power_is_as_stated(correlation, num_runs):
    comparisons = compare_all(correlation, num_runs, true_ratio=1.0)
    covered = sum(one.interval.low <= 1 <= one.interval.high for one in comparisons) / NUM_PAIRS
    wrong = share_of(comparisons, "faster") + share_of(comparisons, "slower")
    print(f"correlation {correlation}, {num_runs} runs: covers {covered:.1%}, wrong {wrong:.2%}")
    assert 0.93 <= covered <= 0.97
    assert wrong <= 0.02
    found = share_of(compare_all(correlation, num_runs, true_ratio=1.03), "faster")
    print(f"correlation {correlation}, {num_runs} runs: 3 % found in {found:.1%}")
    assert found == pytest.approx(STATED_POWER[correlation, num_runs], abs=0.001)
    if num_runs >= 5:
        for true_ratio, verdict in ((1.05, "faster"), (0.95, "slower")):
            found = share_of(compare_all(correlation, num_runs, true_ratio=true_ratio), verdict)
            assert found >= 0.99


@pytest.mark.parametrize(
    ("num_steps", "num_shapes", "slowest_s"), [(10, 5, 1.5), (30, 5, 1.5), (100, 2, 16.0)]
)
def test_steps_of_several_shapes_have_intervals_that_cover_the_rate_of_their_window(
    num_steps, num_shapes, slowest_s
):
    """Shapes in random order, whose times differ by up to half or 16-fold; a step varies by 3 %.

    With its shapes given, a window's true rate is known.
    """
    generator = np.random.default_rng(SEED)
    means_s = np.linspace(1, slowest_s, num_shapes)
    num_covered, widths = 0, []
    for _ in range(1000):
        shapes = generator.integers(0, num_shapes, num_steps)
        times_s = means_s[shapes] * (1 + STEP_CV * generator.normal(size=num_steps))
        leveled = intervals.level(times_s.tolist(), shapes.tolist())
        assert math.isclose(sum(leveled), times_s.sum())
        interval = intervals.within_run_interval(leveled, images_per_step=1)
        true_rate = num_steps / means_s[shapes].sum()
        num_covered += interval.low <= true_rate <= interval.high
        widths.append((interval.high - interval.low) / true_rate)
    assert 0.945 <= num_covered / 1000 <= 0.995
    # Of 10 steps of 5 shapes some are alone in theirs, and are not levelled.
    assert np.median(widths) < (0.2 if num_steps == 10 else 0.06)


def test_levelling_takes_out_what_is_between_kinds_and_nothing_else():
    assert intervals.level([1.0, 2.0, 3.0], ["a"] * 3) == [1.0, 2.0, 3.0]
    # Means 2 and 6, and 4.4 of all. Two means of five steps: sqrt(4 / 3).
    found = intervals.level([1.0, 3.0, 3.0, 9.0, 6.0], ["a", "a", "b", "b", "b"])
    mean, growth = 22 / 5, math.sqrt(4 / 3)
    expected = [mean + growth * deviation for deviation in (-1, 1, -3, 3, 0)]
    assert found == pytest.approx(expected)
    ratios = intervals.level([1.0, 3.0, 3.0, 9.0, 6.0], ["a", "a", "b", "b", "b"], as_ratios=True)
    expected = [mean + growth * mean * deviation for deviation in (-0.5, 0.5, -0.5, 0.5, 0)]
    assert ratios == pytest.approx(expected)
    # A slow first step of a kind with no other is not hidden by its own mean.
    assert intervals.level([1.0, 1.0, 20.0], ["a", "a", "b"]) == [1.0, 1.0, 20.0]
    # As many kinds as steps tell nothing of their scatter: they stay as they are.
    assert intervals.level([1.0, 2.0], ["a", "b"]) == [1.0, 2.0]
