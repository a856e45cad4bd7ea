"""`make_page`: docs/statistics.md, what intervals, precision targets and drift alarms are worth.

    .venv/bin/python -m tools.simulate_steps > docs/statistics.md

Windows of simulated steps of about 1 s go through the code that judges measured steps. Each cell of
a table has its own seed, so a test can repeat a single cell.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping

import numpy as np

from sdbench.measure.timer import CLOSE, WindowPolicy
from sdbench.statistics import intervals

VARIATION = 0.03  # standard deviation of a step over its mean
OUTLIER_SHARE, OUTLIER_S = 0.02, 2.0
PAUSE_PERIOD_STEPS, PAUSE_S = 25, 1.0
SLOW_STATE_S, MEAN_STAY_STEPS = 0.10, 20
NUM_WINDOWS = 1000
TARGET = 0.01
NUM_TARGET_WINDOWS = 400
FIRST_LOOK, LAST_LOOK = 20, 320  # the default window of a GPU, doubled four times

Generator = np.random.Generator
Simulator = Callable[[Generator, int, int], np.ndarray]


def simulate_plain(generator: Generator, num_windows: int, num_steps: int) -> np.ndarray:
    """Independent normal steps of 1 s, (windows, steps)."""
    return 1 + VARIATION * generator.normal(size=(num_windows, num_steps))


def simulate_correlated(correlation: float) -> Simulator:
    """Steps whose deviations are a first-order autoregression."""

    def simulate(generator: Generator, num_windows: int, num_steps: int) -> np.ndarray:
        deviations = generator.normal(size=(num_windows, num_steps))
        for index in range(1, num_steps):
            deviations[:, index] *= math.sqrt(1 - correlation**2)
            deviations[:, index] += correlation * deviations[:, index - 1]
        return 1 + VARIATION * deviations

    return simulate


def simulate_heavy_tailed(generator: Generator, num_windows: int, num_steps: int) -> np.ndarray:
    """Student's t with 3 degrees of freedom, whose variance is 3."""
    return 1 + VARIATION / math.sqrt(3) * generator.standard_t(3, size=(num_windows, num_steps))


def simulate_outliers(generator: Generator, num_windows: int, num_steps: int) -> np.ndarray:
    """Some steps, independently of each other, take much longer."""
    is_outlier = generator.random((num_windows, num_steps)) < OUTLIER_SHARE
    return simulate_plain(generator, num_windows, num_steps) + OUTLIER_S * is_outlier


def simulate_pauses(generator: Generator, num_windows: int, num_steps: int) -> np.ndarray:
    """A pause at regular distances; a window begins anywhere between two."""
    phases = generator.integers(PAUSE_PERIOD_STEPS, size=(num_windows, 1))
    is_pause = (np.arange(num_steps) + phases) % PAUSE_PERIOD_STEPS == 0
    return simulate_plain(generator, num_windows, num_steps) + PAUSE_S * is_pause


def simulate_two_states(generator: Generator, num_windows: int, num_steps: int) -> np.ndarray:
    """The machine changes between a fast and a slow state, and stays for many steps."""
    begins_slow = generator.random((num_windows, 1)) < 0.5
    changes = generator.random((num_windows, num_steps)) < 1 / MEAN_STAY_STEPS
    is_slow = (np.cumsum(changes, axis=1) + begins_slow) % 2
    return simulate_plain(generator, num_windows, num_steps) + SLOW_STATE_S * is_slow


# Each with the mean time of a step in seconds.
CASES: Mapping[str, tuple[Simulator, float]] = {
    "plain": (simulate_plain, 1.0),
    "correlated, 0.5": (simulate_correlated(0.5), 1.0),
    "correlated, 0.8": (simulate_correlated(0.8), 1.0),
    "heavy-tailed": (simulate_heavy_tailed, 1.0),
    "outliers": (simulate_outliers, 1 + OUTLIER_SHARE * OUTLIER_S),
    "pauses": (simulate_pauses, 1 + PAUSE_S / PAUSE_PERIOD_STEPS),
    "two states": (simulate_two_states, 1 + SLOW_STATE_S / 2),
}


def _drift_by(change: float) -> Callable[[int], np.ndarray]:
    return lambda num_steps: np.linspace(1 + change, 1, num_steps)


