"""Confidence intervals of throughput, and comparisons of sets of runs.

The run is the unit of replication: an interval from the steps of one run is labelled
within-run, one from several runs between-runs. A rate is images over time, never a mean of rates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

MAX_BLOCKS = 20
MIN_STEPS = 10
MIN_RUNS = 3
LEVEL = 0.95
# A window has settled when its trend changes the step time by no more than 1 % from end to end and
# its halves differ by no more than 2 %.
MAX_TREND = 0.01
MAX_HALVES_DIFFERENCE = 0.02
# hyperfine's bound on the modified z-score, 0.6745 |x - median| / MAD > 10: a distance of more than
# 14.826 times the median absolute deviation.
OUTLIER_MADS = 14.826
# A window that looks precise may have stopped on a lucky stretch. Asking for the worth of 20
# independent steps kept the coverage of the interval at the stop between 91 and 97 % in simulations
# (tests/test_statistics.py); without it, 85 % at a lag-1 correlation of 0.8.
MIN_EFFECTIVE_STEPS = 20
MAX_LAG1_CORRELATION = 0.95
# The correlation of a few steps is itself known badly, and taken too low it makes an interval too
# narrow. Half a standard error more, 1 / (2 sqrt(n)), brings the coverage of 10 and 20 steps with a
# correlation of 0.5 from 90 and 92 % to 94 and 95 %, and with 0.8 from 86 and 89 % to 90 and 92 %.
CORRELATION_MARGIN = 0.5
# Two sets of runs on one machine differ by about 1 to 2 % for other reasons (clock, neighbours,
# page placement), so a smaller difference is not called one.
NOISE_THRESHOLD = 0.02
FASTER = "faster"
SLOWER = "slower"
NO_DIFFERENCE = "no difference shown"
NOT_TESTED = "not tested"


@dataclasses.dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval.

    Attributes:
        low: Lower end.
        high: Upper end; infinity where the data allow no bound.
        level: Confidence level, 0.95.
        kind: ``within-run`` or ``between-runs``.
        num_samples: Number of blocks or runs that it is computed from.
    """

    low: float
    high: float
    level: float
    kind: str
    num_samples: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The ratio of the rates of two sets of runs, with its interval and verdict.

    Attributes:
        ratio: Geometric-mean rate of the candidate over that of the baseline.
        interval: Welch t interval of the ratio on logs; None with fewer than two runs on a side.
        verdict: ``faster``, ``slower``, ``no difference shown`` or ``not tested``.
        log_variance: Squared standard error of the logarithm of the ratio; None if not tested.
        degrees_of_freedom: Of that variance, by Welch and Satterthwaite; None if not tested.
        p_value: Chance of a difference at least this large if there is none; None if not tested.
    """

    ratio: float
    interval: Interval | None
    verdict: str
    log_variance: float | None = None
    degrees_of_freedom: float | None = None
    p_value: float | None = None


@dataclasses.dataclass(frozen=True)
class Steadiness:
    """Whether a window of steps has settled.

    Attributes:
        is_steady: Whether neither trend nor halves show a change that is large and beyond noise.
        trend: Theil-Sen slope times the window's length, as a fraction of the median step time.
        halves_difference: Mean of the second half over that of the first, minus 1.
    """

    is_steady: bool
    trend: float
    halves_difference: float


def within_run_interval(step_times_s: Sequence[float], *, images_per_step: int) -> Interval | None:
    """Interval of images/s from the steps of one run, by block means.

    Consecutive steps are correlated, so an interval over single steps is too narrow. The means of
    at most 20 blocks of consecutive steps are less correlated: a t interval over them is converted
    to a rate. Where the lag-1 correlation of the steps gives a wider interval, that one is taken,
    since the means of short blocks are still correlated.

    Args:
        step_times_s: Times of the measured steps in order, in seconds.
        images_per_step: Images of one optimizer step over all ranks.

    Returns:
        The interval in images/s, or None with fewer than 10 steps.
    """
    if len(step_times_s) < MIN_STEPS:
        return None
    blocks = _block_means(step_times_s)
    mean_s, half_s = _mean_step(step_times_s)
    return Interval(
        low=images_per_step / (mean_s + half_s),
        high=images_per_step / (mean_s - half_s) if mean_s > half_s else math.inf,
        level=LEVEL,
        kind="within-run",
        num_samples=len(blocks),
    )


def is_precise(step_times_s: Sequence[float], *, target: float) -> bool:
    """Whether the mean step time is known precisely enough to end the window.

    Ask at steps that were fixed beforehand, not after every step.

    Args:
        step_times_s: Times of the steps so far, in seconds.
        target: Half-width of the within-run interval as a fraction of the mean, e.g. 0.01.
    """
    if len(step_times_s) < MIN_STEPS or _num_effective(step_times_s) < MIN_EFFECTIVE_STEPS:
        return False
    mean_s, half_s = _mean_step(step_times_s)
    return half_s <= target * mean_s


def check_steady(step_times_s: Sequence[float]) -> Steadiness | None:
    """Check whether a window of steps has settled, by its slope and by its halves.

    Both are computed from block means, so that a single slow step does not decide, and count only
    where they exceed the noise of the blocks.

    Args:
        step_times_s: Times of the steps in order, in seconds.

    Returns:
        The finding, or None with fewer than 10 steps.
    """
    if len(step_times_s) < MIN_STEPS:
        return None
    from scipy import stats

    blocks = np.asarray(_block_means(step_times_s))
    slope = stats.theilslopes(blocks, alpha=LEVEL)
    trend = float(slope.slope) * (len(blocks) - 1) / float(np.median(blocks))
    first, second = np.array_split(blocks, 2)
    difference = float(second.mean() / first.mean()) - 1

    # What is left without the trend, or without the two levels, is noise. Where it is correlated, a
    # stretch of slow steps looks like a change, and the bounds are widened by the square root of
    # blocks over independent ones.
    noise = blocks - slope.slope * np.arange(len(blocks))
    slope_bound = (slope.high_slope - slope.low_slope) / 2 * _widening(noise)
    has_trend = abs(trend) > MAX_TREND and abs(slope.slope) > slope_bound
    noise = np.concatenate([first - first.mean(), second - second.mean()])
    # The difference of two means of k/2 blocks each has the variance 4 s^2 / k.
    error = float(np.std(noise, ddof=2)) * 2 / math.sqrt(len(blocks)) * _widening(noise)
    halves_differ = (
        abs(difference) > MAX_HALVES_DIFFERENCE
        and abs(float(second.mean() - first.mean())) > t_quantile(len(blocks) - 2) * error
    )
    return Steadiness(not (has_trend or halves_differ), trend, difference)


def count_outliers(step_times_s: Sequence[float]) -> int:
    """Number of steps far from the median. No step is left out for it."""
    times_s = np.asarray(step_times_s)
    distances = np.abs(times_s - np.median(times_s))
    return int((distances > OUTLIER_MADS * np.median(distances)).sum())


def between_runs_interval(rates: Sequence[float]) -> Interval | None:
    """Interval of the geometric-mean rate of runs: t on the logs of their rates.

    Args:
        rates: Images/s of each run.

    Returns:
        The interval around the geometric mean, or None with fewer than three runs.
    """
    if len(rates) < MIN_RUNS:
        return None
    mean, half = _mean_and_half_width([math.log(rate) for rate in rates])
    return Interval(
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        level=LEVEL,
        kind="between-runs",
        num_samples=len(rates),
    )


def compare(rates: Sequence[float], baseline_rates: Sequence[float]) -> Comparison:
    """Compare two sets of runs by the ratio of their geometric-mean rates.

    The verdict is faster or slower only if the 95 % Welch interval excludes 1 and the change is
    more than 2 %. In simulations of runs that differ by 1 % (tests/test_statistics_simulated.py),
    the interval of three runs on each side covers the truth in 96 to 97 %. A pooled variance would
    cover it in 95 %, but only if both sides vary alike.

    Args:
        rates: Images/s of each run of the candidate.
        baseline_rates: Images/s of each run of the baseline.

    Returns:
        The ratio of the candidate over the baseline, with interval and verdict.
    """
    logs, baseline_logs = np.log(rates), np.log(baseline_rates)
    difference = float(logs.mean() - baseline_logs.mean())
    num_samples = min(len(logs), len(baseline_logs))
    if num_samples < 2:
        return Comparison(math.exp(difference), None, NOT_TESTED)
    parts = [(float(side.var(ddof=1)) / len(side), len(side) - 1) for side in (logs, baseline_logs)]
    return _judge(difference, parts, num_samples=num_samples)


def mean_rate(rates: Sequence[float]) -> float:
    """Geometric mean of the rates of runs; of a single run, exactly its rate."""
    if len(rates) == 1:
        return rates[0]
    return math.exp(math.fsum(map(math.log, rates)) / len(rates))


def geometric_mean(comparisons: Sequence[Comparison]) -> Comparison:
    """The geometric mean of the ratios of several configurations to their baselines.

    Its interval covers the variation between runs, and not how the ratios differ: it holds for
    these configurations and for no others.

    Args:
        comparisons: At least one comparison; no run may be in two of them.

    Returns:
        The mean. It is not tested and has no interval if one of the comparisons is not tested.
    """
    mean = float(np.mean([math.log(comparison.ratio) for comparison in comparisons]))
    if any(comparison.interval is None for comparison in comparisons):
        return Comparison(math.exp(mean), None, NOT_TESTED)
    # The variance of a mean of k independent differences is the sum of theirs over k squared.
    parts = [
        (comparison.log_variance / len(comparisons) ** 2, comparison.degrees_of_freedom)
        for comparison in comparisons
    ]
    num_samples = min(comparison.interval.num_samples for comparison in comparisons)
    return _judge(mean, parts, num_samples=num_samples)


def correct_verdicts(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Correct the verdicts of several comparisons for their number, by Holm's method.

    Of m p values in ascending order, the first has to pass 5 %/m, the next 5 %/(m - 1), until one
    does not pass (Scandinavian Journal of Statistics 6, 1979). Intervals are not changed.

    Args:
        comparisons: Comparisons, tested or not.

    Returns:
        The same comparisons, with `NO_DIFFERENCE` for a verdict that does not pass.
    """
    corrected = list(comparisons)
    tested = [index for index, one in enumerate(corrected) if one.interval is not None]
    by_p_value = sorted(tested, key=lambda index: corrected[index].p_value)
    for rank, index in enumerate(by_p_value):
        if corrected[index].p_value > (1 - LEVEL) / (len(by_p_value) - rank):
            for kept in by_p_value[rank:]:
                corrected[kept] = dataclasses.replace(corrected[kept], verdict=NO_DIFFERENCE)
            break
    return corrected


