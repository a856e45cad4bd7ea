"""Confidence intervals of throughput, and comparisons of sets of runs.

The run is the unit of replication: an interval from the steps of one run is labelled
within-run, one from several runs between-runs. A rate is images over time, never a mean of rates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

MAX_BLOCKS = 20
MIN_STEPS = 10
MIN_RUNS = 3
LEVEL = 0.95
# A window has settled when its trend changes the step time by no more than 1 % from end to end and
# no jump by more than 2 %. More is called a change where its interval excludes 0, that of the jump
# at a level which allows for having looked for the likeliest place.
MAX_TREND = 0.01
MAX_JUMP = 0.02
TREND_LEVEL = 0.90
JUMP_LEVEL = 0.997
# A drift of 3 % in 50 independent steps that vary by 3 % is found in about half of the windows by
# 50 blocks and in 38 % by 25. docs/statistics.md has what is found with the constants of this file.
MAX_DRIFT_BLOCKS = 50
# Added to the correlation of n blocks before their drift is judged: 8 / n. Correlation and drift of
# a few steps look alike: without it a third of the windows of 10 and 20 steps with a correlation
# of 0.8 are called drifting, and with it 7 and 11 %.
DRIFT_CORRELATION_MARGIN = 8
# hyperfine's bound on the modified z-score, 0.6745 |x - median| / MAD > 10: a distance of more than
# 14.826 times the median absolute deviation.
OUTLIER_MADS = 14.826
# A window that looks precise may have stopped on a lucky stretch, all the more where steps are
# correlated, so it has to be worth 20 independent ones.
MIN_EFFECTIVE_STEPS = 20
# Rule of three: what happens in a share p of the steps is missed by n of them with a chance of
# (1 - p)^n, which is 5 % at n = 3 / p. After 3 / target steps, doublings of a step that were not
# seen are too rare to move the mean by more than the target.
RULE_OF_THREE = 3
# What a machine does every few seconds (a cron job, a flush of the page cache, a power cap) is to
# be in the window, however short the steps are.
MIN_PRECISE_S = 30.0
MAX_LAG1_CORRELATION = 0.95
# The correlation of a few steps is itself known badly, and taken too low it makes an interval too
# narrow. Half a standard error more, 1 / (2 sqrt(n)), brings the coverage of 10 and 20 steps with a
# correlation of 0.5 from 89 and 92 % to 92 and 94 %, and with 0.8 from 87 and 91 % to 92 and 95 %
# (tools/simulate_steps.py).
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
        is_steady: Whether neither trend nor jump is large and beyond noise.
        trend: Change of the fitted line over the window, as a fraction of the mean step time.
        jump: Mean behind the likeliest place of a jump over that before it, minus 1.
    """

    is_steady: bool
    trend: float
    jump: float


def within_run_interval(step_times_s: Sequence[float], *, images_per_step: int) -> Interval | None:
    """Interval of images/s from the steps of one run, by block means.

    Consecutive steps are correlated, so an interval over single steps is too narrow. The means of
    at most 20 blocks of consecutive steps are less correlated: a t interval over them is converted
    to a rate. Where the lag-1 correlation of the steps gives a wider interval, that one is taken,
    since the means of short blocks are still correlated. Slow outliers are kept, as events whose
    number is a Poisson variable: one that was seen may as well have been none or five. Of pauses
    that did not happen in these steps an interval knows nothing.

    Args:
        step_times_s: Times of the measured steps in order, in seconds.
        images_per_step: Images of one optimizer step over all ranks.

    Returns:
        The interval in images/s, or None with fewer than 10 steps.
    """
    if len(step_times_s) < MIN_STEPS:
        return None
    mean = _mean_step(step_times_s)
    return Interval(
        low=images_per_step / mean.high_s,
        high=images_per_step / mean.low_s if mean.low_s > 0 else math.inf,
        level=LEVEL,
        kind="within-run",
        num_samples=mean.num_blocks,
    )


def num_precise_steps(target: float) -> int:
    """Number of steps below which no window is called precise, whatever its interval.

    Args:
        target: As in `is_precise`.
    """
    return math.ceil(RULE_OF_THREE / target)


