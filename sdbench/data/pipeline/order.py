"""The order in which a rank reads samples that can be read by number."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from sdbench.base.errors import ConfigError
from sdbench.data.formats.checks import PLACE_FLAGS
from sdbench.data.source import SourceConfig

# In the state of `StreamedOrder`.
LANES = "lanes"
SIZES_DIGEST = "sizes_digest"


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

    _is_streamed = False

    def __init__(self, blocks: Sequence[int], *, config: SourceConfig) -> None:
        """Set the order up for blocks of these sizes, whose samples are read together."""
        self._blocks = np.asarray(blocks, dtype=np.int64)
        self._config = config
        self._num_resumed = 0
        self._batches = functools.lru_cache(maxsize=1)(self.batches)
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
        first = self._num_resumed // self._config.global_batch_size
        self._num_resumed = 0
        for number in range(first, self.num_samples // self._config.device_batch_size):
            for index in self._batch(self.epoch, number).tolist():
                yield Key(self.epoch, index)

    def _batch(self, epoch: int, number: int) -> np.ndarray:
        """Return the samples of one of this rank's batches."""
        return self._batches(epoch)[number]

    def batches(self, epoch: int) -> np.ndarray:
        """Return the samples of this rank's batches of an epoch: (batches, batch size), int64."""
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
        """Go on with the next epoch: all batches of this one have been delivered."""
        self.epoch += 1

    def state(self, *, num_images: int, is_next_epoch: bool) -> dict[str, Any]:
        """Return what `resume` needs, after `num_images` of the epoch under way or the next one."""
        return {"epoch": self.epoch + is_next_epoch, "num_images": num_images}

    def batch(self, state: dict[str, Any], *, num_epochs: int, number: int) -> list[int]:
        """Compute the samples of a batch of this rank again, `num_epochs` (<= 0) after `state`."""
        return self._batch(state["epoch"] + num_epochs, number).tolist()

    def resume(self, state: dict[str, Any]) -> None:
        """Begin the next epoch where `state` was taken, in an order of the same kind."""
        ways = {True: "shuffled and streamed", False: "by number"}
        if self._is_streamed != (LANES in state):
            raise ConfigError(
                "this run reads its data in another way than the run of the checkpoint",
                value=ways[self._is_streamed],
                allowed=f"{ways[not self._is_streamed]}, as that run began",
                flag="--remote_files or --shuffle",
            )
        self.epoch = state["epoch"]
        self._num_resumed = state["num_images"]


class Lanes(NamedTuple):
    """The processes that share an epoch of streamed files: ranks, and workers of each rank."""

    num_ranks: int
    num_workers: int


