"""Reusable shared memory in which a loader worker makes its batches.

New shared memory for each batch, as torch's default_collate takes it, costs a page fault for every
4 KiB on either side: with latents at 512 px two workers then deliver a third less
(results/comparisons/2-core-cpu_latents_transport.json).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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

    def __init__(self, *layouts: Layout, prefetch_factor: int) -> None:
        """Make nothing yet; `layouts` are those of the batches, which share the memory."""
        self._layouts = layouts
        self._num_slots = prefetch_factor + 1
        self._num_samples = 0
        self._slots: list[dict[str, torch.UntypedStorage]] = []
        self._turn = 0

    def take(
        self, num_samples: int, *, layout: int = 0
    ) -> tuple[dict[str, torch.Tensor], int | None]:
        """Return uninitialised tensors of a layout for a batch, and the number of their slot.

        The number differs in each worker; it is None in the training process.
        """
        wanted = {
            name: ((num_samples, *shape), dtype)
            for name, (shape, dtype) in self._layouts[layout].items()
        }
        worker = get_worker_info()
        if worker is None:
            return {
                name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in wanted.items()
            }, None
        if num_samples != self._num_samples:
            self._num_samples, self._turn = num_samples, 0
            self._slots = [self._make_slot(num_samples) for _ in range(self._num_slots)]
        turn, self._turn = self._turn, (self._turn + 1) % self._num_slots
        tensors = {
            name: torch.empty(0, dtype=dtype).set_(self._slots[turn][name], 0, shape)
            for name, (shape, dtype) in wanted.items()
        }
        return tensors, worker.id * self._num_slots + turn

    def _make_slot(self, num_samples: int) -> dict[str, torch.UntypedStorage]:
        """Make memory for the largest layout, shared as torch's default_collate shares it.

        share_memory_() would copy.
        """
        return {
            name: torch.UntypedStorage._new_shared(
                max(
                    num_samples * math.prod(layout[name][0]) * layout[name][1].itemsize
                    for layout in self._layouts
                )
            )
            for name in self._layouts[0]
        }


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
