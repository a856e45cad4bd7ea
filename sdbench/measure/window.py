"""Decides whether a full window closes, becomes warm-up or gets longer.

Asked each time that the window is full, at points that are fixed before the run: a window that has
not settled becomes warm-up, and one that is not yet precise enough is doubled, each up to a bound.
The decision rests on the step times of all ranks, so every rank comes to the same one.
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
        max_warmup_steps: Steps that may pass as warm-up.
        max_measured_steps: Steps that the window may hold.
        target_precision: Half-width of the within-run interval over the mean that is asked for, or
            None for a window of fixed length.
        gather: Brings the value of each rank to every rank.
    """

    max_warmup_steps: int
    max_measured_steps: int
    target_precision: float | None
    gather: Callable[[Any], list[Any]]

    def __call__(self, step_times_s: Sequence[float], num_warmup_steps: int) -> str | int:
        """Decide on a full window.

        Args:
            step_times_s: Times of its steps on this rank.
            num_warmup_steps: Steps before it.

        Returns:
            `CLOSE`, `WARM_UP`, or the length to go on to.
        """
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