def _judge(
    difference: float, parts: Sequence[tuple[float, float]], *, num_samples: int
) -> Comparison:
    """Ratio, interval and verdict of a difference of logs.

    Args:
        difference: The difference.
        parts: Variance and degrees of freedom of each independent part of it.
        num_samples: Number of runs on the smaller side.
    """
    from scipy import special

    variance = sum(part for part, _ in parts)
    if variance > 0:  # Welch and Satterthwaite
        degrees = variance**2 / sum(part**2 / df for part, df in parts)
        distance = abs(difference) / math.sqrt(variance)
    else:  # every run gave the same: the interval is a point
        degrees = sum(df for _, df in parts)
        distance = math.inf if difference else 0.0
    half = t_quantile(degrees) * math.sqrt(variance)
    interval = Interval(
        low=math.exp(difference - half),
        high=math.exp(difference + half),
        level=LEVEL,
        kind="between-runs",
        num_samples=num_samples,
    )
    ratio = math.exp(difference)
    return Comparison(
        ratio,
        interval,
        _verdict(ratio, interval),
        log_variance=variance,
        degrees_of_freedom=degrees,
        p_value=2 * float(special.stdtr(degrees, -distance)),
    )


def _verdict(ratio: float, interval: Interval) -> str:
    if interval.low <= 1 <= interval.high or abs(ratio - 1) <= NOISE_THRESHOLD:
        return NO_DIFFERENCE
    return FASTER if ratio > 1 else SLOWER


