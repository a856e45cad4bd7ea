"""Confidence intervals of throughput, drift of step times, and comparisons of sets of runs.

The run is the unit of replication: an interval from the steps of one run is labelled
within-run, one from several runs between-runs. A rate is images over time, never a mean of rates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence

import numpy as np

MAX_BLOCKS = 20
MIN_STEPS = 10
MIN_RUNS = 3
LEVEL = 0.95
# A window has settled if its trend changes the step time by at most 1 % from end to end and a jump
# by at most 2 %. More is a change only if its interval excludes 0. The level of the jump's interval
# allows for the search for the likeliest place.
MAX_TREND = 0.01
MAX_JUMP = 0.02
TREND_LEVEL = 0.90
JUMP_LEVEL = 0.997
# A drift of 3 % in 50 independent steps that vary by 3 % is found in about half of the windows with
# 50 blocks and in 38 % with 25. docs/statistics.md has the results for the constants of this file.
MAX_DRIFT_BLOCKS = 50
# Added to the correlation of n blocks before their drift is judged: 8 / n. In a few steps,
# correlation and drift look alike: without the margin, a third of the windows of 10 and 20 steps
# with a correlation of 0.8 are called drifting, with it 7 and 11 %.
DRIFT_CORRELATION_MARGIN = 8
# hyperfine's bound on the modified z-score, 0.6745 |x - median| / MAD > 10: a distance of more than
# 14.826 times the median absolute deviation.
OUTLIER_MADS = 14.826
# A window may look precise because of a lucky stretch, more so if steps are correlated, so it needs
# the information of 20 independent steps.
MIN_EFFECTIVE_STEPS = 20
# Rule of three: an event in a share p of the steps is missed by n of them with a probability of
# (1 - p)^n, which is 5 % at n = 3 / p. After 3 / target steps, doublings of a step that were not
# seen are too rare to move the mean by more than the target.
RULE_OF_THREE = 3
# Long enough for events that recur every few seconds: a cron job, a flush of the page cache, power
# capping.
MIN_PRECISE_S = 30.0
MAX_LAG1_CORRELATION = 0.95
# A few steps give a poor estimate of the correlation, and an estimate that is too low makes an
# interval too narrow. Half a standard error more, 1 / (2 sqrt(n)), raises the coverage of 10 and 20
# steps with a correlation of 0.5 from 89 and 92 % to 92 and 94 %, and with 0.8 from 87 and 91 % to
# 92 and 95 % (tools/simulate_steps.py).
CORRELATION_MARGIN = 0.5
# Sets of runs on one machine differ by about 1 to 2 % for other reasons (clock, neighbours, page
# placement), so a smaller difference is not called one.
NOISE_THRESHOLD = 0.02
FASTER = "faster"
SLOWER = "slower"
NO_DIFFERENCE = "no difference shown"
NOT_TESTED = "not tested"


@dataclasses.dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval of `kind` ``within-run`` or ``between-runs``.

    `high` is infinity if the data give no bound. `num_samples` is the number of blocks or runs.
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
        interval: Welch t interval of the ratio on logs; None with fewer than two runs on a side,
            like the three fields below.
        log_variance: Squared standard error of the logarithm of the ratio.
    """

    ratio: float
    interval: Interval | None
    verdict: str
    log_variance: float | None = None
    degrees_of_freedom: float | None = None
    p_value: float | None = None


@dataclasses.dataclass(frozen=True)
class Steadiness:
    """Result of `check_steady`: steady if neither trend nor jump is large and beyond noise.

    `trend` is the change of the fitted line over the window, as a fraction of the mean step time,
    `jump` the mean after the likeliest place of a jump over the mean before it, minus 1.
    """

    is_steady: bool
    trend: float
    jump: float


def within_run_interval(step_times_s: Sequence[float], *, images_per_step: int) -> Interval | None:
    """Compute the interval of images/s from the steps of one run in order, by block means.

    Consecutive steps are correlated, so an interval over single steps is too narrow. The means of
    at most 20 blocks of consecutive steps are less correlated: a t interval over them is converted
    to a rate. The means of short blocks are still correlated, so the interval by the lag-1
    correlation of the steps is used if it is wider. Slow outliers are kept, as events with a
    Poisson number: where one was seen, it could have been none or five. The interval cannot cover
    pauses that did not happen in these steps. With fewer than 10 steps it is None.
    """
    if len(step_times_s) < MIN_STEPS:
        return None
    _, low_s, high_s, num_blocks = _mean_step(step_times_s)
    high = images_per_step / low_s if low_s > 0 else math.inf
    return Interval(images_per_step / high_s, high, LEVEL, "within-run", num_blocks)


