"""Judges whether the losses of two sets of runs differ by more than chance.

A curve is cut into windows of equally many steps, and the mean loss of each window is a sample of
its run. The spread of the baseline's runs says how much equal recipes differ (Student's t). If each
candidate has a baseline run with the same seeds, the spread of the pairs' differences is used too:
weights, data and noise of a pair are the same, so that much smaller changes are found. Four
questions share the chance of a false alarm: the final loss, the final loss of the run furthest out,
each window (Bonferroni), and whether the curves have the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sdbench.statistics.intervals import t_quantile

NUM_WINDOWS = 10
# The last fifth of the steps.
NUM_FINAL_WINDOWS = 2
MIN_STEPS = 2 * NUM_WINDOWS
# Runs of the baseline: fewer have no spread that says anything.
MIN_BAND_RUNS = 3
# The chance that runs of one recipe are said to differ, in all questions together.
FALSE_ALARMS = 0.01
NUM_QUESTIONS = 4
CORRELATION = "correlation of the curves"
# A correlation of 1 has no finite transform.
MAX_CORRELATION = 1 - 1e-12


class Check(NamedTuple):
    """One question: a value, and the band of values that chance explains.

    Differences are shares of the baseline's mean loss in these steps. `first` and `last` are the
    steps that the value is about, from 1.
    """

    what: str
    value: float
    low: float
    high: float
    first: int
    last: int

    @property
    def is_inside(self) -> bool:
        """Whether chance explains the value; a NaN is not explained."""
        return self.low <= self.value <= self.high


def judge_losses(
    baseline: np.ndarray,
    candidate: np.ndarray,
    *,
    partners: Sequence[int] | None = None,
    tolerance: float = 0.0,
) -> list[Check]:
    """Compare curves, given as arrays of runs by steps, by the four questions.

    Args:
        baseline: At least three runs, all losses finite.
        candidate: One run or more.
        partners: The row of the baseline with the seeds of each candidate; None: compare the means.
        tolerance: A difference up to this share of the loss is inside, whatever the spread.
    """
    num_steps = baseline.shape[1]
    parts = np.array_split(np.arange(num_steps), NUM_WINDOWS)
    ours, theirs = (
        np.stack([curves[:, part].mean(axis=1) for part in parts], axis=1)
        for curves in (baseline, candidate)
    )
    level = FALSE_ALARMS / NUM_QUESTIONS
    final_parts = parts[-NUM_FINAL_WINDOWS:]
    our_last, their_last = (
        runs[:, -NUM_FINAL_WINDOWS:].mean(axis=1, keepdims=True) for runs in (ours, theirs)
    )
    apart = np.abs(their_last - our_last.mean())
    furthest = their_last[[int(np.argmax(np.nan_to_num(apart, nan=math.inf)))]]
    questions = (
        ("final loss", our_last, their_last, partners, level, final_parts),
        (
            *("final loss of the run furthest out", our_last, furthest, None),
            *(level / len(theirs), final_parts),
        ),
        ("tenth that differs most", ours, theirs, partners, level / NUM_WINDOWS, parts),
    )
    checks = []
    for what, before, after, pairs, chance, windows in questions:
        values, halves = _difference(before, after, partners=pairs, level=chance)
        halves = np.maximum(halves, tolerance)
        worst = _furthest_out(values, halves)
        steps = np.concatenate(windows) if len(values) == 1 else windows[worst]
        value, half = float(values[worst]), float(halves[worst])
        checks.append(Check(what, value, -half, half, int(steps[0]) + 1, int(steps[-1]) + 1))
    lowest = _lowest_correlation(ours, level=level)
    centres = ours.mean(axis=0)
    is_tolerated = bool((np.abs(theirs.mean(axis=0) - centres) <= tolerance * centres).all())
    if lowest is not None and not is_tolerated:
        value = math.tanh(_correlate(ours.mean(axis=0), theirs.mean(axis=0)))
        checks.append(Check(CORRELATION, value, lowest, 1.0, 1, num_steps))
    return checks


def _difference(
    ours: np.ndarray, theirs: np.ndarray, *, partners: Sequence[int] | None, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """The relative difference in each column, and half the width of its band.

    The spread between seeds is the baseline's alone: that of a candidate with a run that has
    diverged would hide it.
    """
    reference = ours if partners is None else ours[list(partners)]
    difference = theirs.mean(axis=0) - reference.mean(axis=0)
    error = ours.std(axis=0, ddof=1) * math.sqrt(1 / len(reference) + 1 / len(theirs))
    half = t_quantile(len(ours) - 1, level=1 - level) * error
    if partners is not None:
        error = (theirs - reference).std(axis=0, ddof=1) / math.sqrt(len(theirs))
        half = np.minimum(half, t_quantile(len(theirs) - 1, level=1 - level) * error)
    centre = np.abs(ours.mean(axis=0))
    return difference / centre, half / centre


def _furthest_out(values: np.ndarray, halves: np.ndarray) -> int:
    """The first NaN if there is one, else the value furthest out of its band."""
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(values == 0, 0.0, np.abs(values) / halves)
    return int(np.argmax(np.nan_to_num(excess, nan=math.inf)))


def _correlate(curve: np.ndarray, other: np.ndarray) -> float:
    """Fisher's transform of the correlation of two curves; NaN if one of them is constant."""
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.corrcoef(curve, other)[0, 1]
    return math.atanh(float(np.clip(correlation, -MAX_CORRELATION, MAX_CORRELATION)))


def _lowest_correlation(runs: np.ndarray, *, level: float) -> float | None:
    """The correlation below which one more run of the same recipe would be with this chance.

    From each run with the mean of the others; None if a curve is constant, and has no shape.
    """
    total = runs.sum(axis=0)
    found = np.array([_correlate(run, (total - run) / (len(runs) - 1)) for run in runs])
    if not np.isfinite(found).all():
        return None
    width = found.std(ddof=1) * math.sqrt(1 + 1 / len(runs))
    return math.tanh(found.mean() - t_quantile(len(runs) - 1, level=1 - 2 * level) * width)
