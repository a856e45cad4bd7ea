"""The stages of Ray Data before the encoders: the order of the samples, and their reading.

The encoders are in another module, so that these stages do without the models' packages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.data.batches.batches import Batch, BatchReader
from sdbench.data.order.epochs import EpochOrder, Key, keys_of_first_epoch
from sdbench.data.samples import SampleType
from sdbench.data.source import SourceConfig
from sdbench.encoding.ray_stream import Stage


class ReadStage(Stage):
    """Reads, decodes and tokenizes for precompute: row number to the good samples."""

    def __init__(
        self, config: SourceConfig, pieces: Sequence[Sequence[int]], num_samples: int
    ) -> None:
        """Open the source; `pieces` are the samples of each row."""
        self._batches = open_same(config.rank, config=config, num_samples=num_samples)
        self._pieces = pieces

    def work(self, content: int) -> Batch:
        """Read a batch."""
        return self._batches.read_good(keys_of_first_epoch(self._pieces[content]))


class DecodeStage(Stage):
    """Reads, decodes and tokenizes: row number to the good samples.

    Row b * world_size + r is the batch b of rank r.
    """

    def __init__(
        self,
        open_batches: Callable[[int], BatchReader],
        config: SourceConfig,
        first_batch: int,
        position: dict[str, Any] | None,
    ) -> None:
        """Open the source; `open_batches` does so for a rank.

        The `config` of streamed files has the `num_workers` of `num_lanes_of_rank`. `first_batch`
        is the global batch of the first rows, counted from the first epoch's first. `position` is
        the state of the loader where the run was resumed.
        """
        self._reader_of_rank = functools.cache(open_batches)
        self._num_batches = self._reader_of_rank(0).num_samples // config.global_batch_size
        self._config = config
        self._first_batch = first_batch
        self._position = position
        self._streamed: dict[int, EpochOrder] = {}
        # With the parts of the ranks side by side.
        whole = {"rank": 0, "world_size": 1, "device_batch_size": config.global_batch_size}
        self._order = EpochOrder(
            self._reader_of_rank(0).samples, config=dataclasses.replace(config, **whole)
        )

    def work(self, content: int) -> Batch:
        """Read a batch."""
        batch, rank = divmod(content, self._config.world_size)
        epoch, number = divmod(self._first_batch + batch, self._num_batches)
        # Synthetic samples differ by rank, and stored ones do not.
        is_synthetic = self._config.data_format == "synthetic"
        reader = self._reader_of_rank(rank if is_synthetic else 0)
        if self._config.is_streamed and self._config.shuffle:
            indices = self._find_streamed(reader, rank=rank, epoch=epoch, number=number)
        else:
            size = self._config.device_batch_size
            indices = self._order.batch({"epoch": epoch}, number)
            indices = indices[rank * size : (rank + 1) * size]
        return reader.read_good([Key(epoch, index) for index in indices])

    def _find_streamed(
        self, reader: BatchReader, *, rank: int, epoch: int, number: int
    ) -> list[int]:
        """The samples of a batch; the reader learns how many lanes this actor reads in turn."""
        if rank not in self._streamed:
            order = EpochOrder(reader.samples, config=dataclasses.replace(self._config, rank=rank))
            if self._position is not None:
                order.resume(self._position)
            self._streamed[rank] = order
        num_lanes = sum(order.num_lanes.get(epoch, 1) for order in self._streamed.values())
        reader.num_lanes = {epoch: num_lanes}
        return self._streamed[rank].batch({"epoch": epoch}, number)


def open_same(rank: int, *, config: SourceConfig, num_samples: int) -> BatchReader:
    """Open a source on this node, where it has to have as many samples as for the ranks."""
    batches = data.open_batches(dataclasses.replace(config, rank=rank))
    if batches.num_samples != num_samples:
        raise RunError(
            f"a decoder finds {batches.num_samples} samples where the run has found {num_samples}: "
            "all nodes of the cluster need the same data at the same place"
        )
    return batches


def num_lanes_of_rank(*, num_actors: int, num_ranks: int) -> int:
    """Lanes of each rank, so that all batches of a lane have the same turn among the actors.

    The batch b of a rank comes from its lane b % number of lanes.
    """
    return num_actors // math.gcd(num_actors, num_ranks)


def batch_bytes(source: SourceConfig, batch_size: int) -> int:
    """Size of a batch of decoded images with token ids."""
    tensors = SampleType.IMAGES.batch_tensors(source).values()
    return batch_size * sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in tensors)