def level(
    step_times_s: Sequence[float], kinds: Sequence[Hashable], *, as_ratios: bool = False
) -> list[float]:
    """Return step times without the differences between kinds of steps; their mean stays the same.

    Which kinds a window has is known, and no chance: what is left is the scatter that an interval
    is about. The mean of its kind is taken from each time, and the mean of all is added; for
    outliers, times are divided by the mean of their kind instead (`as_ratios`). A kind with one
    step stays as it is: it would hide whatever happened in that step. The k means are those of the
    same n steps, so deviations grow by sqrt((n - 1) / (n - k)).
    """
    times_s = np.asarray(step_times_s, dtype=float)
    _, labels, counts = np.unique(
        np.array([str(kind) for kind in kinds]), return_inverse=True, return_counts=True
    )
    if len(counts) < 2:
        return list(step_times_s)
    means_s = (np.bincount(labels, times_s) / counts)[labels]
    # Of the kinds with several steps; the others keep their distance from it.
    is_known = counts[labels] > 1
    if not is_known.any():
        return list(step_times_s)
    mean_s = times_s[is_known].mean()
    deviations_s = times_s / means_s * mean_s - mean_s if as_ratios else times_s - means_s
    num_known, num_means = is_known.sum(), (counts > 1).sum()
    growth = math.sqrt((num_known - 1) / (num_known - num_means))
    return np.where(is_known, mean_s + growth * deviations_s, times_s).tolist()


def num_precise_steps(target: float) -> int:
    """Steps that a window needs for the target of `is_precise`."""
    return math.ceil(RULE_OF_THREE / target)


def is_precise(step_times_s: Sequence[float], *, target: float) -> bool:
    """Return True if the mean step time is known precisely enough to end the window.

    `target` is the half-width of the within-run interval as a fraction of the mean, e.g. 0.01. The
    window needs `num_precise_steps` and `MIN_PRECISE_S`, since a few steps look precise if they
    missed the pauses. Ask at steps that were fixed beforehand, not after every step.
    """
    if len(step_times_s) < max(MIN_STEPS, num_precise_steps(target)):
        return False
    if sum(step_times_s) < MIN_PRECISE_S or _num_effective(step_times_s) < MIN_EFFECTIVE_STEPS:
        return False
    mean_s, low_s, high_s, _ = _mean_step(step_times_s)
    return (high_s - low_s) / 2 <= target * mean_s