def _jump_by(change: float, *, after: float) -> Callable[[int], np.ndarray]:
    return lambda num_steps: np.where(np.arange(num_steps) < after * num_steps, 1, 1 + change)


def _settle_by(change: float) -> Callable[[int], np.ndarray]:
    return lambda num_steps: 1 + change * np.exp(-np.arange(num_steps) / (0.3 * num_steps))


CHANGES: Mapping[str, tuple[str, Callable[[int], np.ndarray]]] = {
    "plain, 3 % faster from end to end": ("plain", _drift_by(0.03)),
    "plain, 5 % faster from end to end": ("plain", _drift_by(0.05)),
    "plain, 10 % faster from end to end": ("plain", _drift_by(0.10)),
    "correlated, 0.8, 10 % faster from end to end": ("correlated, 0.8", _drift_by(0.10)),
    "outliers, 10 % faster from end to end": ("outliers", _drift_by(0.10)),
    "plain, settling by 10 % within the first third": ("plain", _settle_by(0.10)),
    "plain, 6 % slower from the middle on": ("plain", _jump_by(0.06, after=0.5)),
    "plain, 6 % slower in the last third": ("plain", _jump_by(0.06, after=0.67)),
    "plain, 6 % slower in the last tenth": ("plain", _jump_by(0.06, after=0.9)),
    "plain, 30 % slower in the last third": ("plain", _jump_by(0.30, after=0.67)),
}


def simulate(case: str, *, num_windows: int, num_steps: int) -> np.ndarray:
    """Return step times of windows in seconds, (windows, steps), always the same."""
    generator = np.random.default_rng([zlib.crc32(case.encode()), num_steps])
    return CASES[case][0](generator, num_windows, num_steps)


def find_coverage(case: str, num_steps: int) -> tuple[float, float, float, float]:
    """Find the share of windows whose interval contains the true rate.

    Of all windows, of those without outliers and of those with one (nan: no such window); then the
    median distance between the ends over twice the lower end.
    """
    windows = simulate(case, num_windows=NUM_WINDOWS, num_steps=num_steps)
    found = [intervals.within_run_interval(list(window), images_per_step=1) for window in windows]
    rate = 1 / CASES[case][1]
    covered = np.array([interval.low <= rate <= interval.high for interval in found])
    seen = np.array([intervals.count_outliers(window) > 0 for window in windows])
    width = float(np.median([interval.high / interval.low - 1 for interval in found])) / 2
    parts = [
        float(part.mean()) if len(part) else math.nan for part in (covered[~seen], covered[seen])
    ]
    return float(covered.mean()), *parts, width


def find_precision(case: str) -> tuple[float, float, float]:
    """Simulate runs with --target_precision 1%.

    Returns the share of runs that reach it, the median number of steps, and the share of all runs
    whose interval contains the true rate.
    """
    policy = WindowPolicy(
        max_warmup_steps=0,
        max_measured_steps=LAST_LOOK,
        target_precision=TARGET,
        gather=lambda value: [value],
    )
    rate = 1 / CASES[case][1]
    reached, covered, lengths = [], [], []
    for window in simulate(case, num_windows=NUM_TARGET_WINDOWS, num_steps=LAST_LOOK):
        length = FIRST_LOOK
        while (decision := policy(list(window[:length]), 0)) != CLOSE:
            length = int(decision)
        steps = list(window[:length])
        interval = intervals.within_run_interval(steps, images_per_step=1)
        reached.append(intervals.is_precise(steps, target=TARGET))
        covered.append(interval.low <= rate <= interval.high)
        lengths.append(length)
    return float(np.mean(reached)), float(np.median(lengths)), float(np.mean(covered))


def find_alarms(case: str, num_steps: int) -> float:
    """Find the share of windows of a row of `CASES` or `CHANGES` that are called drifting."""
    case, change = CHANGES.get(case, (case, np.ones))
    windows = simulate(case, num_windows=NUM_WINDOWS, num_steps=num_steps) * change(num_steps)
    return float(
        np.mean([not intervals.check_steady(list(window)).is_steady for window in windows])
    )


def percent(share: float) -> str:
    """Return a share in whole percent, or - for nan."""
    return "-" if math.isnan(share) else f"{100 * share:.0f}"


