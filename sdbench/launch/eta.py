"""What does a person see while one process after another runs?"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Countdown:
    """A bar on a terminal; elsewhere a plain line for each process that has ended."""

    def __init__(self, total: int, *, unit: str) -> None:
        """Prepare the display.

        Args:
            total: How many processes there will be.
            unit: What one of them is called.
        """
        self._total = total
        self._unit = unit
        self._num_done = 0
        self._bar: Any = None
        self._start_s = time.perf_counter()

    def __enter__(self) -> Countdown:
        """Begin to count the time."""
        self._start_s = time.perf_counter()
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit=self._unit, dynamic_ncols=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the bar, however the work ended."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, result: str) -> None:
        """One more has ended.

        Args:
            result: What it came to, in a line.
        """
        self._num_done += 1
        each_s = (time.perf_counter() - self._start_s) / self._num_done
        left_s = each_s * (self._total - self._num_done)
        self.say(
            f"{self._unit} {self._num_done}/{self._total}: {result}, about {left_s / 60:.1f} min "
            "left"
        )
        if self._bar is not None:
            self._bar.update(1)

    def say(self, text: str) -> None:
        """Print lines without disturbing the bar."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)
