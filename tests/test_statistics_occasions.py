"""False verdicts and power where the machine differs from one occasion to the next, simulated.

The sides are the same. Runs of 5 minutes differ by 1 % among themselves, and occasions by 1 to 2 %.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sdbench.statistics.intervals import NO_DIFFERENCE, Comparison, compare
from sdbench.statistics.occasions import Time, compare_occasions, detectable_change, find_occasions
from tests.marks import quick_and_slow

SEED = 20261123
NUM_COMPARISONS = 2000
RUN_CV = 0.01
OCCASION_CVS = (0.01, 0.015, 0.02)
# As the help of `python -m sdbench compare` has them, by the variation between occasions.
STATED_WRONG_PERCENT = {
    "in turn": (0.15, 0.10, 0.15),
    "two occasions of each": (0.95, 1.25, 2.50),
    "five occasions of each": (0.60, 2.55, 4.35),
}
WRONG_ONE_AFTER_THE_OTHER = {0.01: 20, 0.015: 36, 0.02: 49}
RUN_S = 300.0
PAUSE_S = 5 * 3600.0

# The side of each run in order, occasion by occasion.
Schedule = Sequence[str]


def random_order(generator: np.random.Generator) -> Schedule:
    """Two to four occasions of three to six runs, each of a side chosen by chance."""
    return [
        "".join(generator.choice(["A", "B"], size=generator.integers(3, 7)))
        for _ in range(generator.integers(2, 5))
    ]


SCHEDULES: dict[str, Callable[[np.random.Generator], Schedule]] = {
    "in turn": lambda _: ["ABABABABAB"],
    "in rounds": lambda _: ["ABBAABBAAB"],
    "in turn, two occasions": lambda _: ["ABABAB", "ABABAB"],
    "two occasions of each": lambda _: ["AAA", "BBB", "AAA", "BBB"],
    "three occasions of each": lambda _: ["AAA", "BBB"] * 3,
    "five occasions of each": lambda _: ["AAA", "BBB"] * 5,
    "one after the other, on three days": lambda _: ["AAABBB"] * 3,
    "a few in turn, then one side": lambda _: ["ABAB", "BBBBB"],
    "at random": random_order,
}


@functools.cache
def simulate(schedule: str, occasion_cv: float) -> list[tuple[Comparison, Comparison]]:
    """Comparisons with the occasion as the sample, each with one that takes every run for one."""
    generator = np.random.default_rng(
        [SEED, list(SCHEDULES).index(schedule), int(1e4 * occasion_cv)]
    )
    found = []
    while len(found) < NUM_COMPARISONS:
        times: dict[str, list[Time]] = {"A": [], "B": []}
        rates: dict[str, list[float]] = {"A": [], "B": []}
        start_s = 0.0
        for occasion in SCHEDULES[schedule](generator):
            level = occasion_cv * generator.normal()
            for side in occasion:
                times[side].append(Time(start_s, RUN_S))
                rates[side].append(math.exp(level + RUN_CV * generator.normal()))
                start_s += RUN_S
            start_s += PAUSE_S
        if min(map(len, rates.values())) < 2:
            continue  # by chance nothing to compare
        occasions = find_occasions(times["A"], times["B"]), find_occasions(times["B"], times["A"])
        judged = compare_occasions(rates["A"], rates["B"], occasions=occasions)
        found.append((judged, compare(rates["A"], rates["B"])))
    return found


def share_wrong(comparisons: Sequence[Comparison]) -> float:
    return sum(one.verdict != NO_DIFFERENCE for one in comparisons) / len(comparisons)


@pytest.mark.parametrize(
    ("schedule", "occasion_cv"),
    quick_and_slow(
        # Those that the help of compare has, and the others where occasions differ most.
        [
            *itertools.product(STATED_WRONG_PERCENT, OCCASION_CVS),
            *((name, 0.02) for name in SCHEDULES if name not in STATED_WRONG_PERCENT),
        ],
        quick=[("in turn", 0.02), ("two occasions of each", 0.02), ("at random", 0.02)],
    ),
)
def test_a_verdict_is_seldom_false(schedule, occasion_cv):
    judged = [one for one, _ in simulate(schedule, occasion_cv) if one.interval is not None]
    wrong = share_wrong(judged)
    print(f"{schedule}, {occasion_cv:.1%}: {len(judged)} verdicts, {wrong:.2%} false")
    assert len(judged) >= (NUM_COMPARISONS / 2 if schedule == "at random" else NUM_COMPARISONS)
    assert wrong <= 0.07
    if schedule in STATED_WRONG_PERCENT:
        stated = STATED_WRONG_PERCENT[schedule][OCCASION_CVS.index(occasion_cv)]
        assert round(100 * wrong, 2) == stated


@pytest.mark.parametrize("occasion_cv", quick_and_slow(OCCASION_CVS, quick=[0.02]))
def test_one_after_the_other_has_no_verdict_and_would_have_false_ones(occasion_cv):
    SCHEDULES.setdefault("one after the other", lambda _: ["AAAAA", "BBBBB"])
    found = simulate("one after the other", occasion_cv)
    wrong = share_wrong([by_run for _, by_run in found])
    print(f"{occasion_cv:.1%}: {wrong:.1%} would be false")
    assert all(one.interval is None for one, _ in found)
    assert round(100 * wrong) == WRONG_ONE_AFTER_THE_OTHER[occasion_cv]


@pytest.mark.parametrize(("num_runs", "stated"), [(3, 81), (4, 74), (5, 79), (10, 79)])
def test_the_detectable_change_is_found_in_four_of_five(num_runs, stated):
    # What is told follows the variance found, and so varies: that of the middle comparison.
    generator = np.random.default_rng([SEED, num_runs])
    logs = RUN_CV * generator.normal(size=(NUM_COMPARISONS, 2, num_runs))
    rates = [(np.exp(ours), np.exp(theirs)) for ours, theirs in logs]
    changes = [detectable_change(compare(*sides)) for sides in rates]
    change = float(np.median(changes))
    found = [compare(ours * (1 + change), theirs) for ours, theirs in rates]
    share = sum(one.verdict == "faster" for one in found) / NUM_COMPARISONS
    low, high = (100 * np.quantile(changes, quantile) for quantile in (0.1, 0.9))
    print(f"{num_runs}: {change:.2%} ({low:.1f} to {high:.1f}) is found in {share:.1%}")
    assert round(100 * share) == stated
