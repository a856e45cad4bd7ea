"""`StepProgress` shows the progress of a training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sdbench.base.progress import Progress
from sdbench.measure.timer import AFTER, WARMUP


@dataclasses.dataclass(kw_only=True)
class StepProgress:
    """An observer that shows steps as they end; the first and the last are always shown.

    Where a run has periods of steps, the first step and the periods are shown.

    Attributes:
        images_per_step: Global batch.
        enabled: Whether to show anything; only on the first rank.
        first_step: Steps that an earlier process has trained.
        steps_per_period: Steps between two calls of `period_ends`; None without such calls.
    """

    images_per_step: int
    enabled: bool
    first_step: int = 0
    steps_per_period: int | None = None
    _progress: Progress | None = dataclasses.field(default=None, init=False)

    def loop_begins(self) -> None:
        """Start the clock."""
        self._progress = Progress(0, unit="step", num_done=self.first_step, enabled=self.enabled)

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """A step has ended; `num_steps` may have grown since the last one."""
        progress = self._progress
        assert progress is not None
        progress.total = self.first_step + num_steps

        def note() -> str:
            images_per_second = progress.rate * self.images_per_step
            name = {WARMUP: "warm-up", AFTER: "traced"}.get(phase, phase)
            return f"{name}, {images_per_second:.3g} images/s, loss {loss():.4f}"

        if self.steps_per_period is not None and (index or self.steps_per_period == 1):
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
