"""Reusable shared memory in which a loader worker makes its batches.

New shared memory for each batch, as torch's default_collate takes it, costs a page fault for every
4 KiB on either side: with latents at 512 px two workers then deliver a third less
(results/comparisons/2-core-cpu_latents_transport.json).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch.utils.data import get_worker_info

# Name of a tensor to its shape for one sample and its type.
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class SharedBatches:
    """Memory that batches are made in.

    In a worker it is a ring of `prefetch_factor` + 1 slots: for batches that are being made or
    wait, and for the one that the trainer has taken and copies (`SharedBatch`). In the training
    process each batch has new memory.
    """

    def __init__(self, layout: Layout, *, prefetch_factor: int) -> None:
        self._layout = layout
        self._num_slots = prefetch_factor + 1
        self._num_samples = 0
        self._slots: list[dict[str, torch.Tensor]] = []
        self._turn = 0

    def take(self, num_samples: int) -> tuple[dict[str, torch.Tensor], int | None]:
        """Return uninitialised tensors to make a batch in, and the number of their slot.

        The number differs in each worker; it is None in the training process.
        """
        worker = get_worker_info()
        if worker is None:
            return self._make(num_samples, torch.empty), None
        if num_samples != self._num_samples:
            self._num_samples, self._turn = num_samples, 0
            self._slots = [self._make(num_samples, _share) for _ in range(self._num_slots)]
        turn, self._turn = self._turn, (self._turn + 1) % self._num_slots
        return dict(self._slots[turn]), worker.id * self._num_slots + turn

    def _make(
        self, num_samples: int, allocate: Callable[..., torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {
            name: allocate((num_samples, *shape), dtype=dtype)
            for name, (shape, dtype) in self._layout.items()
        }


def _share(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # As torch's default_collate allocates; share_memory_() would copy.
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)


class SharedBatch:
    """Copies batches in the training process, before their worker overwrites its slots."""

    def __init__(self) -> None:
        # torch maps a slot's memory anew for each batch, unless somebody still holds the old one.
        self._held: dict[int, dict[str, torch.Tensor]] = {}

    def copy(
        self, tensors: dict[str, torch.Tensor], *, slot: int | None
    ) -> dict[str, torch.Tensor]:
        """Return copies in this process's memory; without a slot, the tensors themselves."""
        if slot is None:
            return tensors
        self._held[slot] = tensors
        return {name: tensor.clone() for name, tensor in tensors.items()}