class StreamedOrder(EpochOrder):
    """The keys of this rank's samples where files are read from their first byte on.

    An epoch is a line of samples: files in random order, the blocks of each as they are stored, and
    samples in random order within their block. The line is cut into lanes, one for each loading
    process of each rank, and batch b of a rank comes from the lane of its process b modulo their
    number. So a file is read by one process, or by two where a cut goes through it. As in
    `EpochOrder` ranks have equally many whole batches, and the rest of the line is left out.

    The order depends on the numbers of ranks and of processes. A resumed epoch keeps those that it
    began with, so that nothing is repeated or left out; with other numbers its rest is read by
    several processes each.

    Nothing here grows with the number of samples, only with that of blocks.

    Attributes:
        num_lanes: A resumed epoch to the number of lanes that each process of this rank reads in
            turn; of all others it reads one.
    """

    _is_streamed = True

    def __init__(
        self, blocks: Sequence[int], *, num_blocks_of_files: Sequence[int], config: SourceConfig
    ) -> None:
        """Set the order up; see `Samples` for the blocks and their numbers."""
        super().__init__(blocks, config=config)
        self._num_blocks = np.asarray(num_blocks_of_files, dtype=np.int64)
        self._starts = np.cumsum(self._blocks) - self._blocks
        sizes = hashlib.sha256(self._num_blocks.tobytes() + self._blocks.tobytes())
        self._sizes_digest = sizes.hexdigest()[:16]
        self._own_lanes = Lanes(config.world_size, max(config.num_workers, 1))
        self._resumed: tuple[int, Lanes] | None = None
        self.num_lanes: dict[int, int] = {}
        self._keep_permutations(self._own_lanes)
        self._line = functools.lru_cache(maxsize=1)(self._make_line)

    def state(self, *, num_images: int, is_next_epoch: bool) -> dict[str, Any]:
        """Return what `resume` needs."""
        state = super().state(num_images=num_images, is_next_epoch=is_next_epoch)
        lanes = list(self._lanes(state["epoch"]))
        return {**state, LANES: lanes, SIZES_DIGEST: self._sizes_digest}

    def resume(self, state: dict[str, Any]) -> None:
        """Begin the next epoch where `state` was taken."""
        super().resume(state)
        if state.get(SIZES_DIGEST) != self._sizes_digest:
            raise ConfigError(
                "the checkpoint has a position in streamed files of other sizes, or in other files",
                value=f"sizes with the digest {self._sizes_digest}",
                allowed=f"those that the run began with (digest {state.get(SIZES_DIGEST)}), or a "
                "new run on these by --init_from and another --run_name",
                flag=f"--tar_sizes or {PLACE_FLAGS}",
            )
        if state["num_images"]:  # else the epoch has not begun
            lanes = Lanes(*state[LANES])
            self._resumed = self.epoch, lanes
            self._keep_permutations(lanes)
            # A process makes each n-th batch, so it meets these workers' lanes of a rank.
            own = self._own_lanes.num_workers
            num_workers = lanes.num_workers // math.gcd(lanes.num_workers, own)
            self.num_lanes = {self.epoch: len(self._ranks_of_batch(lanes)) * num_workers}

    def _keep_permutations(self, lanes: Lanes) -> None:
        """Cache the permutations of the blocks in the lanes of this rank: a block may be large."""
        # Behind a resumed epoch this run's own lanes have theirs there.
        both = (lanes, self._own_lanes)
        num_lanes = max(len(self._ranks_of_batch(one)) * one.num_workers for one in both)
        self._permutation = functools.lru_cache(maxsize=num_lanes)(self._permute)

    def _permute(self, epoch: int, block: int) -> np.ndarray:
        generator = np.random.default_rng([self._config.seed, epoch, block])
        return generator.permutation(self._blocks[block])

    def _ranks_of_batch(self, lanes: Lanes) -> range:
        """Return the lanes' ranks whose samples this rank's part of a global batch has."""
        size = self._config.global_batch_size // lanes.num_ranks
        first = self._config.rank * self._config.device_batch_size
        return range(first // size, -(-(first + self._config.device_batch_size) // size))

    def _lanes(self, epoch: int) -> Lanes:
        if self._resumed is not None and self._resumed[0] == epoch:
            return self._resumed[1]
        return self._own_lanes

    def _batch(self, epoch: int, number: int) -> np.ndarray:
        """Return the samples of one of this rank's batches."""
        config = self._config
        lanes = self._lanes(epoch)
        num_batches = self.num_samples // config.device_batch_size
        size = config.global_batch_size // lanes.num_ranks
        turn, worker = divmod(number, lanes.num_workers)
        # Batches of the lanes before, of this rank's.
        num_before = sum(-(-(num_batches - other) // lanes.num_workers) for other in range(worker))
        parts = []
        # This rank's part of the global batch, which the lanes' ranks may have cut elsewhere.
        first = config.rank * config.device_batch_size
        end = first + config.device_batch_size
        for rank in self._ranks_of_batch(lanes):
            begin = (rank * num_batches + num_before + turn) * size
            within = range(max(first - rank * size, 0), min(end - rank * size, size))
            parts.append(self._samples(epoch, begin + within.start, begin + within.stop))
        return np.concatenate(parts)

    def _samples(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """Return the samples at some places of an epoch's line."""
        blocks, ends = self._line(epoch)
        first, last = np.searchsorted(ends, [begin, end - 1], side="right").tolist()
        parts = []
        for place in range(first, last + 1):
            block = int(blocks[place])
            size = int(self._blocks[block])
            start = int(ends[place]) - size
            shuffled = self._permutation(epoch, block)
            parts.append(self._starts[block] + shuffled[max(begin - start, 0) : end - start])
        return np.concatenate(parts)

    def _make_line(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks of an epoch's line, and for each the place after its last sample."""
        generator = np.random.default_rng([self._config.seed, epoch])
        files = generator.permutation(len(self._num_blocks))
        firsts = np.cumsum(self._num_blocks) - self._num_blocks
        counts = self._num_blocks[files]
        # Of each file in turn: its first block, the next, and so on.
        offsets = np.repeat(firsts[files] - (np.cumsum(counts) - counts), counts)
        blocks = offsets + np.arange(len(offsets))
        return blocks, np.cumsum(self._blocks[blocks])
