"""The stages of Ray Data before the encoders: the order of the samples, and their reading.

The encoders are in another module, so that these stages do without the models' packages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.data.pipeline.batches import BatchReader, GoodBatch
from sdbench.data.pipeline.order import EpochOrder, Key
from sdbench.data.samples import SampleType
from sdbench.data.source import SourceConfig
from sdbench.tasks.encode.images import ImageReader, LoadedBatch
from sdbench.tasks.encode.ray_stream import Stage


class RankKeys(NamedTuple):
    """The samples of a rank's batch."""

    rank: int
    keys: list[Key]


class Prepared(NamedTuple):
    """A rank's batch of images: the good ones, and the number of all."""

    good: GoodBatch
    num_samples: int


class ReadStage(Stage):
    """Reads, decodes and tokenizes for precompute: row number to `LoadedBatch`."""

    def __init__(
        self, configs: Sequence[SourceConfig], pieces: Sequence[range], num_samples: int
    ) -> None:
        """Open the source.

        Args:
            configs: The source, once for each resolution.
            pieces: The samples of each row.
            num_samples: Of the source, as the driver has counted them.
        """
        self._reader = ImageReader(configs)
        self._pieces = pieces
        _check_same_data(self._reader.num_samples, num_samples)

    def work(self, content: int) -> LoadedBatch:
        """Read a batch."""
        batch = self._reader(self._pieces[content])
        if isinstance(batch, RunError):
            raise batch
        return batch


class OrderStage(Stage):
    """Knows the order of the samples: row number to `RankKeys`. One actor: orders may be large."""

    def __init__(self, blocks: list[int], config: SourceConfig, first_batch: int) -> None:
        """Set up.

        Args:
            blocks: Of the data, as `Samples` has them.
            config: The source, of any rank.
            first_batch: Global batch of the first rows, counted from the first epoch's first.
        """
        # As for one rank with the whole global batch, in which the ranks' parts are side by side.
        whole = {"rank": 0, "world_size": 1, "device_batch_size": config.global_batch_size}
        self._order = EpochOrder(blocks, config=dataclasses.replace(config, **whole))
        self._batches = functools.lru_cache(maxsize=1)(self._order.batches)
        self._config = config
        self._first_batch = first_batch

    def work(self, content: int) -> RankKeys:
        """Find the keys of a row; ranks take turns."""
        num_ranks, size = self._config.world_size, self._config.device_batch_size
        batch, rank = divmod(self._first_batch * num_ranks + content, num_ranks)
        epoch, number = divmod(batch, self._order.num_samples // self._config.global_batch_size)
        indices = self._batches(epoch)[number, rank * size : (rank + 1) * size]
        return RankKeys(rank, [Key(epoch, index) for index in indices.tolist()])


class DecodeStage(Stage):
    """Reads, decodes and tokenizes: `RankKeys` to `Prepared` images with token ids."""

    def __init__(self, config: SourceConfig, num_samples: int) -> None:
        """Open the source.

        Args:
            config: The source, of any rank.
            num_samples: Of the source, as the ranks have counted them.
        """
        self._config = config
        self._reader_of_rank = functools.cache(self._open)
        _check_same_data(self._reader_of_rank(0).num_samples, num_samples)

    def _open(self, rank: int) -> BatchReader:
        return data.open_batches(dataclasses.replace(self._config, rank=rank))

    def work(self, content: RankKeys) -> Prepared:
        """Read a batch."""
        # Synthetic samples differ by rank, and stored ones do not.
        is_synthetic = self._config.data_format == "synthetic"
        reader = self._reader_of_rank(content.rank if is_synthetic else 0)
        return Prepared(reader.read_good(content.keys), len(content.keys))


def _check_same_data(num_here: int, num_there: int) -> None:
    """Check that this node has as many samples as the ranks."""
    if num_here != num_there:
        raise RunError(
            f"a decoder finds {num_here} samples where the run has found {num_there}: all nodes of "
            "the cluster need the same data at the same place"
        )


def batch_bytes(source: SourceConfig, batch_size: int) -> int:
    """Size of a batch of decoded images with token ids."""
    tensors = SampleType.IMAGES.batch_tensors(source).values()
    return batch_size * sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in tensors)
