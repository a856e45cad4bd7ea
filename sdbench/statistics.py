"""How sure is a throughput figure, and is one faster than another?

Pure numbers. The run is the unit of replication: an interval from the steps of one run is labelled
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
# Two sets of runs on one machine differ by about 1 to 2 % for reasons nobody asked about (clock,
# neighbours, page placement), so a smaller difference is not called one.
NOISE_THRESHOLD = 0.02


@dataclasses.dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval.

    Attributes:
        low: Lower end.
        high: Upper end; infinity where the data allow no bound.
        level: Confidence level, 0.95.
        kind: ``within-run`` or ``between-runs``.
        num_samples: Blocks or runs that it rests on.
    """

    low: float
    high: float
    level: float
    kind: str
    num_samples: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How one set of runs compares with another.

    Attributes:
        ratio: Geometric-mean rate of the first over that of the second.
        interval: Welch t interval of the ratio on logs, None with fewer than two runs on a side.
        verdict: ``faster``, ``slower``, ``no difference shown`` or ``not tested``.
    """

    ratio: float
    interval: Interval | None
    verdict: str


def within_run_interval(step_times_s: Sequence[float], *, images_per_step: int) -> Interval | None:
    """Interval of images/s from the steps of one run, by block means.

    Consecutive steps are correlated, so an interval over single steps is too narrow; the means of
    at most 20 blocks of consecutive steps are nearly independent, and a t interval over them is
    turned into a rate.

    Args:
        step_times_s: Times of the measured steps in order, in seconds.
        images_per_step: Images of one optimizer step over all ranks.

    Returns:
        The interval in images/s, or None with fewer than 10 steps.
    """
    if len(step_times_s) < MIN_STEPS:
        return None
    num_blocks = min(MAX_BLOCKS, len(step_times_s))
    blocks = np.array_split(np.asarray(step_times_s, dtype=float), num_blocks)
    mean_s, half_s = _mean_and_half_width([float(block.mean()) for block in blocks])
    return Interval(
        low=images_per_step / (mean_s + half_s),
        high=images_per_step / (mean_s - half_s) if mean_s > half_s else math.inf,
        level=LEVEL,
        kind="within-run",
        num_samples=num_blocks,
    )


def between_runs_interval(rates: Sequence[float]) -> Interval | None:
    """Interval of the typical rate of a run: t on the logs of the runs' rates.

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

    Faster or slower is only said when the 95 % Welch interval excludes 1 and the change exceeds
    2 %.

    Args:
        rates: Images/s of each run of the candidate.
        baseline_rates: Images/s of each run of the baseline.

    Returns:
        Ratio, interval and verdict.
    """
    from scipy import stats

    logs, baseline_logs = np.log(rates), np.log(baseline_rates)
    difference = float(logs.mean() - baseline_logs.mean())
    ratio = math.exp(difference)
    if min(len(logs), len(baseline_logs)) < 2:
        return Comparison(ratio, None, "not tested")
    bounds = stats.ttest_ind(logs, baseline_logs, equal_var=False).confidence_interval(LEVEL)
    interval = Interval(
        low=math.exp(bounds.low),
        high=math.exp(bounds.high),
        level=LEVEL,
        kind="between-runs",
        num_samples=min(len(logs), len(baseline_logs)),
    )
    shown = not interval.low <= 1 <= interval.high and abs(ratio - 1) > NOISE_THRESHOLD
    verdict = ("faster" if ratio > 1 else "slower") if shown else "no difference shown"
    return Comparison(ratio, interval, verdict)


def _mean_and_half_width(samples: Sequence[float]) -> tuple[float, float]:
    from scipy import stats

    standard_error = float(np.std(samples, ddof=1)) / math.sqrt(len(samples))
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, df=len(samples) - 1))
    return float(np.mean(samples)), quantile * standard_error