def check_steady(step_times_s: Sequence[float]) -> Steadiness | None:
    """Check whether a window of steps has settled, by its slope and by a jump.

    Both are fitted to block means by least squares and count only if they exceed the noise of the
    residuals, a first-order autoregression. A single slow step is a pause, not drift, and counts as
    the median. Step times are in seconds, in order; with fewer than 10 the result is None.
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
    """Count the steps far from the median. They are not removed from any figure."""
    times_s = np.asarray(step_times_s)
    distances = np.abs(times_s - np.median(times_s))
    return int((distances > _outlier_distance(times_s)).sum())


def between_runs_interval(rates: Sequence[float]) -> Interval | None:
    """Compute the t interval of the geometric-mean images/s of runs, on the logs of their rates.

    With fewer than three runs it is None.
    """
    if len(rates) < MIN_RUNS:
        return None
    mean, half = _mean_and_half_width([math.log(rate) for rate in rates])
    return _between_runs(mean, half, num_samples=len(rates))


def compare(rates: Sequence[float], baseline_rates: Sequence[float]) -> Comparison:
    """Compare two sets of runs, the candidate's and the baseline's, by their geometric-mean rates.

    The verdict is faster or slower only if the 95 % Welch interval excludes 1 and the change is
    more than 2 %. In simulations of runs that differ by 1 % (tests/test_statistics_simulated.py),
    the interval of three runs on each side covers the truth in 96 to 97 %. A pooled variance would
    cover it in 95 %, but only if both sides have the same variance.
    """
    logs, baseline_logs = np.log(rates), np.log(baseline_rates)
    difference = float(logs.mean() - baseline_logs.mean())
    num_samples = min(len(logs), len(baseline_logs))
    if num_samples < 2:
        return Comparison(math.exp(difference), None, NOT_TESTED)
    parts = [(float(side.var(ddof=1)) / len(side), len(side) - 1) for side in (logs, baseline_logs)]
    return _judge(difference, parts, num_samples=num_samples)


def mean_rate(rates: Sequence[float]) -> float:
    """The geometric mean of the rates of runs; for a single run, exactly its rate."""
    if len(rates) == 1:
        return rates[0]
    return math.exp(math.fsum(map(math.log, rates)) / len(rates))


def geometric_mean(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the geometric mean of the ratios of several configurations to their baselines.

    Its interval covers the variation between runs, not that between configurations: it is valid
    only for these configurations. No run may be in two of the comparisons. If one of them is not
    tested, neither is the mean.
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
    does not pass (Scandinavian Journal of Statistics 6, 1979). That verdict and those after it
    become `NO_DIFFERENCE`; intervals do not change.
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
    """Judge a difference of logs from variance and degrees of freedom of its independent parts."""
    from scipy import special

    variance = sum(part for part, _ in parts)
    if variance > 0:  # Welch and Satterthwaite
        degrees = variance**2 / sum(part**2 / df for part, df in parts)
        distance = abs(difference) / math.sqrt(variance)
    else:  # every run gave the same: the interval is a point
        degrees = sum(df for _, df in parts)
        distance = math.inf if difference else 0.0
    half = t_quantile(degrees) * math.sqrt(variance)
    interval = _between_runs(difference, half, num_samples=num_samples)
    ratio = math.exp(difference)
    verdict = FASTER if ratio > 1 else SLOWER
    if interval.low <= 1 <= interval.high or abs(ratio - 1) <= NOISE_THRESHOLD:
        verdict = NO_DIFFERENCE
    return Comparison(
        ratio,
        interval,
        verdict,
        log_variance=variance,
        degrees_of_freedom=degrees,
        p_value=2 * float(special.stdtr(degrees, -distance)),
    )


def _between_runs(log: float, half: float, *, num_samples: int) -> Interval:
    low, high = math.exp(log - half), math.exp(log + half)
    return Interval(low, high, LEVEL, "between-runs", num_samples)


def _outlier_distance(times_s: np.ndarray) -> float:
    return OUTLIER_MADS * float(np.median(np.abs(times_s - np.median(times_s))))


def _pauses(step_times_s: Sequence[float]) -> list[np.ndarray]:
    """Return the indices of each series of consecutive slow outliers."""
    times_s = np.asarray(step_times_s)
    slow = np.flatnonzero(times_s > np.median(times_s) + _outlier_distance(times_s))
    if not len(slow):
        return []
    return np.split(slow, np.flatnonzero(np.diff(slow) > 1) + 1)


def _likeliest_jump(blocks: np.ndarray) -> int:
    """Return the index of the first block after the jump with the least squared residuals.

    At least two blocks or a tenth of all lie on either side.
    """
    num_blocks = len(blocks)
    margin = max(2, num_blocks // 10)
    places = np.arange(margin, num_blocks - margin + 1)
    before = np.cumsum(blocks - blocks.mean())[places - 1]
    # The jump explains the sum of squares between the two parts.
    return int(places[np.argmax(before**2 / (places * (num_blocks - places)))])


def _fit_change(blocks: np.ndarray, shape: str | int, *, level: float) -> tuple[float, bool]:
    """Return the change of the blocks by a shape of `_shape_fit`, and True if it exceeds noise."""
    from scipy import special

    weights, residual_maker, noises = _shape_fit(len(blocks), shape)
    correlations, expected_lag1, variance_by_power, degrees_of_freedom = noises
    change = float(weights @ blocks)
    residuals = residual_maker @ blocks
    power = float(residuals @ residuals)
    lag1 = float(residuals[1:] @ residuals[:-1]) / power if power else 0.0
    correlation = float(np.interp(lag1, expected_lag1, correlations))
    correlation = max(0.0, correlation + DRIFT_CORRELATION_MARGIN / len(blocks))
    variance = power * float(np.interp(correlation, correlations, variance_by_power))
    degrees = float(np.interp(correlation, correlations, degrees_of_freedom))
    quantile = float(special.stdtrit(degrees, (1 + level) / 2))
    return change, abs(change) > quantile * math.sqrt(variance)


@functools.cache
def _shape_fit(num_blocks: int, shape: str | int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit a level and ``slope``, from 0 to 1 between the ends, or a jump by 1 at this index.

    The first two results times the blocks are the change by the shape and the residuals. The third
    is what correlated noise does, (4, cases): its lag-1 correlation, ascending; that of the
    residuals, which is lower; the variance of the change over the sum of squared residuals; and
    Satterthwaite's degrees of freedom of that sum.
    """
    index = np.arange(num_blocks)
    design = np.ones((num_blocks, 2))
    design[:, 1] = index / (num_blocks - 1) if shape == "slope" else index >= shape
    fit = np.linalg.pinv(design)
    residual_maker = np.eye(num_blocks) - design @ fit
    neighbours = (np.eye(num_blocks, k=1) + np.eye(num_blocks, k=-1)) / 2
    cases = []
    for correlation in np.linspace(-0.5, MAX_LAG1_CORRELATION, 30):
        noise = correlation ** np.abs(index[:, None] - index)  # autoregression of unit variance
        residual_noise = residual_maker @ noise
        power = np.trace(residual_noise)  # expected sum of squares
        cases.append(
            (
                correlation,
                np.trace(residual_maker @ neighbours @ residual_noise) / power,
                fit[1] @ noise @ fit[1] / power,
                power**2 / np.trace(residual_noise @ residual_noise),
            )
        )
    return fit[1], residual_maker, np.array(cases).T


