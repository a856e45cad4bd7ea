"""`KeyStream`: the order of MDS data that Streaming decides, which downloads ahead.

Streaming takes the rank from the environment variables RANK, WORLD_SIZE, LOCAL_RANK and
LOCAL_WORLD_SIZE, which every launcher sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streaming.base.batching import generate_work
from streaming.base.world import World

from sdbench.data.formats.compat import CheckedStreamingDataset, open_shards
from sdbench.data.formats.mds_shards import MdsSamples, make_streams
from sdbench.data.order.epochs import Key
from sdbench.data.source import SourceConfig


class KeyStream(CheckedStreamingDataset):
    """The keys of this rank's samples in Streaming's order, with shards downloaded ahead.

    An epoch is cut to whole global batches, so that all ranks get different samples and equally
    many (Streaming would repeat some); each epoch leaves out others. It is an `Order`.
    """

    num_lanes: Mapping[int, int] = {}

    def __init__(self, *, config: SourceConfig) -> None:
        """Read the indexes and register with the other ranks of this machine."""
        assert config.world_size == World.detect().num_ranks, "Streaming shards by the environment"
        self._has_ended = False
        streams = make_streams(config)
        num_samples = sum(len(shard) for stream in streams for shard in open_shards(stream))
        super().__init__(
            streams=streams,
            epoch_size=num_samples // config.global_batch_size * config.global_batch_size,
            batch_size=config.device_batch_size,
            shuffle=config.shuffle,
            shuffle_seed=config.seed,
        )
        stream_of_shard = (streams[number] for number in self.stream_per_shard)
        shards = list(zip(stream_of_shard, self.shards, strict=True))
        self.samples = MdsSamples(shards, config=config, prepare=self.prepare_shard)

    def __getitem__(self, index: int) -> Key:
        return Key(self.epoch, int(index))

    def for_torch(self) -> tuple[KeyStream, None]:
        """Return the stream itself, which torch iterates over."""
        return self, None

    def epoch_ended(self) -> None:
        """Note the end of the epoch: Streaming counts epochs when they begin."""
        self._has_ended = True

    def state(self, *, num_images: int, is_next_epoch: bool) -> dict[str, Any]:
        """Return what `resume` needs, as `Order` says."""
        state = self.state_dict(num_images, True)
        if is_next_epoch or (self._has_ended and not num_images):
            state["epoch"] = self.next_epoch
        return {"num_images": num_images, "streaming": state}

    def batch(self, state: dict[str, Any], number: int) -> list[int]:
        """Compute them as `Order` says."""
        num_epochs, number = divmod(number, len(self) // self.batch_size)
        # Streaming's order does not depend on the workers, and starts anew where an epoch is
        # resumed. It depends on attributes that `state_dict`, which has been called, sets.
        world = World.detect()
        epoch = state["streaming"]["epoch"] + num_epochs
        num_samples = number * self.batch_size * world.num_ranks
        work = generate_work(self.batching_method, self, world, epoch, num_samples)
        return work[world.node, world.rank_of_node, 0, 0].tolist()

    def resume(self, state: dict[str, Any]) -> None:
        """Begin as `Order` says."""
        self.load_state_dict(state["streaming"])
