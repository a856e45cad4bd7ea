"""Comparisons of runs from several occasions, and the change that a comparison can detect.

Runs that follow each other share the state of the machine: its clock, neighbours and memory. So the
runs of one occasion are one sample, and a difference between occasions is not one of settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sdbench.statistics.intervals import (
    LEVEL,
    MIN_RUNS,
    NOISE_THRESHOLD,
    Comparison,
    compare,
    mean_rate,
)

# After an hour a machine differs by 1 to 2 % more than between two consecutive runs.
PAUSE_S = 3600.0
# Share of comparisons that find the detectable change.
POWER = 0.8


class Time(NamedTuple):
    """Start of a run in seconds, on any clock or None if unknown, and its duration."""

    start_s: float | None
    duration_s: float = 0.0


def find_occasions(runs: Sequence[Time], others: Sequence[Time] = ()) -> list[list[int]]:
    """Group the runs of one side of a comparison into occasions, in order of time.

    An occasion is a series of runs without a run of the other side or a pause of more than an hour
    between them. If the sides take turns, each run is an occasion, because slow changes of the
    machine affect both sides. Rounds of one run each in either order (A B, B A) count as turns if
    the two runs are not separated by such a pause. If a run has no start time, all runs are one
    occasion. `others` are the runs of the other side if both were measured on one machine. Returns
    the indices of the runs of each occasion.
    """
    if any(run.start_s is None for run in runs):
        return [list(range(len(runs)))]
    # If two runs began in the same second, the one of this side counts as earlier.
    events = sorted(
        (run.start_s, is_other, index, run.start_s + run.duration_s)
        for is_other, side in enumerate((runs, others))
        for index, run in enumerate(side)
        if run.start_s is not None
    )
    rounds = [events[at : at + 2] for at in range(0, len(events), 2)]
    if all(map(_is_round, rounds)):
        return [[index] for _, is_other, index, _ in events if not is_other]
    occasions: list[list[int]] = []
    last_end_s = -math.inf
    for start_s, is_other, index, end_s in events:
        if is_other:
            last_end_s = -math.inf
            continue
        if start_s - last_end_s > PAUSE_S:
            occasions.append([])
        occasions[-1].append(index)
        last_end_s = max(last_end_s, end_s)
    return occasions


def _is_round(events: Sequence[tuple[float, int, int, float]]) -> bool:
    """Return True for one run of each side without a pause of more than an hour between them."""
    sides = {is_other for _, is_other, *_ in events}
    return len(sides) == 2 and events[1][0] - events[0][3] <= PAUSE_S


def compare_occasions(
    figures: Sequence[float],
    baseline_figures: Sequence[float],
    *,
    occasions: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
) -> Comparison:
    """Compare figures of two sets of runs like `compare`, with the occasion as the unit.

    `occasions` are the run indices of each occasion, of the candidate and of the baseline.
    """
    means = (
        [mean_rate([of_side[index] for index in occasion]) for occasion in of_occasions]
        for of_side, of_occasions in zip((figures, baseline_figures), occasions, strict=True)
    )
    return compare(*means)


def detectable_change(comparison: Comparison, *, num_tests: int = 1) -> float | None:
    """Return the smallest change that 80 % of comparisons would find if runs vary like these.

    A change is found if its t exceeds the quantile of the test and it exceeds 2 %. The test has a
    power of 80 % at the non-centrality of t at which 20 % of its distribution lie below the
    quantile (Cohen, Statistical Power Analysis, 1988, chapter 2). A few runs give poor estimates of
    the degrees of freedom: reduced by the share of half a run, they give a power of 81, 74, 79 and
    79 % in simulations of 3, 4, 5 and 10 runs on each side, instead of 71 % with 3
    (tests/test_statistics_occasions.py).

    With `num_tests` comparisons made together, a single change has to pass 5 % / `num_tests`, by
    Holm's method. With fewer than three samples on a side the change is None.
    """
    from scipy import special

    if comparison.interval is None or comparison.interval.num_samples < MIN_RUNS:
        return None
    degrees = comparison.degrees_of_freedom * (1 - 0.5 / comparison.interval.num_samples)
    error = math.sqrt(comparison.log_variance)
    quantile = special.stdtrit(degrees, 1 - (1 - LEVEL) / num_tests / 2)
    shift = special.nctdtrinc(degrees, 1 - POWER, quantile)
    beyond_noise = math.log1p(NOISE_THRESHOLD) + special.stdtrit(degrees, POWER) * error
    return math.expm1(max(float(shift) * error, float(beyond_noise)))
