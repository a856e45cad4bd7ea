"""Progress of long work: a bar on a terminal, elsewhere plain lines with pace and time left."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

LINE_PERIOD_S = 10.0
NOTE_PERIOD_S = 1.0
# The pace is that of so many advances: a first one that is slow is forgotten soon.
NUM_RECENT = 10

Item = TypeVar("Item")


def show_progress(
    items: Iterable[Item],
    *,
    total: int,
    unit: str,
    num_done: int = 0,
    count: Callable[[Item], int] = lambda item: 1,
) -> Iterator[Item]:
    """Pass items on as they are finished, and show how many there have been.

    Args:
        items: Finished pieces of work.
        total: As for `Progress`.
        unit: As for `Progress`.
        num_done: As for `Progress`.
        count: How many units an item stands for.
    """
    with Progress(total, unit=unit, num_done=num_done) as progress:
        for item in items:
            yield item
            progress.advance(count(item))


class Progress:
    """Shows how much of a work is done; work that is done before a first line is due shows none."""

    def __init__(self, total: int, *, unit: str, num_done: int = 0, enabled: bool = True) -> None:
        """Begin now.

        Args:
            total: How many there will be; may be changed on the way.
            unit: What one of them is called.
            num_done: How many an earlier run has done.
            enabled: False shows nothing.
        """
        self.total = total
        self._unit = unit
        self._num_done = num_done
        self._enabled = enabled
        self._shown_s = time.perf_counter()
        self._recent = collections.deque([(self._shown_s, num_done)], maxlen=NUM_RECENT + 1)
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=num_done, unit=f" {unit}s", dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def rate(self) -> float:
        """How many were done a second of late; 0.0 as long as none was."""
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def advance(
        self, count: int = 1, *, note: Callable[[], str] | None = None, is_due: bool = False
    ) -> None:
        """Count what has been done.

        Args:
            count: How many.
            note: Called for what to add, if this advance is shown.
            is_due: Show it at once.
        """
        now_s = self._count(count)
        period_s = LINE_PERIOD_S if self._bar is None else NOTE_PERIOD_S
        if self._enabled and (is_due or now_s - self._shown_s >= period_s):
            self._shown_s = now_s
            text = "" if note is None else note()
            if self._bar is None:
                self.say(self._line(text))
            else:
                self._bar.set_postfix_str(text, refresh=False)

    def report(self, result: str) -> None:
        """Count one more, and print what it came to."""
        self._count(1)
        self.say(self._line(result))

    def say(self, text: str) -> None:
        """Print lines without disturbing the bar."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """The work has ended, well or not."""
        if self._bar is not None:
            self._bar.close()

    def _count(self, count: int) -> float:
        now_s = time.perf_counter()
        self._num_done += count
        self._recent.append((now_s, self._num_done))
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.update(count)
        return now_s

    def _line(self, note: str) -> str:
        line = f"{self._unit} {self._num_done}/{self.total}{f': {note}' if note else ''}"
        if not self.rate:
            return line
        pace = f"{1 / self.rate:.3g} s/{self._unit}"
        if self.rate > 1:
            pace = f"{self.rate:.3g} {self._unit}s/s"
        left_s = (self.total - self._num_done) / self.rate
        left = f"{left_s:.0f} s" if left_s < 600 else f"{left_s / 60:.0f} min"
        return f"{line}, {pace}, about {left} left"