def _block_means(step_times_s: Sequence[float], *, max_blocks: int = MAX_BLOCKS) -> list[float]:
    num_blocks = min(max_blocks, len(step_times_s))
    blocks = np.array_split(np.asarray(step_times_s, dtype=float), num_blocks)
    return [float(block.mean()) for block in blocks]


def _num_effective(samples: Sequence[float]) -> float:
    """Return the number of independent samples with the same error: n (1 - r) / (1 + r).

    r is the lag-1 correlation of a first-order autoregression, with Kendall's correction of its
    bias in short series (Biometrika 41, 1954): E r = rho - (1 + 3 rho) / n.
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


def _mean_step(step_times_s: Sequence[float]) -> tuple[float, float, float, int]:
    """Compute the mean step time, the ends of its interval, and their number of blocks.

    The mean is over all steps, not over the blocks, which may differ by a step in length. It is the
    mean of the steps without pauses plus the time of the pauses; the interval of this sum combines
    the distances of both intervals from their values as squares (MOVER, Zou and Donner, Statistics
    in Medicine 27, 2008).
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
    return mean_s, mean_s - below_s, mean_s + above_s, len(blocks)


def _poisson_bounds(sizes: np.ndarray) -> tuple[float, float]:
    """Return bounds of the expected sum of a Poisson number of events from their positive sizes.

    They are the exact bounds of a Poisson count, for the count and size of equal events with the
    same sum and the same sum of squares (Fay and Feuer, Statistics in Medicine 16, 1997).
    """
    from scipy import special

    size = float(sizes @ sizes / sizes.sum())
    count = float(sizes.sum()) / size
    tail = (1 - LEVEL) / 2
    low = special.gammaincinv(count, tail)
    high = special.gammaincinv(count + 1, 1 - tail)
    return float(low) * size, float(high) * size


def _correlated_half_width(step_times_s: Sequence[float]) -> float:
    """The half-width of a t interval over the effective number of independent steps."""
    num_steps, num_effective = len(step_times_s), _num_effective(step_times_s)
    if num_effective == num_steps:
        return 0.0  # without correlation the interval of the blocks is right
    standard_error = float(np.std(step_times_s, ddof=1)) / math.sqrt(num_effective)
    return t_quantile(max(1.0, num_effective - 1)) * standard_error


def _mean_and_half_width(samples: Sequence[float]) -> tuple[float, float]:
    standard_error = float(np.std(samples, ddof=1)) / math.sqrt(len(samples))
    return float(np.mean(samples)), t_quantile(len(samples) - 1) * standard_error


def t_quantile(degrees_of_freedom: float, *, level: float = LEVEL) -> float:
    """Return the two-sided quantile of Student's t."""
    # scipy.special loads faster than scipy.stats.
    from scipy import special

    return float(special.stdtrit(degrees_of_freedom, (1 + level) / 2))
