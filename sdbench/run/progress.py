"""`StepProgress` shows the progress of a training loop."""

from __future__ import annotations

from collections.abc import Callable

from sdbench.base.progress import Progress
from sdbench.measure.timer import WARMUP


class StepProgress:
    """An observer that shows steps as they end; the first and the last are always shown.

    Where a run has periods of steps, the first step and the periods are shown.
    """

    def __init__(
        self,
        *,
        images_per_step: int,
        enabled: bool,
        first_step: int = 0,
        steps_per_period: int | None = None,
    ) -> None:
        """Show nothing yet, and never if it is not enabled, as on all ranks but the first.

        Earlier processes have trained `first_step` steps. `period_ends` is called after every
        `steps_per_period` steps, if at all.
        """
        self._images_per_step = images_per_step
        self._enabled = enabled
        self._first_step = first_step
        self._steps_per_period = steps_per_period
        self._progress: Progress | None = None

    def loop_begins(self) -> None:
        """Start the clock."""
        self._progress = Progress(0, unit="step", num_done=self._first_step, enabled=self._enabled)

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """A step has ended; `num_steps` may have grown since the last one."""
        progress = self._progress
        assert progress is not None
        progress.total = self._first_step + num_steps

        def note() -> str:
            images_per_second = progress.rate * self._images_per_step
            name = "warm-up" if phase == WARMUP else phase
            return f"{name}, {images_per_second:.3g} images/s, loss {loss():.4f}"

        if self._steps_per_period is not None and (index or self._steps_per_period == 1):
            progress.count(1)
        else:
            progress.advance(note=note, is_due=index == 0 or index + 1 == num_steps)

    def period_ends(self, figures: str) -> None:
        """Show the figures of the steps since the last period."""
        assert self._progress is not None
        self._progress.show(lambda: figures)

    def leave_out(self, seconds: float) -> None:
        """Take the last seconds, in which nothing was trained, out of the pace."""
        assert self._progress is not None
        self._progress.leave_out(seconds)

    def close(self) -> None:
        """The loop has ended, well or not."""
        if self._progress is not None:
            self._progress.close()
