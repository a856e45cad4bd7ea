"""`PeriodTimer` times a long training run by periods of steps, with one line of figures each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sdbench.measure.timer import Timer, Timings

if TYPE_CHECKING:
    from torch import Tensor

TRAINED = "trained"


@dataclasses.dataclass(frozen=True)
class Period:
    """Consecutive steps on one rank, and their losses.

    Their time is without validation and the like between steps; for a part of it the host has
    waited for the data loader.
    """

    num_steps: int
    time_s: float
    data_wait_s: float
    losses: tuple[float, ...]


class PeriodTimer(Timer):
    """Adds up the time of the steps, and reads the device only when a period ends.

    Replaces a `StepTimer`: a run of a million steps keeps no times of single steps.

    Attributes:
        train_s: Seconds of training in the periods that have ended.
    """

    num_steps_needed = 0

    def __init__(
        self,
        *,
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Time nothing yet; `synchronize` waits for the device."""
        super().__init__(clock)
        self.train_s = 0.0
        self._synchronize = synchronize
        self._since_s = 0.0
        self._time_s = 0.0
        self._num_reported = 0

    def start(self) -> None:
        """The loop is about to ask for its first batch, or goes on after `pause`."""
        self._since_s = self._clock()

    def step_ends(self, *, loss: Tensor) -> None:
        """The optimizer step is done (on a GPU: handed to the device)."""
        self.losses.add(loss)

    def pause(self) -> None:
        """Stop the clock until `start`."""
        self._synchronize()
        self._time_s += self._clock() - self._since_s
        self._since_s = self._clock()

    def end_period(self) -> Period:
        """The steps since the last period; waits for the device."""
        self.pause()
        losses = self.losses.read()[self._num_reported :]
        period = Period(len(losses), self._time_s, self._data_wait_s, tuple(losses))
        self._num_reported += len(losses)
        self.train_s += self._time_s
        self._time_s = self._data_wait_s = 0.0
        return period

    def phase_of(self, index: int) -> str:
        """The one phase of all steps."""
        return TRAINED

    def timings(self) -> Timings:
        """The whole run as one window, without single steps."""
        return Timings((), window_s=self.train_s)
