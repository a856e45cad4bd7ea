"""Comparisons of runs of several occasions, and the change that a comparison could have shown.

Runs that follow each other share what the machine is like then: its clock, neighbours and memory.
Runs of one occasion are therefore one sample, and two occasions are no two settings.
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

# A machine an hour later differs by 1 to 2 % more than two runs beside each other do.
PAUSE_S = 3600.0
# Share of comparisons in which a change of the size told is found.
POWER = 0.8


class Time(NamedTuple):
    """When a run was made.

    Attributes:
        start_s: When it began, on any clock in seconds; None if that is not told.
        duration_s: How long it took.
    """

    start_s: float | None
    duration_s: float = 0.0


def find_occasions(runs: Sequence[Time], others: Sequence[Time] = ()) -> list[list[int]]:
    """Divide the runs of one side of a comparison into its occasions.

    An occasion is a stretch of runs with no run of the other side between them and no pause of more
    than an hour. Where the sides take turns, each run is one: what changes slowly on the machine
    meets both sides. They do as well in rounds with one run of each, whichever is first (A B, B A),
    and no such pause between the two. Runs of which one does not tell its time are one occasion.

    Args:
        runs: Of this side, in any order.
        others: Of the other side, where both were measured on one machine.

    Returns:
        The indices of the runs of each occasion, in the order of time.
    """
    if any(run.start_s is None for run in runs):
        return [list(range(len(runs)))]
    # Of runs that began within the same second, that of this side is taken to be the earlier one.
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
    """Whether these are a run of each side without a pause of more than an hour between them."""
    sides = {is_other for _, is_other, *_ in events}
    return len(sides) == 2 and events[1][0] - events[0][3] <= PAUSE_S


def compare_occasions(
    figures: Sequence[float],
    baseline_figures: Sequence[float],
    *,
    occasions: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
) -> Comparison:
    """Compare a figure of two sets of runs as `compare` does, with the occasion as the sample.

    Args:
        figures: Of each run of the candidate, e.g. its images/s.
        baseline_figures: Of each run of the baseline.
        occasions: Those of the candidate and those of the baseline, each the indices of its runs.
    """
    means = (
        [mean_rate([of_side[index] for index in occasion]) for occasion in of_occasions]
        for of_side, of_occasions in zip((figures, baseline_figures), occasions, strict=True)
    )
    return compare(*means)


def detectable_change(comparison: Comparison, *, num_tests: int = 1) -> float | None:
    """The smallest change that 80 % of comparisons would find, if runs vary as these do.

    A change is found if its t exceeds the quantile of the test and it exceeds 2 %. The former has
    the power 80 % at the non-centrality of t at which 20 % of its distribution lie below the
    quantile (Cohen, Statistical Power Analysis, 1988, chapter 2). The degrees of freedom are
    themselves known badly from a few runs: lower by the share of half a run, they give 81, 74, 79
    and 79 % in simulations of 3, 4, 5 and 10 runs on each side, instead of 71 % with 3
    (tests/test_statistics_occasions.py).

    Args:
        comparison: A comparison of runs.
        num_tests: Comparisons made together; a single change among them has to pass 5 % over their
            number (Holm).

    Returns:
        The change of a rate, e.g. 0.03 for 3 %; None without three samples on each side, as two
        leave open what the variation is.
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
