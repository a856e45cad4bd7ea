"""`CheckedLoader`, the loader of every source: it counts images, and raises when they are too few.

Streaming 0.13.0 can end an epoch early without an exception, or hang, when a background thread
fails. A benchmark that trained on fewer images than it counts would be wrong.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch._C import _error_if_any_worker_fails
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.stop import obey_parent_alone, waited
from sdbench.base.units import counted
from sdbench.data.batches.batches import PHASES, Batch, BatchReader, BatchReport
from sdbench.data.batches.colours import describe_profiles
from sdbench.data.batches.shared_batches import SharedBatch
from sdbench.data.checks import PLACE_FLAGS, tell_once
from sdbench.data.order.epochs import Order
from sdbench.data.source import SourceConfig
from sdbench.record.store import INVALID

# Bad samples of an epoch that are printed; further ones are only counted.
NUM_BAD_NAMED = 5


@dataclass
class LoaderStats:
    """Counts of a loader since it was built, or since `reset`."""

    num_images_delivered: int = 0
    num_bad_samples: int = 0  # each replaced by a good one
    num_dropped_samples: int = 0  # left out of the data set by a flag; not reset
    num_failed_blocks: int = 0  # batches that could not be prepared: the one before came again
    bytes_read: int = 0  # of the stored samples
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add(self, report: BatchReport) -> None:
        """Count a batch."""
        counts = report.num_images, len(report.bad), 0, 0, report.bytes_read, report.seconds
        self.merge(LoaderStats(*counts))

    def merge(self, other: LoaderStats) -> None:
        """Add what the loader of another rank has counted."""
        self.num_images_delivered += other.num_images_delivered
        self.num_bad_samples += other.num_bad_samples
        self.num_failed_blocks += other.num_failed_blocks
        self.bytes_read += other.bytes_read
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds

    def reset(self) -> None:
        """Count from 0 again."""
        self.__init__(num_dropped_samples=self.num_dropped_samples)


def _check_folder_of_sockets() -> None:
    """Refuse a folder for temporary files in which workers cannot open sockets.

    Workers hand tensors over through a socket in a folder that multiprocessing makes there. Its
    path has at most 108 bytes, of which the last is a zero (unix(7)).
    """
    longest = 107 - len("/pymp-12345678/listener-12345678")
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > longest:
        raise ConfigError(
            "the path of the folder for temporary files is too long for sockets of loader workers",
            value=folder,
            allowed=f"at most {longest} bytes, or --num_workers 0",
            flag="TMPDIR",
        )


def _start_worker(number: int) -> None:
    obey_parent_alone()


class _Workers(_MultiProcessingDataLoaderIter):
    """torch's iterator over workers, which is interrupted only while it starts or waits for them.

    A stop signal may end it. torch's own handler would raise wherever the training is when a worker
    has died, such as in the middle of an update.
    """

    is_waiting = False

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, _look_while_waiting)

    def __del__(self) -> None:
        # torch's method needs this attribute, which is set last, when all workers have been
        # started. Running workers end with this process.
        if hasattr(self, "_workers_status"):
            super().__del__()

    def _try_get_data(self, timeout: float) -> tuple[bool, Any]:
        """Wait for a batch as torch does, and look for a stop signal."""
        found = False, None

        def has_come(wait_s: float) -> bool:
            nonlocal found
            _error_if_any_worker_fails()  # what a dead one has sent may be there in part
            found = super(_Workers, self)._try_get_data(wait_s)
            return found[0]

        _Workers.is_waiting = True
        try:
            waited(has_come, timeout)
        finally:
            _Workers.is_waiting = False
        return found


def _look_while_waiting(number: int, frame: FrameType | None) -> None:
    if _Workers.is_waiting:
        _error_if_any_worker_fails()


def watch(
    begin: Callable[[], Iterator], *, config: SourceConfig, position: Callable[[], str]
) -> Iterator[Any]:
    """Yield the batches of a loader; a `RunError` if it fails, yields one, or is silent too long.

    `begin` starts it; `position` says where it is, e.g. ``after 8 images of this epoch``.
    """
    # Starting workers and their first batch count as one wait, hence twice the time; torch's own
    # timeout watches workers.
    limit_s = config.data_timeout_s * (2 if config.num_workers else 1)
    batches = None
    try:
        while True:
            silence = (
                f"The data loader gave no batch for {config.data_timeout_s:g} s, {position()}: a "
                "download or a disk is stuck. --data_timeout_s sets how long to wait."
            )
            asked_s = time.monotonic()
            try:
                with time_limit(limit_s, message=silence):
                    # Within the time limit: starting the workers may get stuck as well.
                    batches = begin() if batches is None else batches
                    batch = next(batches, None)
            except RunError:
                raise
            except RuntimeError as error:
                if time.monotonic() - asked_s >= config.data_timeout_s:
                    raise RunError(silence) from error
                # torch says so when a worker has been killed.
                raise RunError(
                    f"The data loader failed {position()} ({config.num_workers} workers): {error}"
                ) from error
            if isinstance(batch, RunError):
                raise batch
            if batch is None:
                return
            yield batch
    finally:
        # Ends workers now. The traceback of an error would keep them until garbage is collected;
        # if their queues go first, that costs 5 s for each worker.
        del batches


@contextlib.contextmanager
def time_limit(timeout_s: float, *, message: str) -> Iterator[None]:
    """Raise a `RunError` with this message if the block takes longer.

    A timer's signal interrupts what waits in the interpreter: locks, sleeps, sockets. It reaches
    the main thread only; in another one, or inside a C function that never returns, nothing can
    be interrupted, and there is no limit. A timer that runs already is put back afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise RunError(message)

    former_handler = signal.signal(signal.SIGALRM, interrupt)
    former_timer = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *former_timer)
        signal.signal(signal.SIGALRM, former_handler)


