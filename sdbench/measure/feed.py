"""Measures the rate of a data loader, and how long a trainer waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

from sdbench.measure.summary import summarize_window
from sdbench.record.formulas import of_processes

BYTES_PER_MEGABYTE = 10**6


@dataclasses.dataclass(frozen=True)
class Feed:
    """The measured window of a loader that feeds an emulated trainer.

    A step is from one request for a batch to the next. `stats` is the `LoaderStats` of the window.
    """

    step_times_s: tuple[float, ...]
    waits_s: tuple[float, ...]
    stats: Any


def measure_feed(
    loader: Any,
    *,
    num_warmup_batches: int,
    num_batches: int,
    max_seconds: float = math.inf,
    step_s: float = 0.0,
    observe: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Feed:
    """Take batches as a trainer would, epoch after epoch.

    An iteration over the loader is an epoch, and its `stats` count the batches. The window has
    `num_batches`, or ends with the first one after `max_seconds`. The warm-up before it should have
    at least as many batches as workers prefetch. A step of `step_s` is emulated after each batch,
    also in the warm-up, so that the window begins with as many prefetched batches as a trainer
    would find.
    """
    step_times_s: list[float] = []
    waits_s: list[float] = []
    # Closed at the end, and with it the loader's processes.
    with contextlib.closing(batch for _ in itertools.count() for batch in loader) as batches:

        def step() -> float:
            """Take a batch and emulate a step; returns when the batch arrived."""
            next(batches)
            got_s = clock()
            if step_s:
                sleep(step_s)
            observe()
            return got_s

        for _ in range(num_warmup_batches):
            step()
        loader.stats.reset()
        began_s = asked_s = clock()
        while len(step_times_s) < num_batches and asked_s - began_s < max_seconds:
            waits_s.append(step() - asked_s)
            done_s = clock()
            step_times_s.append(done_s - asked_s)
            asked_s = done_s
    return Feed(tuple(step_times_s), tuple(waits_s), loader.stats)


def summarize_feed(
    feed: Feed,
    *,
    num_workers: int,
    num_cpu_cores: int,
    step_s: float = 0.0,
    target_images_per_second: float | None = None,
) -> dict[str, Any]:
    """The record's `summary` of a window.

    `num_workers` is 0 if the trainer's process loads; the workers may use `num_cpu_cores`. With an
    emulated step of `step_s` the rate is the trainer's, not the loader's.
    """
    stats, window_s = feed.stats, sum(feed.step_times_s)
    num_images = stats.num_images_delivered
    window = summarize_window(
        feed.step_times_s,
        feed.waits_s,
        images_per_step=num_images / len(feed.step_times_s),
        window_s=window_s,
    )
    per_process = of_processes(
        window["images_per_second"],
        num_processes=max(num_workers, 1),
        num_cores=num_cpu_cores,
        target=target_images_per_second,
    )
    return {
        **window,
        **per_process,
        **({"images_per_second_per_core": None} if step_s else {}),
        "data_wait_percent": window["data_wait_percent"] if step_s else None,
        "megabytes_per_second": stats.bytes_read / BYTES_PER_MEGABYTE / window_s,
        "ms_per_image": {
            phase: 1000 * seconds / num_images for phase, seconds in stats.seconds.items()
        },
        "num_images": num_images,
        "num_bad_samples": stats.num_bad_samples,
        "num_dropped_samples": stats.num_dropped_samples,
    }
