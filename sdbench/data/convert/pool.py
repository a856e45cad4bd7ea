"""Division of a data set into numbered pieces of work, done by several processes."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import NamedTuple

import sdbench
from sdbench.base.errors import RunError
from sdbench.base.progress import show_progress

# Samples from which processes pay off, about 20 s of work: starting one, which imports torch, takes
# seconds.
WORTH_PROCESSES = 2_000


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The first samples of a source, divided into shards; bad samples count too."""

    num_samples: int
    samples_per_shard: int

    @property
    def num_shards(self) -> int:
        """Number of shards; the last one may have fewer samples."""
        return -(-self.num_samples // self.samples_per_shard)

    def indices(self, number: int) -> range:
        """Return the indices in the source of the samples of a shard."""
        first = number * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.num_samples))


class WorkReport(NamedTuple):
    """The samples that a piece of work has read, and a sentence for each that cannot be used.

    `profiles` counts pictures by `Picture.profile`, where that is not sRGB.
    """

    num_read: int
    bad: list[str]
    profiles: Mapping[str, int] = {}


Work = Callable[[int], WorkReport]


@contextlib.contextmanager
def run_work(
    work: Work,
    numbers: Sequence[int],
    *,
    num_workers: int | None,
    num_samples: int,
    num_done: int = 0,
) -> Iterator[Iterator[WorkReport]]:
    """Do numbered pieces of work, in this process or in several others, and show the progress.

    Other processes are spawned, not forked, as they use libraries with threads. They end with this
    one, whatever ends it. The reports come in the order in which pieces are finished.

    `work` does the piece with a given number, and is pickled once for each process. `num_workers`
    None means one per core, from `WORTH_PROCESSES` samples on. The progress is of `num_samples`, of
    which an earlier run has done `num_done`.
    """
    showing = functools.partial(
        show_progress,
        total=num_samples,
        unit="sample",
        num_done=num_done,
        count=lambda report: report.num_read,
    )
    if num_workers is None:
        is_worth = num_samples - num_done >= WORTH_PROCESSES
        num_workers = sdbench.NUM_CPUS if is_worth else 0
    num_workers = min(num_workers, len(numbers))
    if num_workers <= 1:
        yield showing(map(work, numbers))
        return
    executor = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(work,),
    )
    try:
        futures = [executor.submit(_work_in_worker, number) for number in numbers]
        yield showing(future.result() for future in as_completed(futures))
    except BrokenProcessPool as error:
        raise RunError(
            "A worker process died, probably because memory ran out: try again with fewer "
            "--num_workers."
        ) from error
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


_work: Work | None = None


def _start_worker(work: Work) -> None:
    global _work
    _work = work
    # The parent handles them for all.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """End this worker when its parent ends, even by a kill."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _work_in_worker(number: int) -> WorkReport:
    assert _work is not None
    return _work(number)
