"""The order in which a rank reads samples that can be read by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from sdbench.data.source import SourceConfig


class Key(NamedTuple):
    """Which sample, and in which epoch: together they decide its crop, flip and dropped caption."""

    epoch: int
    index: int


class Keys(Dataset):
    """A data set whose samples are their own keys: they are read batch by batch, when collated."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, key: Key) -> Key:
        return key


class EpochOrder(DistributedSampler):
    """The keys of this rank's samples, an epoch at a time.

    All ranks compute the same order and each takes its part of every global batch, so that all have
    equally many whole batches, no two share a sample, and a global batch is the same for any number
    of ranks. What is left of the last global batch is left out; it differs by epoch.

    Shuffled, blocks come in random order and samples in random order within their block: neighbours
    of a row group are decoded together. One block of all samples gives a full shuffle.

    It is a `DistributedSampler` because Composer insists on one where there are several ranks.
    """

    def __init__(self, blocks: Sequence[int], *, config: SourceConfig) -> None:
        """Set the order up.

        Args:
            blocks: Sizes of the runs of neighbours that are read together.
            config: Batch size, ranks, seed and whether to shuffle.
        """
        self._blocks = np.asarray(blocks, dtype=np.int64)
        self._config = config
        self._num_resumed = 0
        num_samples = int(self._blocks.sum())
        super().__init__(
            range(num_samples),
            num_replicas=config.world_size,
            rank=config.rank,
            shuffle=config.shuffle,
            seed=config.seed,
            drop_last=True,
        )
        # DistributedSampler would round to ranks; here an epoch is whole global batches.
        self.num_samples = num_samples // config.global_batch_size * config.device_batch_size

    def __iter__(self) -> Iterator[Key]:
        num_done = self._num_resumed // self._config.global_batch_size
        self._num_resumed = 0
        for index in self.batches(self.epoch)[num_done:].ravel().tolist():
            yield Key(self.epoch, index)

    def batches(self, epoch: int) -> np.ndarray:
        """The samples of this rank's batches of an epoch: (batches, batch size), int64."""
        batches = self._order(epoch)[: self.num_samples * self._config.world_size].reshape(
            -1, self._config.world_size, self._config.device_batch_size
        )
        return batches[:, self._config.rank]

    def _order(self, epoch: int) -> np.ndarray:
        if not self._config.shuffle:
            return np.arange(self._blocks.sum())
        generator = np.random.default_rng([self._config.seed, epoch])
        starts = np.cumsum(self._blocks) - self._blocks
        return np.concatenate(
            [
                starts[block] + generator.permutation(self._blocks[block])
                for block in generator.permutation(len(self._blocks))
            ]
        )

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: Composer calls it with a count that begins at 0 after a resume."""

    def epoch_ended(self) -> None:
        """Go on with the next epoch."""
        self.epoch += 1

    def state(self, *, num_images: int, is_next_epoch: bool) -> dict[str, int]:
        """What `resume` needs, as `loader.Order.state` says."""
        return {"epoch": self.epoch + is_next_epoch, "num_images": num_images}

    def batch(self, state: dict[str, int], *, num_epochs: int, number: int) -> list[int]:
        """The samples of a batch, as `loader.Order.batch` says."""
        return self.batches(state["epoch"] + num_epochs)[number].tolist()

    def resume(self, state: dict[str, int]) -> None:
        """Begin the next epoch where `state` was taken."""
        self.epoch = state["epoch"]
        self._num_resumed = state["num_images"]
