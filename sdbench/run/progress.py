"""Progress of a training loop."""

from __future__ import annotations

from collections.abc import Callable

from sdbench.base.progress import Progress
from sdbench.measure.timer import WARMUP


class StepProgress:
    """Shows the steps of a training loop, as an observer of them; the first and the last always."""

    def __init__(self, *, images_per_step: int, enabled: bool) -> None:
        """Prepare the display.

        Args:
            images_per_step: Global batch.
            enabled: False on every rank but the first.
        """
        self._images_per_step = images_per_step
        self._enabled = enabled
        self._progress: Progress | None = None

    def loop_begins(self) -> None:
        """The first step is about to begin."""
        self._progress = Progress(0, unit="step", enabled=self._enabled)

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """A step has ended; a run that has not settled may get longer."""
        progress = self._progress
        assert progress is not None
        progress.total = num_steps

        def note() -> str:
            images_per_second = progress.rate * self._images_per_step
            name = "warm-up" if phase == WARMUP else phase
            return f"{name}, {images_per_second:.3g} images/s, loss {loss():.4f}"

        progress.advance(note=note, is_due=index == 0 or index + 1 == num_steps)

    def close(self) -> None:
        """The loop has ended, well or not."""
        if self._progress is not None:
            self._progress.close()
