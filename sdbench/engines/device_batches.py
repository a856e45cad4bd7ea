"""The batches of a loader, on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from sdbench.measure import phases
from sdbench.measure.watch import StepWatch

Batch = dict[str, Tensor]


class Loader(Protocol):
    """Gives the batches of an epoch each time that it is iterated over, and knows where it is."""

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch, or go on in the one that was resumed."""

    def state_dict(self) -> dict[str, Any]:
        """The position behind the batch that was given last."""


class Batches:
    """The batches of this rank on its device, one epoch after the other, without an end."""

    def __init__(self, loader: Loader, *, device: torch.device, watch: StepWatch) -> None:
        """Prepare; the loader is asked for nothing yet.

        Args:
            loader: Gives an epoch each time that it is iterated over.
            device: Gets the batches.
            watch: Is told of the waiting.
        """
        self._loader = loader
        # Also beyond an epoch that was resumed at its end, and has no batches.
        self._batches = itertools.chain.from_iterable(itertools.repeat(loader))
        self._device = device
        self._watch = watch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch."""
        batch = self._load()
        with self._watch.phases.phase(phases.HOST_TO_DEVICE):
            return self._copy(batch)

    def fetch_ahead(self) -> None:
        """The work of a step has been handed to the device: time to see to the next batch."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's position behind the batch that was handed out last."""
        return self._loader.state_dict()

    def _load(self) -> Batch:
        self._watch.data_wait_begins()
        batch = next(self._batches)
        self._watch.data_wait_ends()
        return batch

    def _copy(self, batch: Batch) -> Batch:
        return {name: data.to(self._device, non_blocking=True) for name, data in batch.items()}


class BatchesAhead(Batches):
    """The same, but a batch travels to the GPU on a stream of its own during the step before it."""

    def __init__(self, loader: Loader, *, device: torch.device, watch: StepWatch) -> None:
        """Prepare as `Batches` does.

        Args:
            loader: Its batches lie in pinned memory: from other memory a copy makes the host wait.
            device: A GPU.
            watch: Also tells whether a next step is certain.
        """
        super().__init__(loader, device=device, watch=watch)
        self._stream = torch.cuda.Stream(device)
        self._ahead: Batch | None = None
        self._state: dict[str, Any] = {}

    def __next__(self) -> Batch:
        """The next batch, which the work on the current stream will wait for."""
        if self._ahead is None:
            self._fetch()
        batch, self._ahead = self._ahead, None
        assert batch is not None
        with self._watch.phases.phase(phases.HOST_TO_DEVICE):
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for data in batch.values():
                # Or its memory could be given to the next copy before this stream has read it.
                data.record_stream(current)
        return batch

    def fetch_ahead(self) -> None:
        """Begin with the copy of the next batch, if there is certain to be a next step.

        A batch that nobody trains on would be counted as delivered all the same.
        """
        if not self._watch.is_last_step:
            self._fetch()

    def state_dict(self) -> dict[str, Any]:
        """The loader's position without the batch that is under way."""
        return super().state_dict() if self._ahead is None else self._state

    def _fetch(self) -> None:
        self._state = self._loader.state_dict()
        batch = self._load()
        with torch.cuda.stream(self._stream):
            self._ahead = self._copy(batch)


def make_batches(
    loader: Loader, *, device: torch.device, watch: StepWatch, copy_stream: str
) -> Batches:
    """Batches that travel on the stream of the computation, or beside it.

    Args:
        loader: Gives an epoch each time that it is iterated over.
        device: Gets the batches.
        watch: Is told of the waiting.
        copy_stream: ``compute`` or ``side``.
    """
    kind = BatchesAhead if copy_stream == "side" else Batches
    return kind(loader, device=device, watch=watch)
