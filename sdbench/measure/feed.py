"""Measures the rate of a data loader, and how long a trainer would wait for it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from sdbench.measure.summary import interval_for_record
from sdbench.statistics.intervals import within_run_interval

BYTES_PER_MEGABYTE = 10**6


class Stats(Protocol):
    """Counters of a loader since it was built or reset.

    Attributes:
        num_images_delivered: Images of the batches yielded.
        num_bad_samples: Samples that could not be used.
        num_dropped_samples: Samples of the data set that a flag leaves out.
        bytes_read: Size of the stored samples in bytes.
        seconds: Time of each phase of loading, summed over all loading processes.
    """

    num_images_delivered: int
    num_bad_samples: int
    num_dropped_samples: int
    bytes_read: int
    seconds: dict[str, float]

    def reset(self) -> None:
        """Set the counters to 0."""
        ...


class Loader(Protocol):
    """Yields the batches of one epoch per iteration, and counts them."""

    stats: Stats

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        ...


@dataclasses.dataclass(frozen=True)
class Feed:
    """The measured window of a loader that feeds an emulated trainer.

    Attributes:
        step_times_s: From each request for a batch to the next request.
        waits_s: From each request to its batch.
        stats: Counters of the loader in the window.
    """

    step_times_s: tuple[float, ...]
    waits_s: tuple[float, ...]
    stats: Stats


def measure_feed(
    loader: Loader,
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

    Args:
        loader: The loader to measure.
        num_warmup_batches: Batches before the window. At least as many as workers hold in advance
            have to be taken before the rate is that of loading.
        num_batches: Batches in the window.
        max_seconds: The window ends with the first batch after this time.
        step_s: Time of an emulated step after each batch, also in the warm-up, so that the window
            begins with as many prefetched batches as a trainer would find.
        observe: Called after each batch.
        clock: Host clock in seconds.
        sleep: Waits for a number of seconds.

    Returns:
        The window.
    """
    step_times_s: list[float] = []
    waits_s: list[float] = []
    with contextlib.closing(_repeat(loader)) as batches:

        def step() -> float:
            """Take a batch and emulate a step; returns the time at which the batch arrived."""
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
            got_s = step()
            done_s = clock()
            waits_s.append(got_s - asked_s)
            step_times_s.append(done_s - asked_s)
            asked_s = done_s
    return Feed(tuple(step_times_s), tuple(waits_s), loader.stats)


def _repeat(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def summarize_feed(
    feed: Feed,
    *,
    num_workers: int,
    num_cpu_cores: int,
    step_s: float = 0.0,
    target_images_per_second: float | None = None,
) -> dict[str, Any]:
    """The figures of a window.

    Args:
        feed: The window.
        num_workers: Loading processes; 0 if the trainer's process loads.
        num_cpu_cores: Cores that these may use.
        step_s: Time of the emulated step, or 0. With one the rate is that of the trainer, and says
            nothing about the loader's.
        target_images_per_second: The rate that the user wants, if any.

    Returns:
        The record's `summary`.
    """
    stats, num_steps, window_s = feed.stats, len(feed.step_times_s), sum(feed.step_times_s)
    num_images = stats.num_images_delivered
    num_processes = max(num_workers, 1)
    rate = num_images / window_s
    interval = within_run_interval(feed.step_times_s, images_per_step=num_images // num_steps)
    # More processes than cores share the cores.
    rate_per_core = rate / min(num_processes, num_cpu_cores)
    return {
        "images_per_second": rate,
        "images_per_second_interval": interval_for_record(interval),
        "images_per_second_per_process": rate / num_processes,
        "images_per_second_per_core": None if step_s else rate_per_core,
        "num_processes": num_processes,
        "num_workers_for_target": None
        if target_images_per_second is None
        else math.ceil(target_images_per_second / rate_per_core),
        "num_measured_steps": num_steps,
        "window_s": window_s,
        "data_wait_percent": 100 * sum(feed.waits_s) / window_s if step_s else None,
        "megabytes_per_second": stats.bytes_read / BYTES_PER_MEGABYTE / window_s,
        "ms_per_image": {
            phase: 1000 * seconds / num_images for phase, seconds in stats.seconds.items()
        },
        "num_images": num_images,
        "num_bad_samples": stats.num_bad_samples,
        "num_dropped_samples": stats.num_dropped_samples,
    }
