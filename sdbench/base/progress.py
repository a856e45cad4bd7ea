"""`Progress` shows a bar on a terminal, and elsewhere lines with pace and time left."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from sdbench.base.output import fit, terminal_width

LINE_PERIOD_S = 10.0
NOTE_PERIOD_S = 1.0
# The pace is taken over the last advances, so that a slow first one is soon forgotten.
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
    """Yield finished pieces of work, each of `count` units, and show a `Progress` of them."""
    with Progress(total, unit=unit, num_done=num_done) as progress:
        for item in items:
            yield item
            progress.advance(count(item))


class Progress:
    """Shows how much is done; work that ends before the first line is due shows nothing."""

    def __init__(self, total: int, *, unit: str, num_done: int = 0, enabled: bool = True) -> None:
        """Begin now, after `num_done` units of `total`, which may change; 0 if unknown."""
        self.total = total
        self._unit = unit
        self._num_before = self._num_done = num_done
        self._left_out_s = 0.0
        self._enabled = enabled
        self._shown_s = time.perf_counter()
        self._recent = collections.deque([(self._shown_s, num_done)], maxlen=NUM_RECENT + 1)
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=num_done, unit=unit, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rate(self) -> float:
        """Recent units per second; 0.0 before the first."""
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def advance(
        self, count: int = 1, *, note: Callable[[], str] | None = None, is_due: bool = False
    ) -> None:
        """Count finished units, and show them with a `note` if a line is due."""
        self.count(count)
        period_s = LINE_PERIOD_S if self._bar is None else NOTE_PERIOD_S
        if is_due or time.perf_counter() - self._shown_s >= period_s:
            self.show(note)

    def count(self, count: int) -> None:
        """Count finished units without a line."""
        self._num_done += count
        self._recent.append((time.perf_counter(), self._num_done))
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.update(count)

    def show(self, note: Callable[[], str] | None = None) -> None:
        """Show now how much is done, with a `note` as in `advance`."""
        if not self._enabled:
            return
        self._shown_s = time.perf_counter()
        text = "" if note is None else note()
        if self._bar is None:
            self.say(self._line(text))
        else:
            # tqdm would cut a text in the middle of a word, and leave no bar.
            parts = text.split(", ")
            while len(parts) > 1 and len(", ".join(parts)) > terminal_width() // 2:
                parts.pop()
            self._bar.set_postfix_str(", ".join(parts), refresh=False)

    def leave_out(self, seconds: float) -> None:
        """Take seconds out of the pace, but not out of the time left."""
        self._left_out_s += seconds
        recent = ((time_s + seconds, num_done) for time_s, num_done in self._recent)
        self._recent = collections.deque(recent, maxlen=NUM_RECENT + 1)

    def report(self, result: str) -> None:
        """Count a unit and print its result."""
        self.count(1)
        self.say(fit(self._line(result), hanging=2))

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

    def _line(self, note: str) -> str:
        of_total = f"/{self.total}" if self.total else ""
        line = f"{self._unit} {self._num_done}{of_total}{f': {note}' if note else ''}"
        if not self.rate or not self.total:
            return line
        pace = f"{1 / self.rate:.3g} s/{self._unit}"
        if self.rate > 1:
            pace = f"{self.rate:.3g} {self._unit}s/s"
        left_out_s = self._left_out_s / (self._num_done - self._num_before)
        left_s = (self.total - self._num_done) * (1 / self.rate + left_out_s)
        left = f"{left_s:.0f} s" if left_s < 600 else f"{left_s / 60:.0f} min"
        return f"{line}, {pace}, about {left} left"