def _widening(noise: Sequence[float]) -> float:
    return math.sqrt(len(noise) / _num_effective(noise))


def _block_means(step_times_s: Sequence[float]) -> list[float]:
    num_blocks = min(MAX_BLOCKS, len(step_times_s))
    blocks = np.array_split(np.asarray(step_times_s, dtype=float), num_blocks)
    return [float(block.mean()) for block in blocks]


def _num_effective(samples: Sequence[float]) -> float:
    """Number of independent samples with the same error of the mean: n (1 - r) / (1 + r).

    r is the lag-1 correlation, taken as that of a first-order autoregression, with Kendall's
    correction of its bias in short series (Biometrika 41, 1954): E r = rho - (1 + 3 rho) / n.
    """
    deviations, num_samples = np.asarray(samples) - np.mean(samples), len(samples)
    power = float(deviations @ deviations)
    if power == 0:
        return num_samples
    correlation = float(deviations[1:] @ deviations[:-1]) / power
    correlation = (correlation + 1 / num_samples) / (1 - 3 / num_samples)
    correlation += CORRELATION_MARGIN / math.sqrt(num_samples)
    correlation = min(max(correlation, 0.0), MAX_LAG1_CORRELATION)
    return num_samples * (1 - correlation) / (1 + correlation)


def _mean_step(step_times_s: Sequence[float]) -> tuple[float, float]:
    """Mean step time and the half-width of its interval.

    The mean is that of all steps, not of the blocks, which may differ by a step in length.
    """
    _, half_s = _mean_and_half_width(_block_means(step_times_s))
    return float(np.mean(step_times_s)), max(half_s, _correlated_half_width(step_times_s))


def _correlated_half_width(step_times_s: Sequence[float]) -> float:
    """Half-width of a t interval over as many independent steps as these are worth."""
    num_steps, num_effective = len(step_times_s), _num_effective(step_times_s)
    if num_effective == num_steps:
        return 0.0  # no correlation: the blocks say it all
    standard_error = float(np.std(step_times_s, ddof=1)) / math.sqrt(num_effective)
    return t_quantile(max(1.0, num_effective - 1)) * standard_error


def _mean_and_half_width(samples: Sequence[float]) -> tuple[float, float]:
    standard_error = float(np.std(samples, ddof=1)) / math.sqrt(len(samples))
    return float(np.mean(samples)), t_quantile(len(samples) - 1) * standard_error


def t_quantile(degrees_of_freedom: float) -> float:
    """The two-sided quantile of Student's t; scipy.special loads faster than scipy.stats."""
    from scipy import special

    return float(special.stdtrit(degrees_of_freedom, (1 + LEVEL) / 2))
