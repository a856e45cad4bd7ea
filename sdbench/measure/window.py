"""`WindowPolicy` decides whether a full window closes, becomes warm-up or is extended.

It decides only when the window is full, at points that are fixed before the run. A window whose
step times drift becomes warm-up, and one that is not precise enough is doubled, each up to a bound.
All ranks decide alike, since they gather the step times of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from sdbench.measure.timer import CLOSE, WARM_UP, slowest_steps
from sdbench.statistics import intervals


@dataclasses.dataclass(frozen=True)
class WindowPolicy:
    """Decides at the end of a window.

    Attributes:
        max_warmup_steps: Largest number of warm-up steps.
        max_measured_steps: Largest number of steps in the window.
        target_precision: Wanted half-width of the within-run interval as a fraction of the mean;
            None for a window of fixed length.
        gather: Returns the values of all ranks on every rank.
    """

    max_warmup_steps: int
    max_measured_steps: int
    target_precision: float | None
    gather: Callable[[Any], list[Any]]

    def __call__(self, step_times_s: Sequence[float], num_warmup_steps: int) -> str | int:
        """Decide on a full window, as the `policy` of a `StepTimer`."""
        slowest_s = slowest_steps(self.gather(list(step_times_s)))
        steadiness = intervals.check_steady(slowest_s)
        num_steps = len(slowest_s)
        has_drifted = steadiness is not None and not steadiness.is_steady
        if has_drifted and num_warmup_steps + num_steps <= self.max_warmup_steps:
            return WARM_UP
        if self.target_precision is None or num_steps >= self.max_measured_steps:
            return CLOSE
        if intervals.is_precise(slowest_s, target=self.target_precision):
            return CLOSE
        return min(2 * num_steps, self.max_measured_steps)
