"""`Order`, which samples a rank reads and when, and the orders of samples read by number."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import Dataset, DistributedSampler, Sampler

from sdbench.base.errors import ConfigError
from sdbench.data.buckets import Mixture
from sdbench.data.checks import PLACE_FLAGS
from sdbench.data.samples import Samples
from sdbench.data.source import SourceConfig


class Key(NamedTuple):
    """Which sample, and in which epoch: together they decide its crop, flip and dropped caption."""

    epoch: int
    index: int


def keys_of_first_epoch(indices: Iterable[int]) -> list[Key]:
    """Return the keys of samples as the first epoch of a run sees them."""
    return [Key(0, index) for index in indices]


class Order(Protocol):
    """The keys of this rank's samples, an epoch at a time: all that the loader knows of them.

    All ranks have equally many keys, and whole batches of them.

    Attributes:
        num_lanes: Maps a resumed epoch to the number of lanes that each process of this rank reads
            in turn; in other epochs it reads one.
    """

    num_lanes: Mapping[int, int]

    def for_torch(self) -> tuple[Dataset, Sampler[Key] | None]:
        """Return the data set and the sampler that torch's DataLoader draws keys from.

        The sampler is None if the data set is iterated over.
        """

    def epoch_ended(self) -> None:
        """Go on with the next epoch: all batches of this one have been delivered."""

    def state(self, *, num_images: int, is_next_epoch: bool) -> dict[str, Any]:
        """Return what `resume` needs, after `num_images` of the epoch under way or the next one.

        They are counted over all ranks, and the state is the same on every rank.
        """

    def resume(self, state: dict[str, Any]) -> None:
        """Begin the next epoch where `state` was taken; a `ConfigError` if the data differ."""

    def batch(self, state: dict[str, Any], number: int) -> list[int]:
        """Compute the samples of a batch of this rank again.

        `number` counts from the start of the epoch of `state`; below 0 it is one of an earlier one.
        """


class Keys(Dataset):
    """A data set that returns its keys: the collate function reads the samples of a batch."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, key: Key) -> Key:
        return key


class Lanes(NamedTuple):
    """The processes that share an epoch of streamed files: ranks, and workers of each rank."""

    num_ranks: int
    num_workers: int


