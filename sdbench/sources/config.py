"""What does a data source have to know, and what did the user ask for?

Importable without torch, so that a wrong flag is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# CLIP's context length and vocabulary, as every architecture of this suite uses them
# (`max_position_embeddings` and `vocab_size` of the text encoders of SD 1 and SD 2).
NUM_TOKENS = 77
VOCABULARY_SIZE = 49408
BOS_TOKEN_ID = 49406
EOS_TOKEN_ID = 49407

# The length that MosaicML's diffusion-benchmark gives its synthetic data set: with its global
# batch of 2,048 an epoch has 48 full batches.
NUM_SYNTHETIC_IMAGES = 100_000


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Everything `sources.check` and `sources.build` need.

    Attributes:
        data_format: A name of `sources.SOURCES`: ``synthetic`` or ``mds``.
        image_size: Side of the square images, in pixels.
        latents: ``online`` (images and token ids) or ``precomputed`` (VAE moments and text
            embeddings; synthetic only).
        device_batch_size: Images per batch of one rank.
        rank: This process's rank among all ranks.
        world_size: Number of ranks.
        seed: Decides the samples and their order, together with the rank.
        num_workers: Loader processes of this rank; 0 loads in the training process.
        prefetch_factor: Batches that each worker prepares in advance.
        remote: Folder or URL of an MDS data set.
        local: Folder of an MDS data set, or of its cache when `remote` is given too.
        image_dtype: ``uint8`` (the model brings pixels to [-1, 1] on the device) or ``float32``
            (the workers send [-1, 1], four times the bytes).
        pin_memory: Whether batches are copied to page-locked memory, for asynchronous transfer.
        tokenizer_folder: Folder of a CLIP tokenizer, or None for the vocabulary that we carry.
        pad_token_id: Fills captions up to 77 tokens: 0 for SD 2, 49407 for SD 1.
        text_embedding_dim: Width of the text encoder; used by precomputed latents alone.
        num_images: Length of an epoch of synthetic data; None for `NUM_SYNTHETIC_IMAGES`.
    """

    data_format: str
    image_size: int
    device_batch_size: int
    seed: int
    latents: str = "online"
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    prefetch_factor: int = 2
    remote: str | None = None
    local: str | None = None
    image_dtype: str = "uint8"
    pin_memory: bool = False
    tokenizer_folder: Path | None = None
    pad_token_id: int = 0
    text_embedding_dim: int = 1024
    num_images: int | None = None

    @property
    def global_batch_size(self) -> int:
        """Images per batch of all ranks together."""
        return self.device_batch_size * self.world_size

    def loader_options(self) -> dict[str, object]:
        """The options of a torch `DataLoader` that every source sets in the same way."""
        options = {
            "batch_size": self.device_batch_size,
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "drop_last": True,
        }
        if self.num_workers:
            # torch refuses both of them without workers.
            options |= {"prefetch_factor": self.prefetch_factor, "persistent_workers": True}
        return options