def is_precise(step_times_s: Sequence[float], *, target: float) -> bool:
    """Whether the mean step time is known precisely enough to end the window.

    It takes `num_precise_steps` and `MIN_PRECISE_S`, since a few steps look precise where they have
    missed the pauses. Ask at steps that were fixed beforehand, not after every step.

    Args:
        step_times_s: Times of the steps so far, in seconds.
        target: Half-width of the within-run interval as a fraction of the mean, e.g. 0.01.
    """
    if len(step_times_s) < max(MIN_STEPS, num_precise_steps(target)):
        return False
    if sum(step_times_s) < MIN_PRECISE_S or _num_effective(step_times_s) < MIN_EFFECTIVE_STEPS:
        return False
    mean = _mean_step(step_times_s)
    return (mean.high_s - mean.low_s) / 2 <= target * mean.mean_s


def check_steady(step_times_s: Sequence[float]) -> Steadiness | None:
    """Check whether a window of steps has settled, by its slope and by a jump.

    Both are fitted to block means by least squares, and count only where they exceed the noise that
    the fit leaves, taken as a first-order autoregression. A slow step between others that are not
    is a pause and no drift: it counts as the median.

    Args:
        step_times_s: Times of the steps in order, in seconds.

    Returns:
        The finding, or None with fewer than 10 steps.
    """
    if len(step_times_s) < MIN_STEPS:
        return None
    times_s = np.array(step_times_s, dtype=float)
    for pause in _pauses(times_s):
        if len(pause) == 1:
            times_s[pause] = np.median(step_times_s)
    blocks = np.asarray(_block_means(times_s, max_blocks=MAX_DRIFT_BLOCKS))
    change_s, is_trend = _fit_change(blocks, "slope", level=TREND_LEVEL)
    trend = change_s / float(blocks.mean())
    place = _likeliest_jump(blocks)
    jump_s, is_jump = _fit_change(blocks, place, level=JUMP_LEVEL)
    jump = jump_s / float(blocks[:place].mean())
    has_changed = (abs(trend) > MAX_TREND and is_trend) or (abs(jump) > MAX_JUMP and is_jump)
    return Steadiness(not has_changed, trend, jump)


def count_outliers(step_times_s: Sequence[float]) -> int:
    """Number of steps far from the median. No step is left out for it."""
    times_s = np.asarray(step_times_s)
    distances = np.abs(times_s - np.median(times_s))
    return int((distances > _outlier_distance(times_s)).sum())


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


def _outlier_distance(times_s: np.ndarray) -> float:
    return OUTLIER_MADS * float(np.median(np.abs(times_s - np.median(times_s))))


def _pauses(step_times_s: Sequence[float]) -> list[np.ndarray]:
    """The indices of each stretch of consecutive steps that are slow outliers."""
    times_s = np.asarray(step_times_s)
    slow = np.flatnonzero(times_s > np.median(times_s) + _outlier_distance(times_s))
    if not len(slow):
        return []
    return np.split(slow, np.flatnonzero(np.diff(slow) > 1) + 1)


