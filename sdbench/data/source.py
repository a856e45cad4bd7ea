"""`SourceConfig`, which describes a data source, and the sizes that all architectures share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# CLIP's context length and vocabulary, as every architecture of this suite uses them
# (`max_position_embeddings` and `vocab_size` of the text encoders of SD 1 and SD 2).
NUM_TOKENS = 77
VOCABULARY_SIZE = 49408
BOS_TOKEN_ID = 49406
EOS_TOKEN_ID = 49407
# The VAE divides each side by 8 and gives 4 channels of means and 4 of log-variances.
VAE_FACTOR = 8
NUM_LATENT_CHANNELS = 4

# The length that MosaicML's diffusion-benchmark gives its synthetic data set: with its global
# batch of 2,048 an epoch has 48 full batches.
NUM_SYNTHETIC_IMAGES = 100_000


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Everything `data.check` and `data.build` need.

    Attributes:
        data_format: A name of `data.SOURCES`.
        image_size: Side of the square images, in pixels.
        latents: ``online`` (images and token ids) or ``precomputed`` (VAE moments or latents, and
            text embeddings).
        device_batch_size: Images per batch of one rank.
        rank: This process's rank among all ranks.
        world_size: Number of ranks.
        seed: Decides order, crops, flips and dropped captions; with synthetic data the samples.
        num_workers: Loader processes of this rank; 0 loads in the training process.
        prefetch_factor: Batches that each worker prepares in advance.
        remote: Where the data is: a folder, a URL, tars in braces, ``pipe:`` and a command.
        local: Where the data is, or where copies of what `remote` names are kept.
        streams: Several MDS data sets and what share of the samples comes from each:
            ``PLACE=PROPORTION,...``; instead of `remote`.
        shuffle: Whether each epoch has an order of its own; else it is the stored one.
        image_dtype: ``uint8`` (the model brings pixels to [-1, 1] on the device) or ``float32``
            (the workers send [-1, 1], four times the bytes).
        pin_memory: Whether batches are copied to page-locked memory, for asynchronous transfer.
        tokenizer_folder: Folder of a CLIP tokenizer, or None for the vocabulary that we carry.
        pad_token_id: Fills captions up to 77 tokens: 0 for SD 2, 49407 for SD 1.
        text_embedding_dim: Width of the text encoder; used by precomputed latents alone.
        num_images: Length of an epoch of synthetic data; None for `NUM_SYNTHETIC_IMAGES`.
        crop: ``center`` or ``random``: where the largest square is cut out.
        horizontal_flip_probability: Share of images that are mirrored.
        caption_drop_probability: Share of captions that become the empty text, as classifier-free
            guidance needs it.
        filters: Field of a WebDataset sample's json to a condition, e.g. ``pwatermark``:
            ``<=0.5``; samples that fail it, or lack the field, are left out.
        class_prompts: JSON file that maps a class number (WebDataset member ``cls``) to a caption.
        on_bad_sample: ``error``, or ``skip``: another sample of the batch takes the place.
        max_bad_fraction: Share of bad samples above which ``skip`` gives up.
        missing_latents: ``error``, or ``leave_out``: an epoch has those MDS samples alone that have
            a latent of `image_size`.
        data_timeout_s: Silence after which the loader is taken for stuck.
        validate_hash: ``auto`` (the cheapest that an MDS index has), ``none``, or its name.
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
    streams: str | None = None
    shuffle: bool = True
    image_dtype: str = "uint8"
    pin_memory: bool = False
    tokenizer_folder: Path | None = None
    pad_token_id: int = 0
    text_embedding_dim: int = 1024
    num_images: int | None = None
    crop: str = "center"
    horizontal_flip_probability: float = 0.0
    caption_drop_probability: float = 0.0
    filters: Mapping[str, str] = field(default_factory=dict)
    class_prompts: str | None = None
    on_bad_sample: str = "error"
    max_bad_fraction: float = 0.01
    missing_latents: str = "error"
    data_timeout_s: float = 300.0
    validate_hash: str = "auto"

    @property
    def wants_latents(self) -> bool:
        """Whether samples are latents with text embeddings, not images with captions."""
        return self.latents == "precomputed"

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
