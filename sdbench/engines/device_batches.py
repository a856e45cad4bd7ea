"""Copies the batches of a loader to the device, prepares them there, and splits them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sdbench.base.shape import Shape
from sdbench.data.samples import shape_of
from sdbench.measure import phases
from sdbench.measure.watch import StepWatch
from sdbench.settings.recipe import EngineConfig

if TYPE_CHECKING:
    from sdbench.data.batches.loader import CheckedLoader

Batch = dict[str, Tensor]
Prepare = Callable[[Batch], Batch]


class MicroBatch(NamedTuple):
    """A part of a step's batch, and its share of the images.

    The loss is a mean, so a smaller micro-batch at the end counts for less.
    """

    tensors: Batch
    share: float
    is_last: bool


def split_batch(batch: Batch, size: int) -> list[MicroBatch]:
    """Split a batch into micro-batches of `size` images; the last one may be smaller."""
    num_images = len(next(iter(batch.values())))
    pieces = list(zip(*(data.split(size) for data in batch.values()), strict=True))
    return [
        MicroBatch(
            dict(zip(batch, piece, strict=True)), len(piece[0]) / num_images, piece is pieces[-1]
        )
        for piece in pieces
    ]


class Batches:
    """The batches of this rank on its device, epoch after epoch, without end.

    With `copy_stream` ``side`` a batch is copied to the GPU on a side stream, during the step
    before. The loader's batches must then be in pinned memory: the host would wait for copies from
    other memory. `encode_ahead` prepares on the side stream too, so that it does not wait for what
    the step waits for, such as the gradients of other ranks.
    """

    def __init__(
        self,
        loader: CheckedLoader,
        *,
        config: EngineConfig,
        device: torch.device,
        watch: StepWatch,
        prepare: Prepare | None = None,
    ) -> None:
        """Load nothing yet; `prepare` is applied to each batch on the device, without gradients."""
        self._loader = loader
        # Goes on also after an epoch without batches, i.e. one that was resumed at its end.
        self._batches = itertools.chain.from_iterable(itertools.repeat(loader))
        self._device = device
        self._watch = watch
        self._prepare = prepare
        self._prepares_ahead = config.encode_ahead
        self._has_buckets = config.buckets is not None
        self._shape: Shape | None = None  # of the batch that was loaded last
        self._stream: Any = None
        if config.copy_stream == "side":
            self._stream = torch.cuda.Stream(device)
            # The first batch is prepared by modules that the current stream may still be building.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._ahead: Batch | None = None
        self._state_before_ahead: dict[str, Any] = {}
        self._fault: Exception | None = None  # why no batch is ahead

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; the current stream waits until it is there.

        Raises between two steps what has gone wrong: an error of the loader, or a StopAskedError.
        """
        if self._fault is not None:
            raise self._fault
        if self._stream is None:
            batch = self._load()
            self._watch.timer.shape = self._shape
            with self._watch.phases.phase(phases.HOST_TO_DEVICE):
                batch = self._copy(batch)
            return self._prepared(batch)
        if self._ahead is None:
            self._fetch()
        batch, self._ahead = self._ahead, None
        assert batch is not None
        self._watch.timer.shape = self._shape
        with self._watch.phases.phase(phases.HOST_TO_DEVICE):
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for data in batch.values():
                # Without it the next copy could get this memory before it has been read.
                data.record_stream(current)
        return batch if self._prepares_ahead else self._prepared(batch)

    def fetch_ahead(self) -> None:
        """Begin to copy the next batch on the side stream, except in the last step.

        A batch that is not trained on would be counted as delivered all the same.
        """
        if self._stream is not None and not self._watch.is_last_step:
            try:
                self._fetch()
            except Exception as fault:
                self._fault = fault  # the current step is ended first

    def state_dict(self) -> dict[str, Any]:
        """The loader's position after the last batch that was returned."""
        is_ahead = self._ahead is not None or self._fault is not None
        return self._state_before_ahead if is_ahead else self._loader.state_dict()

    def _fetch(self) -> None:
        self._state_before_ahead = self._loader.state_dict()
        batch = self._load()
        with torch.cuda.stream(self._stream):
            copied = self._copy(batch)
            self._ahead = self._prepared(copied) if self._prepares_ahead else copied

    def _load(self) -> Batch:
        self._watch.data_wait_begins()
        with self._watch.alone():
            batch = next(self._batches)
        self._watch.data_wait_ends()
        if self._has_buckets:
            self._shape = shape_of(batch)
        return batch

    def _copy(self, batch: Batch) -> Batch:
        return {name: data.to(self._device, non_blocking=True) for name, data in batch.items()}

    def _prepared(self, batch: Batch) -> Batch:
        if self._prepare is None:
            return batch
        with torch.no_grad():
            return self._prepare(batch)