def _likeliest_jump(blocks: np.ndarray) -> int:
    """The index of the first block behind the jump that leaves the smallest squared residuals.

    Two blocks or a tenth of all are left at either end.
    """
    num_blocks = len(blocks)
    margin = max(2, num_blocks // 10)
    places = np.arange(margin, num_blocks - margin + 1)
    before = np.cumsum(blocks - blocks.mean())[places - 1]
    # The jump takes away the sum of squares between the two stretches.
    return int(places[np.argmax(before**2 / (places * (num_blocks - places)))])


def _fit_change(blocks: np.ndarray, shape: str | int, *, level: float) -> tuple[float, bool]:
    """The change of the blocks by a shape of `_ShapeFit`, and whether it is beyond their noise."""
    from scipy import special

    fit = _shape_fit(len(blocks), shape)
    change = float(fit.weights @ blocks)
    residuals = fit.residual_maker @ blocks
    power = float(residuals @ residuals)
    lag1 = float(residuals[1:] @ residuals[:-1]) / power if power else 0.0
    correlation = float(np.interp(lag1, fit.expected_lag1, fit.correlations))
    correlation = max(0.0, correlation + DRIFT_CORRELATION_MARGIN / len(blocks))
    variance = power * float(np.interp(correlation, fit.correlations, fit.variance_by_power))
    degrees = float(np.interp(correlation, fit.correlations, fit.degrees_of_freedom))
    quantile = float(special.stdtrit(degrees, (1 + level) / 2))
    return change, abs(change) > quantile * math.sqrt(variance)


@dataclasses.dataclass(frozen=True)
class _ShapeFit:
    """The least-squares fit of a level and a shape to blocks, and what correlated noise does to it.

    Attributes:
        weights: The change by the shape is their product with the blocks, (blocks,).
        residual_maker: The residuals are its product with the blocks, (blocks, blocks).
        correlations: Lag-1 correlations of the noise, ascending, for each of which there is:
        expected_lag1: Lag-1 correlation of the residuals, which is lower.
        variance_by_power: Variance of the change over the sum of squared residuals.
        degrees_of_freedom: Of the latter, by Satterthwaite.
    """

    weights: np.ndarray
    residual_maker: np.ndarray
    correlations: np.ndarray
    expected_lag1: np.ndarray
    variance_by_power: np.ndarray
    degrees_of_freedom: np.ndarray


@functools.cache
def _shape_fit(num_blocks: int, shape: str | int) -> _ShapeFit:
    """The fit of ``slope``, from 0 to 1 between the ends, or of a jump by 1 at this index."""
    index = np.arange(num_blocks)
    design = np.ones((num_blocks, 2))
    design[:, 1] = index / (num_blocks - 1) if shape == "slope" else index >= shape
    fit = np.linalg.pinv(design)
    residual_maker = np.eye(num_blocks) - design @ fit
    neighbours = (np.eye(num_blocks, k=1) + np.eye(num_blocks, k=-1)) / 2
    correlations = np.linspace(-0.5, MAX_LAG1_CORRELATION, 30)
    rows = []
    for correlation in correlations:
        noise = correlation ** np.abs(index[:, None] - index)  # autoregression of unit variance
        residual_noise = residual_maker @ noise
        power = np.trace(residual_noise)  # expected sum of squares
        rows.append(
            (
                np.trace(residual_maker @ neighbours @ residual_noise) / power,
                fit[1] @ noise @ fit[1] / power,
                power**2 / np.trace(residual_noise @ residual_noise),
            )
        )
    return _ShapeFit(fit[1], residual_maker, correlations, *np.array(rows).T)


def _block_means(step_times_s: Sequence[float], *, max_blocks: int = MAX_BLOCKS) -> list[float]:
    num_blocks = min(max_blocks, len(step_times_s))
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


@dataclasses.dataclass(frozen=True)
class _MeanStep:
    """Mean step time with its interval, and the number of blocks behind it."""

    mean_s: float
    low_s: float
    high_s: float
    num_blocks: int


def _mean_step(step_times_s: Sequence[float]) -> _MeanStep:
    """Mean step time and its interval.

    The mean is that of all steps, not of the blocks, which may differ by a step in length. It is
    the mean of the steps without pauses plus what the pauses add, and the interval of the sum has
    the distances of both intervals from their values, added as squares (MOVER, Zou and Donner,
    Statistics in Medicine 27, 2008).
    """
    times_s = np.asarray(step_times_s, dtype=float)
    pauses = _pauses(times_s)
    plain_s = np.delete(times_s, np.concatenate(pauses)) if pauses else times_s
    blocks = _block_means(plain_s)
    _, half_s = _mean_and_half_width(blocks)
    half_s = max(half_s, _correlated_half_width(plain_s))
    mean_s, below_s, above_s = float(times_s.mean()), half_s, half_s
    if pauses:
        added_s = np.array([(times_s[pause] - plain_s.mean()).sum() for pause in pauses])
        low_s, high_s = _poisson_bounds(added_s)
        below_s = math.hypot(half_s, (added_s.sum() - low_s) / len(times_s))
        above_s = math.hypot(half_s, (high_s - added_s.sum()) / len(times_s))
    return _MeanStep(mean_s, mean_s - below_s, mean_s + above_s, len(blocks))


def _poisson_bounds(sizes: np.ndarray) -> tuple[float, float]:
    """Bounds of the expected sum of events, whose number is a Poisson variable, from those seen.

    The exact bounds of a Poisson count, for the count and size of equal events that have the same
    sum and the same sum of squares (Fay and Feuer, Statistics in Medicine 16, 1997).

    Args:
        sizes: Of each event, positive.
    """
    from scipy import special

    size = float(sizes @ sizes / sizes.sum())
    count = float(sizes.sum()) / size
    tail = (1 - LEVEL) / 2
    low = special.gammaincinv(count, tail)
    high = special.gammaincinv(count + 1, 1 - tail)
    return float(low) * size, float(high) * size


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