class EpochOrder(DistributedSampler):
    """The keys of this rank's samples, an epoch at a time.

    An epoch is a line of samples: files in random order, the blocks of each file in stored order,
    and samples shuffled within their block, as neighbours are read together. Where any process may
    read any block, each block counts as a file: one block of all samples is a full shuffle.

    The line is cut into lanes. Streamed files are read from their first byte on, so each loading
    process of each rank has its own lane: process w of W makes the rank's batches w, w + W, and so
    on. A file is thus read by one process, or by two where a cut goes through it. Other samples
    have a single lane of global batches, the same for any number of ranks, and each rank takes its
    part of every batch.

    All ranks have equally many full batches, and no two share a sample. The rest of the line, which
    differs by epoch, is left out. A resumed epoch keeps the lanes that it began with, so nothing is
    repeated or left out; with another number of ranks or workers, several processes may read a
    lane.

    Memory holds the permutations of the current blocks, and arrays with an entry for each block.

    It is an `Order`, and a `DistributedSampler` because Composer requires one with several ranks.
    """

    def __init__(self, samples: Samples, *, config: SourceConfig) -> None:
        self._config = config
        blocks, num_blocks = samples.blocks, samples.num_blocks_of_files
        self._own_lanes = Lanes(1, 1)
        if not config.shuffle:
            blocks, num_blocks = [sum(blocks)], [1]
        elif num_blocks is None:
            num_blocks = [1] * len(blocks)
        else:
            self._own_lanes = Lanes(config.world_size, max(config.num_workers, 1))
        self._blocks = np.asarray(blocks, dtype=np.int64)
        self._num_blocks = np.asarray(num_blocks, dtype=np.int64)
        self._starts = np.cumsum(self._blocks) - self._blocks
        sizes = hashlib.sha256(self._num_blocks.tobytes() + self._blocks.tobytes())
        self._sizes_digest = sizes.hexdigest()[:16]
        self._num_resumed = 0
        self._resumed: tuple[int, Lanes] | None = None
        self.num_lanes: Mapping[int, int] = {}
        self._line = functools.lru_cache(maxsize=1)(self._make_line)
        # A permutation may be large: one is kept for each lane that this rank reads in turn.
        self._permutation = functools.lru_cache(self._own_lanes.num_workers)(self._permute)
        num_samples = int(self._blocks.sum())
        super().__init__(
            range(num_samples),
            num_replicas=config.world_size,
            rank=config.rank,
            shuffle=config.shuffle,
            seed=config.seed,
            drop_last=True,
        )

    def for_torch(self) -> tuple[Keys, EpochOrder]:
        """Return the keys themselves, and this order of them."""
        return Keys(len(self.dataset)), self

    def __len__(self) -> int:
        # DistributedSampler would round to ranks; here an epoch is whole global batches.
        return self.num_batches(self.epoch) * self._config.device_batch_size

    def __iter__(self) -> Iterator[Key]:
        first = self._num_resumed // self._config.global_batch_size
        self._num_resumed = 0
        for number in range(first, self.num_batches(self.epoch)):
            yield from self._keys(self.epoch, number)

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return int(self._blocks.sum()) // self._config.global_batch_size

    def _keys(self, epoch: int, number: int) -> list[Key]:
        """Return this rank's part of a batch of an epoch."""
        return [Key(epoch, index) for index in self._batch(epoch, number).tolist()]

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: Composer calls it with a count that begins at 0 after a resume."""

    def epoch_ended(self) -> None:
        """Go on as `Order` says."""
        self.epoch += 1

    def batch(self, state: dict[str, Any], number: int) -> list[int]:
        """Compute them as `Order` says."""
        epoch = state["epoch"]
        while number < 0:
            epoch -= 1
            number += self.num_batches(epoch)
        return [key.index for key in self._keys(epoch, number)]

    def state(self, *, num_images: int, is_next_epoch: bool) -> dict[str, Any]:
        """Return what `resume` needs, as `Order` says."""
        epoch = self.epoch + is_next_epoch
        return {
            "epoch": epoch,
            "num_images": num_images,
            "lanes": list(self._lanes(epoch)),
            "sizes_digest": self._sizes_digest,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Begin the next epoch where `state` was taken, in an order of the same sizes."""
        digest = state.get("sizes_digest")
        if digest != self._sizes_digest:
            raise ConfigError(
                "the data have other sizes of files, or another order, than those of the "
                "checkpoint",
                value=f"an order with the digest {self._sizes_digest}",
                allowed=f"the files and the order that the run began with (digest {digest}), or a "
                "new run on these by --init_from and another --run_name",
                flag=f"--remote_files, --shuffle, --tar_sizes, --buckets or {PLACE_FLAGS}",
            )
        self.epoch = state["epoch"]
        self._num_resumed = state["num_images"]
        if state["num_images"]:  # else the epoch has not begun
            lanes, num_own = Lanes(*state["lanes"]), self._own_lanes.num_workers
            self._resumed = self.epoch, lanes
            num_lanes = len(self._ranks_of_batch(lanes)) * lanes.num_workers
            self._permutation = functools.lru_cache(max(num_lanes, num_own))(self._permute)
            # A process makes every n-th batch, so it may need only some of the workers' lanes.
            self.num_lanes = {self.epoch: num_lanes // math.gcd(lanes.num_workers, num_own)}

    def _ranks_of_batch(self, lanes: Lanes) -> range:
        """Return the ranks of `lanes` whose samples are in this rank's part of a global batch."""
        size = self._config.global_batch_size // lanes.num_ranks
        first = self._config.rank * self._config.device_batch_size
        return range(first // size, -(-(first + self._config.device_batch_size) // size))

    def _lanes(self, epoch: int) -> Lanes:
        if self._resumed is not None and self._resumed[0] == epoch:
            return self._resumed[1]
        return self._own_lanes

    def _batch(self, epoch: int, number: int) -> np.ndarray:
        lanes, num_own = self._lanes(epoch), self._config.device_batch_size
        num_batches = self.num_batches(epoch)
        size = self._config.global_batch_size // lanes.num_ranks
        turn, worker = divmod(number, lanes.num_workers)
        # Batches in the earlier lanes of a rank.
        num_before = sum(-(-(num_batches - other) // lanes.num_workers) for other in range(worker))
        parts = []
        # This rank's part of the global batch, which the ranks of `lanes` may have cut elsewhere.
        first = self._config.rank * num_own
        for rank in self._ranks_of_batch(lanes):
            begin = (rank * num_batches + num_before + turn) * size
            within = range(size)[max(first - rank * size, 0) : first + num_own - rank * size]
            parts.append(self._samples(epoch, begin + within.start, begin + within.stop))
        return np.concatenate(parts)

    def _samples(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """Return the samples from place `begin` to before `end` of an epoch's line."""
        if not self._config.shuffle:
            return np.arange(begin, end)
        blocks, ends = self._line(epoch)
        first, last = np.searchsorted(ends, [begin, end - 1], side="right").tolist()
        parts = []
        for place in range(first, last + 1):
            block = int(blocks[place])
            start = int(ends[place] - self._blocks[block])
            shuffled = self._permutation(epoch, block)
            parts.append(self._starts[block] + shuffled[max(begin - start, 0) : end - start])
        return np.concatenate(parts)

    def _permute(self, epoch: int, block: int) -> np.ndarray:
        generator = np.random.default_rng([self._config.seed, epoch, block])
        return generator.permutation(self._blocks[block])

    def _make_line(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks of an epoch's line, and for each the place after its last sample."""
        generator = np.random.default_rng([self._config.seed, epoch])
        files = generator.permutation(len(self._num_blocks))
        firsts = np.cumsum(self._num_blocks) - self._num_blocks
        counts = self._num_blocks[files]
        # The blocks of each file, in stored order.
        offsets = np.repeat(firsts[files] - (np.cumsum(counts) - counts), counts)
        blocks = offsets + np.arange(len(offsets))
        return blocks, np.cumsum(self._blocks[blocks])


class BucketOrder(EpochOrder):
    """The keys of this rank's samples, each global batch of one bucket.

    The samples of a bucket are a line without end, one epoch after the other, each in the order of
    `EpochOrder`, or as stored if an epoch has less than a batch of them. It is cut into global
    batches: what does not fill the last one of an epoch begins the first one of the next. So each
    sample comes once an epoch, and the epochs of a run differ in their numbers of batches. Batches
    of all buckets come in the order in which a reader of the whole line would have filled them. A
    run begins with one batch of each bucket that has one in the first epoch, so that their code is
    compiled, and memory for the largest is found, before much is done.

    It is the same for any number of ranks and workers.
    """

    def __init__(self, samples: Samples, mixture: Mixture, *, config: SourceConfig) -> None:
        self._mixture = mixture
        self._counts = mixture.counts
        self._epoch_lines = functools.lru_cache(maxsize=2)(self._make_epoch_lines)
        self._members = [
            np.flatnonzero(mixture.bucket_of == bucket) for bucket in range(len(self._counts))
        ]
        self._epoch_batches = functools.lru_cache(maxsize=1)(self._make_epoch_batches)
        super().__init__(samples, config=config)
        self._sizes_digest = hashlib.sha256(
            self._sizes_digest.encode()
            + mixture.bucket_of.tobytes()
            + repr(mixture.shapes).encode()
        ).hexdigest()[:16]

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        size = self._config.global_batch_size
        before, after = (
            self._mixture.num_batches(number, batch_size=size) for number in (epoch, epoch + 1)
        )
        return after - before

    def _keys(self, epoch: int, number: int) -> list[Key]:
        first = self._config.rank * self._config.device_batch_size
        mine = slice(first, first + self._config.device_batch_size)
        keys = self._epoch_batches(epoch)[number, mine]
        return [Key(*key) for key in keys.tolist()]

    def _make_epoch_lines(self, epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each bucket its samples in order, and their places in the epoch's line."""
        line = self._samples(epoch, 0, int(self._blocks.sum()))
        buckets = self._mixture.bucket_of[line]
        places = [np.flatnonzero(buckets == bucket) for bucket in range(len(self._counts))]
        return [
            (members if self._is_small(bucket) else line[of_bucket], of_bucket)
            for bucket, (members, of_bucket) in enumerate(zip(self._members, places, strict=True))
        ]

    def _is_small(self, bucket: int) -> bool:
        return self._counts[bucket] < self._config.global_batch_size

    def _make_epoch_batches(self, epoch: int) -> np.ndarray:
        """Return the keys of the global batches of an epoch, (N, B, 2)."""
        size = self._config.global_batch_size
        batches, ends = [], []
        for bucket, (samples, places) in enumerate(self._epoch_lines(epoch)):
            carried = self._carried(epoch, bucket)
            own = np.stack([np.full(len(samples), epoch), samples], axis=1)
            keys = np.concatenate([carried, own])
            num = len(keys) // size
            batches.append(keys[: num * size].reshape(num, size, 2))
            ends.append(places[np.arange(1, num + 1) * size - len(carried) - 1])
        order = np.argsort(np.concatenate(ends))
        if epoch == 0:
            buckets = np.repeat(range(len(batches)), list(map(len, batches)))[order]
            _, firsts = np.unique(buckets, return_index=True)
            firsts.sort()
            order = np.concatenate([order[firsts], np.delete(order, firsts)])
        return np.concatenate(batches)[order]

    def _carried(self, epoch: int, bucket: int) -> np.ndarray:
        """Return the keys of a bucket that earlier epochs have left over, (N, 2)."""
        missing = epoch * self._counts[bucket] % self._config.global_batch_size
        parts = [np.empty((0, 2), dtype=np.int64)]
        while missing:
            epoch -= 1
            # A batch of a small bucket may reach back over many epochs, which need no line.
            is_small = self._is_small(bucket)
            samples = self._members[bucket] if is_small else self._epoch_lines(epoch)[bucket][0]
            left = samples[-missing:]
            parts.insert(0, np.stack([np.full(len(left), epoch), left], axis=1))
            missing -= len(left)
        return np.concatenate(parts)


def make_order(samples: Samples, mixture: Mixture | None, *, config: SourceConfig) -> Order:
    """Choose the order of samples that are read by number: with buckets, each batch is of one."""
    if mixture is None:
        return EpochOrder(samples, config=config)
    return BucketOrder(samples, mixture, config=config)