HEAD = f"""\
# What the intervals and alarms are worth

A run gives a 95 % interval of its images/s, stops at a precision if it is asked to, and says
`drift` if its steps have not settled. How often that is right can only be tested if the true rate
is known, so {NUM_WINDOWS:,} windows of simulated steps of each kind go through the same code.
`.venv/bin/python -m tools.simulate_steps` makes this page with fixed seeds, and a test repeats some
cells of it. A share of 95 % has a standard error of 0.7 percentage points.

| case | a step takes 1 s and varies by 3 %, |
|---|---|
| plain | independently, with a normal distribution |
| correlated, 0.5 and 0.8 | like the step before it, with this lag-1 correlation |
| heavy-tailed | with Student's t distribution of 3 degrees of freedom |
| outliers | and 2 % of the steps take 2 s longer |
| pauses | and every 25th step takes 1 s longer |
| two states | and steps take 0.1 s longer in every other stretch of 20 steps on average |
"""

COVERAGE = """\
## Within-run intervals

Percent of the windows whose interval contains the true rate (nominal: 95), and in brackets half the
median width of the interval, in percent of the rate.
"""

SEEN = """\
An interval knows only what happened in its window. With 2 % of outliers, 82 % of the windows of 10
steps have none, and cannot show that there are any. If a window has outliers, its interval also
covers the uncertainty of their number: 1 may stand for 0.03 to 5.6, the exact bounds of a Poisson
variable. A result without outliers in n steps says which pauses it may have missed: one in n / 3
steps is missed by 5 % of the windows. The same holds for two states, since 10 or 20 steps often
see only one of them. Only other runs show what other windows give: `python -m sdbench repeat`.

Percent of the windows whose interval contains the true rate: windows without an outlier / windows
with one.
"""

PRECISION = f"""\
## --target_precision {TARGET:.0%}

The interval is checked after {FIRST_LOOK}, {2 * FIRST_LOOK}, ... {LAST_LOOK} steps. \
No window is called precise
before 3 / target steps ({intervals.num_precise_steps(TARGET)} for 1 %, \
{intervals.num_precise_steps(0.02)} for 2 %, {intervals.num_precise_steps(0.05)} for 5 %) and \
{intervals.MIN_PRECISE_S:.0f} s, whatever its interval: fewer
steps may have missed pauses that move the mean by more. If the longest window does not reach the
target, the run is flagged `precision_not_reached`, and its interval stands. {NUM_TARGET_WINDOWS} \
runs of each kind;
95 % has a standard error of 1.1 percentage points.

| case | reach it, % of the runs | median steps | interval has the true rate in it, % |
|---|---|---|---|
"""

ALARMS = """\
## Drift

Percent of the windows that are called drifting although only the case's own noise changes. In the
last row the steps do change, but not permanently.
"""

POWER = """\
Percent of the drifting windows that are called drifting. The fitted drift of 20 independent steps
itself varies by 2.2 %, and that of 10 by 3.0 %, so few of these windows can show 3 %.
"""


def make_page() -> str:
    """The text of docs/statistics.md."""
    lengths = (10, 20, 50, 100, 200)
    coverage = {(case, n): find_coverage(case, n) for case in CASES for n in lengths}
    parts = [HEAD, COVERAGE]
    parts.append(
        _table(
            CASES,
            lengths,
            lambda case, n: f"{percent(coverage[case, n][0])} ({100 * coverage[case, n][3]:.1f})",
        )
    )
    parts.append(SEEN)
    parts.append(
        _table(
            ("outliers", "pauses"),
            lengths,
            lambda case, n: " / ".join(percent(share) for share in coverage[case, n][1:3]),
        )
    )
    rows = [(case, *find_precision(case)) for case in CASES]
    parts.append(
        PRECISION
        + "".join(
            f"| {case} | {percent(reached)} | {length:.0f} | {percent(covered)} |\n"
            for case, reached, length, covered in rows
        )
    )
    for text, cases in ((ALARMS, CASES), (POWER, CHANGES)):
        parts.append(text)
        parts.append(_table(cases, lengths[:4], lambda case, n: percent(find_alarms(case, n))))
    return "\n".join(parts)


def _table(cases, lengths, cell: Callable[[str, int], str]) -> str:
    lines = [
        f"| case | {' | '.join(f'{length} steps' for length in lengths)} |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    lines += [
        f"| {case} | {' | '.join(cell(case, length) for length in lengths)} |" for case in cases
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(make_page(), end="")