class CheckedLoader(DataLoader):
    """A DataLoader that counts its images and fails loudly when an epoch is short or stuck.

    Attributes:
        sample_type: Type of the samples; `SampleType.batch_tensors` describes the batches.
        stats: Counts of delivered images, bad samples and loading times.
    """

    def __init__(self, batches: BatchReader, order: Order, *, config: SourceConfig) -> None:
        """Set the loader up as `config` says; `batches` makes a batch from keys of `order`."""
        has_workers = config.num_workers > 0
        if has_workers:
            _check_folder_of_sockets()
        dataset, sampler = order.for_torch()
        super().__init__(
            dataset,
            sampler=sampler,
            collate_fn=batches,
            worker_init_fn=_start_worker,
            # Its own generator: the start of an epoch would advance the one that draws the noise.
            generator=torch.Generator().manual_seed(config.seed),
            batch_size=config.device_batch_size,
            drop_last=True,
            num_workers=config.num_workers,
            pin_memory=config.pin_memory,
            # torch refuses these three without workers.
            prefetch_factor=config.prefetch_factor if has_workers else None,
            persistent_workers=has_workers,
            timeout=config.data_timeout_s if has_workers else 0,
        )
        self.sample_type = batches.sample_type
        num_left_out = 0 if batches.mixture is None else batches.mixture.num_left_out
        self.stats = LoaderStats(num_dropped_samples=batches.samples.num_dropped + num_left_out)
        self._config = config
        self._order = order
        self._reader = batches
        self._received = SharedBatch()
        self._num_in_epoch = 0
        self._num_resumed = 0
        self._profiles_told: set[str] = set()

    @property
    def num_images_delivered(self) -> int:
        """Images handed out since the loader was built."""
        return self.stats.num_images_delivered

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, the same on every rank."""
        num_images = self._num_in_epoch or self._num_resumed  # the latter before the first batch
        is_next_epoch = num_images == len(self) * self.batch_size
        num_global_images = 0 if is_next_epoch else num_images * self._config.world_size
        state = self._order.state(num_images=num_global_images, is_next_epoch=is_next_epoch)
        return {"num_samples": self._reader.num_samples, **state}

    def names_before(self, state: dict[str, Any], *, num_back: int) -> list[str]:
        """Name the samples of a batch of this rank, by computing its order again.

        The batch is `num_back` batches before the one that was handed out last at `state`. Bad
        samples that were replaced are named too.
        """
        num_done = state["num_images"] // self._config.global_batch_size
        indices = self._order.batch(state, num_done - 1 - num_back)
        return [self._reader.name(index) for index in indices]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken: the next epoch has only the remaining batches.

        Call it on every rank, before the first batch of a new loader with the same data, seed and
        global batch. Another number of samples, which changes the order, is a `ConfigError`.
        """
        if state["num_samples"] != self._reader.num_samples:
            raise ConfigError(
                "the data have another number of samples than those of the checkpoint",
                value=self._reader.num_samples,
                allowed=f"the {state['num_samples']} samples that the run began with, or a new run "
                "on these by --init_from and another --run_name",
                flag=PLACE_FLAGS,
            )
        self._order.resume(state)
        self._reader.num_lanes = self._order.num_lanes
        self._num_resumed = state["num_images"] // self._config.world_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batches of one epoch; if it ends early or has too many bad samples, raise."""
        self._num_in_epoch, self._num_resumed = self._num_resumed, 0
        expected = len(self) * self.batch_size
        num_bad = 0
        profiles: collections.Counter[str] = collections.Counter()
        try:
            for batch in watch(
                self._begin,
                config=self._config,
                position=lambda: f"after {self._num_in_epoch} images of this epoch",
            ):
                self._num_in_epoch += batch.report.num_images
                self.stats.add(batch.report)
                num_bad = self._check_bad(batch.report, num_bad=num_bad, expected=expected)
                for name, profile in batch.report.profiles:
                    if profile not in self._profiles_told:
                        tell_once(f"{name} has the colour profile {profile}.")
                        self._profiles_told.add(profile)
                    profiles[profile] += 1
                # Page-locked tensors are copies already.
                slot = None if self.pin_memory else batch.report.slot
                yield self._received.copy(batch.tensors, slot=slot)
            if self._num_in_epoch != expected:
                raise RunError(
                    f"The data ended early: an epoch of this rank has {expected} images, and "
                    f"{self._num_in_epoch} were delivered. A shard is missing or damaged, or a "
                    "download failed; the log above may name it.",
                    status=INVALID,
                )
        except RunError:
            self.close()
            raise
        if profiles:
            tell_once(f"In an epoch of this rank {describe_profiles(profiles)}")
        self._order.epoch_ended()
        self._num_in_epoch = 0

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return _Workers(self) if self.num_workers else super()._get_iterator()

    def _begin(self) -> Iterator[Batch | RunError]:
        """Return the batches of an epoch, from the one after `_num_in_epoch` images on."""
        return super().__iter__()

    def describe_stream(self) -> str | None:
        """Return a report of the loading processes, or None if they give none."""
        return None

    def close(self) -> None:
        """End the workers now: left to the garbage collector, torch waits 5 s for each of them."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._iterator = None

    def _check_bad(self, report: BatchReport, *, num_bad: int, expected: int) -> int:
        """Count an epoch's bad samples, name the first ones, and stop when there are too many."""
        for sentence in report.bad[: max(NUM_BAD_NAMED - num_bad, 0)]:
            print(f"Skipped a bad sample: {sentence}", file=sys.stderr)
        num_bad += len(report.bad)
        limit = self._config.max_bad_fraction
        if num_bad > limit * expected:
            raise RunError(
                f"{counted(num_bad, 'sample of this epoch is', 'samples of this epoch are')} bad, "
                f"more than {limit:.2%} of {expected} "
                f"(--max_bad_fraction), the last: {report.bad[-1]}"
            )
        return num_bad
