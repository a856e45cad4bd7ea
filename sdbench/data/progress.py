"""Progress of work on a data set: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

# Seconds between two lines where the output is no terminal.
LINE_PERIOD_S = 10.0

Item = TypeVar("Item")


def _one(item: object) -> int:
    return 1


def show_progress(
    items: Iterable[Item],
    unit: str,
    *,
    total: int,
    num_done: int = 0,
    count: Callable[[Item], int] = _one,
) -> Iterator[Item]:
    """Pass items on, showing rate and time left. What takes less than a period shows nothing.

    Args:
        items: As they are finished.
        unit: What is counted, in the plural.
        total: How many of them there are in all.
        num_done: How many of them an earlier run has done.
        count: How many of them an item stands for.
    """
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, initial=num_done, unit=f" {unit}", delay=1.0) as bar:
            for item in items:
                yield item
                bar.update(count(item))
        return
    started_s = last_line_s = time.monotonic()
    num_new = 0
    for item in items:
        yield item
        num_new += count(item)
        now_s = time.monotonic()
        if now_s - last_line_s >= LINE_PERIOD_S:
            last_line_s = now_s
            rate = num_new / (now_s - started_s)
            left = f", {(total - num_done - num_new) / rate:.0f} s left" if num_new else ""
            print(
                f"{num_done + num_new} of {total} {unit}, {rate:.1f} {unit}/s{left}",
                file=sys.stderr,
            )
