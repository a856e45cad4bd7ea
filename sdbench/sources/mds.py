"""How does a trainer read an MDS data set of images and captions, and notice when it cannot?

Streaming gives each rank its share by the environment variables RANK, WORLD_SIZE, LOCAL_RANK and
LOCAL_WORLD_SIZE, which every launcher sets, not by arguments.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from streaming import Stream, StreamingDataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, SHM_TO_CLEAN
from streaming.base.dataset import _ShardState
from streaming.base.distributed import get_local_rank, get_world_size, maybe_init_dist
from streaming.base.world import World

from sdbench.errors import RunError
from sdbench.sources.checks import check_enough_samples, locate_mds
from sdbench.sources.config import SourceConfig
from sdbench.sources.loader import CheckedLoader
from sdbench.sources.tokenizer import CaptionTokenizer
from sdbench.sources.transforms import decode_image, to_float

SHARED_MEMORY_FOLDER = Path("/dev/shm")


class StreamingImageCaptionDataset(StreamingDataset):
    """Shuffled images and captions of this rank, from MDS columns ``jpg`` and ``caption``.

    An epoch has the largest whole number of global batches, so that all ranks get different
    samples and equally many (Streaming would repeat some); each epoch leaves out others.
    """

    def __init__(
        self,
        *,
        remote: str | None,
        local: str,
        config: SourceConfig,
        tokenizer: CaptionTokenizer,
    ) -> None:
        """Read the index and register with the other ranks of this machine.

        Args:
            remote: Where shards are downloaded from, or None to read `local` in place.
            local: Where shards lie or are kept.
            config: Batch size, image size, seed and the like.
            tokenizer: Turns a caption into token ids.

        Raises:
            ConfigError: The data set has fewer samples than one global batch.
        """
        assert config.world_size == get_world_size(), "Streaming shards by the environment"
        self.image_size = config.image_size
        self.image_dtype = config.image_dtype
        self.tokenizer = tokenizer
        joined_here = maybe_init_dist()
        remove_stale_shared_memory()
        # What is read in place cannot be downloaded again: trying would delay the error.
        num_attempts = 1 if remote is None else 2
        stream = Stream(
            remote=remote, local=local, download_retry=num_attempts, download_timeout=60
        )
        num_samples = sum(map(len, stream.get_shards(World.detect(), False)))
        check_enough_samples(config, num_samples=num_samples)
        super().__init__(
            streams=[stream],
            epoch_size=num_samples // config.global_batch_size * config.global_batch_size,
            batch_size=config.device_batch_size,
            shuffle=True,
            shuffle_seed=config.seed,
        )
        if joined_here:
            torch.distributed.destroy_process_group()

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, torch.Tensor]:
        """Read, decode and tokenize one sample.

        Returns:
            ``{image: (3, S, S) uint8 or float32, input_ids: (77,) int64}``.

        Raises:
            RunError: The sample cannot be read; its shard is named.
        """
        try:
            sample = super().get_item(sample_id, retry)
            image = decode_image(sample["jpg"], image_size=self.image_size)
        except Exception as error:
            raise RunError(self._describe_failure(sample_id, error)) from error
        if self.image_dtype == "float32":
            image = to_float(image)
        input_ids: np.ndarray = self.tokenizer(sample["caption"])
        return {"image": torch.from_numpy(image), "input_ids": torch.from_numpy(input_ids)}

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Make a shard available, so that a failure reaches the one who waits for the sample.

        Streaming calls this from background threads too (`blocking` is False there), where an
        exception ends the epoch early without a word and leaves the shard marked as being
        prepared, so that other workers wait for ever. Marked as present instead, the shard's file
        is missed by whoever reads the sample: `get_item` then calls here again, and raises.
        """
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception:
            self._shard_states[shard_id] = _ShardState.LOCAL
            if blocking:
                raise

    def _describe_failure(self, sample_id: int, error: Exception) -> str:
        shard_id, _ = self.spanner[sample_id]
        raw_file, _ = self.shards[shard_id].file_pairs[0]
        path = Path(self.streams[0].local, raw_file.basename)
        on_disk = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
        reason = " ".join(str(error).split())
        return (
            f"Sample {sample_id} cannot be read from shard {path} (on disk: {on_disk}; "
            f"{raw_file.bytes} bytes by the index): {type(error).__name__}: {reason}"
        )


def remove_stale_shared_memory() -> None:
    """Remove what killed runs left behind, which would stop this one.

    Streaming refuses a cache folder that a registration in shared memory names, even when the run
    that registered it is dead. Its own `clean_stale_shared_memory` removes those of living runs as
    well; here a registration is stale only when no process on this machine has it mapped. Local
    rank 0 does it, before any rank looks, and the others wait. Linux only: elsewhere shared memory
    is not visible as files, and nothing is removed. Processes of other containers that share
    /dev/shm cannot be seen: give each container its own.
    """
    if get_local_rank() == 0 and SHARED_MEMORY_FOLDER.is_dir():
        pattern = re.compile(rf"(\d{{6}})_({'|'.join(SHM_TO_CLEAN)})")
        in_use = mapped_prefixes()
        for path in SHARED_MEMORY_FOLDER.iterdir():
            match = pattern.fullmatch(path.name)
            if match and match[1] not in in_use and path.stat().st_uid == os.getuid():
                path.unlink(missing_ok=True)
                for name in (BARRIER_FILELOCK, CACHE_FILELOCK):
                    Path(tempfile.gettempdir(), f"{match[1]}_{name}").unlink(missing_ok=True)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def mapped_prefixes() -> set[str]:
    """The six-digit prefixes of Streaming's shared memory that living processes have mapped."""
    prefixes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            # The process has ended meanwhile, or is another user's, whose files we leave alone.
            continue
        prefixes.update(re.findall(rf"{SHARED_MEMORY_FOLDER}/(\d{{6}})_", text))
    return prefixes


def build(config: SourceConfig) -> CheckedLoader:
    """Build the loader of `sources.build` for an MDS data set."""
    remote, local = locate_mds(remote=config.remote, local=config.local)
    tokenizer = CaptionTokenizer(folder=config.tokenizer_folder, pad_token_id=config.pad_token_id)
    dataset = StreamingImageCaptionDataset(
        remote=remote, local=local, config=config, tokenizer=tokenizer
    )
    return CheckedLoader(dataset, config=config)
