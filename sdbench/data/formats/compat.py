"""Subclasses of Streaming's classes that copy shards safely and raise when a copy fails.

They override private methods, as read in mosaicml-streaming 0.13.0. No other module touches a
private name of that package.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from pathlib import Path
from typing import Any
from unittest import mock

import streaming
import torch
from filelock import FileLock
from streaming import Stream, StreamingDataset
from streaming.base import constant
from streaming.base.dataset import _ShardState
from streaming.base.distributed import get_local_rank, maybe_init_dist
from streaming.base.format import FileInfo
from streaming.base.format.mds.reader import MDSReader
from streaming.base.shared import prefix
from streaming.base.world import World

from sdbench.base import shared_memory
from sdbench.base.cache import private_folder
from sdbench.base.packages import INSTALL

assert {*shared_memory.SHARED_NAMES} == {constant.LOCALS, *constant.SHM_TO_CLEAN}
assert {*shared_memory.LOCK_NAMES} == {constant.BARRIER_FILELOCK, constant.CACHE_FILELOCK}


def open_shards(stream: Stream) -> list[MDSReader]:
    """Return the shards of a data set; its index is fetched if it is not here yet."""
    return stream.get_shards(World.detect(), False)


class CheckedStream(Stream):
    """A Stream that several runs may copy at the same time, and that removes damaged copies."""

    def set_up_local(self, shards: list[MDSReader], cache_usage_per_shard: Any) -> None:
        """Report which shards are present."""
        # In a folder that is read in place, Streaming's own method would delete decompressed shards
        # whose compressed form is missing.
        if self.remote not in (None, self.local):
            super().set_up_local(shards, cache_usage_per_shard)
            return
        for number, shard in enumerate(shards):
            path = Path(self.local, self.split, shard.raw_data.basename)
            cache_usage_per_shard[number] = shard.raw_data.bytes if path.is_file() else 0

    def prepare_shard(self, shard: MDSReader) -> int:
        """Make a shard present; returns the change of the cache's size in bytes."""
        # All processes share the name of Streaming's temporary file. The lock names the host:
        # machines that share a home may each have their own disk at this path.
        path = Path(self.local, self.split, shard.raw_data.basename).absolute()
        digest = hashlib.sha256(f"{os.uname().nodename}\n{path}".encode()).hexdigest()
        with FileLock(private_folder("locks") / f"{digest[:12]}.lock", mode=0o600):
            return super().prepare_shard(shard)

    def _decompress_shard_part(
        self, zip_info: FileInfo, zip_filename: str, raw_filename: str, compression: str | None
    ) -> None:
        try:
            super()._decompress_shard_part(zip_info, zip_filename, raw_filename, compression)
        except Exception as error:
            # The next run would use the rest of this file, complete or not.
            if not self.safe_keep_zip:
                Path(zip_filename).unlink(missing_ok=True)
            raise ValueError(f"{zip_info.basename}: {error}") from error


class CheckedStreamingDataset(StreamingDataset):
    """A StreamingDataset whose failed copies raise in the process that reads the sample."""

    def __init__(self, **options: Any) -> None:
        self.epoch = 0  # the one that this process has begun
        self._prepared: set[int] = set()
        joined_here = maybe_init_dist()
        # Local rank 0 cleans up while the others wait.
        if get_local_rank() == 0:
            shared_memory.remove_stale_shared_memory()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
        with mock.patch.object(prefix, "_each_prefix_int", lambda: iter(shared_memory.numbers())):
            super().__init__(**options)
        if joined_here:
            torch.distributed.destroy_process_group()

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Make a shard available.

        Streaming also calls this from background threads, with `blocking` False. An exception there
        ends the epoch early without a message and leaves the shard marked as being prepared, so
        other workers wait forever. Such a shard is therefore marked as present: the process that
        reads a sample finds no file, calls this again, and raises.
        """
        # Streaming takes a file lock for each sample it looks ahead, which halves the rate of
        # latents.
        if shard_id in self._prepared and not blocking:
            return
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception:
            self._shard_states[shard_id] = _ShardState.LOCAL
            if blocking:
                raise
        else:
            if self._shard_states[shard_id] == _ShardState.LOCAL:
                self._prepared.add(shard_id)

    def _resume_incr_epoch(self) -> tuple[int, int]:
        # Each worker calls it as it begins an epoch; `next_epoch` may be a step ahead or behind.
        self.epoch, num_samples = super()._resume_incr_epoch()
        return self.epoch, num_samples


def check_overridden() -> None:
    """Raise an ImportError if an overridden method takes other arguments in Streaming."""
    for ours in (
        CheckedStream.set_up_local,
        CheckedStream.prepare_shard,
        CheckedStream._decompress_shard_part,
        CheckedStreamingDataset.prepare_shard,
        CheckedStreamingDataset._resume_incr_epoch,
    ):
        kind, name = ours.__qualname__.removeprefix("Checked").split(".")
        theirs = getattr(getattr(streaming, kind), name, None)
        wanted = [*inspect.signature(ours).parameters]
        found = theirs and [*inspect.signature(theirs).parameters]
        if found != wanted:
            raise ImportError(
                f"{kind}.{name} of the installed mosaicml-streaming takes {found}, not {wanted}: "
                f"{INSTALL}"
            )


check_overridden()
