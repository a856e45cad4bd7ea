"""What does a person see while a run is under way?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from sdbench.measure.timer import WARMUP

# A loss is read as often as that: it waits for the device.
LINE_PERIOD_S = 10.0


class Progress:
    """A bar on a terminal; elsewhere a plain line for the first step and every ten seconds."""

    def __init__(self, *, images_per_step: int, enabled: bool) -> None:
        """Prepare the display.

        Args:
            images_per_step: Global batch.
            enabled: False on every rank but the first.
        """
        self._images_per_step = images_per_step
        self._enabled = enabled
        self._bar = None
        self._last_step_s = 0.0
        self._last_line_s = float("-inf")
        self._loss = float("nan")
        self._recent_step_times_s: list[float] = []

    def loop_begins(self) -> None:
        """The first step is about to begin."""
        self._last_step_s = time.perf_counter()
        if self._enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(unit="step", dynamic_ncols=True)

    def step_ends(
        self, *, index: int, phase: str, loss: Callable[[], float], num_steps: int
    ) -> None:
        """A step has ended; a run that has not settled may get longer."""
        if not self._enabled:
            return
        now_s = time.perf_counter()
        self._recent_step_times_s = [*self._recent_step_times_s[-4:], now_s - self._last_step_s]
        self._last_step_s = now_s
        step_time_s = sum(self._recent_step_times_s) / len(self._recent_step_times_s)
        is_due = now_s - self._last_line_s >= LINE_PERIOD_S or index + 1 == num_steps
        if is_due:
            self._last_line_s, self._loss = now_s, loss()
        status = (
            f"{'warm-up' if phase == WARMUP else phase}, "
            f"{self._images_per_step / step_time_s:.3g} images/s, loss {self._loss:.4f}"
        )
        if self._bar is not None:
            self._bar.total = num_steps
            self._bar.set_postfix_str(status, refresh=False)
            self._bar.update(1)
        elif is_due:
            remaining_s = (num_steps - index - 1) * step_time_s
            print(
                f"step {index + 1}/{num_steps} ({status}), {step_time_s:.3g} s/step, "
                f"about {remaining_s:.0f} s left",
                flush=True,
            )

    def close(self) -> None:
        """The loop has ended, well or not."""
        if self._bar is not None:
            self._bar.close()
