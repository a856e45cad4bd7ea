"""`SourceConfig`, which describes a data source, and the sizes that all architectures share."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from sdbench.base.conditions import STABLE_DIFFUSION_2, ModelInputs
from sdbench.base.shape import Shape
from sdbench.data.buckets import Buckets, Mixture
from sdbench.ranks.launcher import run_began_s
from sdbench.settings.data import DataSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# CLIP's vocabulary: `vocab_size` of the text encoders.
VOCABULARY_SIZE = 49408
BOS_TOKEN_ID = 49406
EOS_TOKEN_ID = 49407
# The VAE divides each side by 8.
VAE_FACTOR = 8

# Ends the names of columns that hold latents of several shapes.
IN_BUCKETS = "_buckets"

# The length that MosaicML's diffusion-benchmark gives its synthetic data set: with its global
# batch of 2,048 an epoch has 48 full batches.
NUM_SYNTHETIC_IMAGES = 100_000


@dataclass(frozen=True, kw_only=True)
class SourceConfig(DataSettings):
    """What `data.check` and `data.build` need: the user's settings, and what a run decides."""

    data_format: str = field()  # a name of `sources.SOURCES`, not ``auto``; required here
    num_workers: int = 0  # loader processes of this rank; 0 loads in the training process
    image_size: int  # side of the square images in pixels, or of one with as many as a bucket has
    shapes: Buckets | None = None  # of pictures, where `buckets` asks for several
    mixture: Mixture | None = None  # the bucket of each sample; None: not known yet
    device_batch_size: int  # images per batch of one rank
    seed: int  # of order, crops, flips and dropped captions, and of synthetic samples
    rank: int = 0  # of this process, among all ranks
    world_size: int = 1
    # ``uint8`` (the model brings pixels to [-1, 1] on the device) or ``float32`` (the workers send
    # [-1, 1], four times the bytes).
    image_dtype: str = "uint8"
    pin_memory: bool = False  # copy batches to page-locked memory, for asynchronous transfer
    inputs: ModelInputs = STABLE_DIFFUSION_2  # what the model reads beside pictures
    num_images: int | None = None  # of an epoch of synthetic data; None: `NUM_SYNTHETIC_IMAGES`
    caption: str | None = None  # of every sample, in place of its own
    new_token: str | None = None  # a word to add to the tokenizer as one token
    # In seconds since 1970; the same on all ranks of a node and in their subprocesses.
    run_began_s: float = field(default_factory=run_began_s)

    @classmethod
    def from_settings(cls, settings: DataclassInstance, **others: Any) -> SourceConfig:
        """Make a source from fields of the same name in `settings`; `others` take precedence."""
        names = {one.name for one in fields(cls)} & {one.name for one in fields(settings)}
        values = {name: getattr(settings, name) for name in names - others.keys()}
        return cls(**{**values, **others})

    @property
    def shape(self) -> Shape:
        """The shape of all pictures, if there are no buckets."""
        return Shape.square(self.image_size)

    @property
    def resolution(self) -> str:
        """What the columns of latents are called after: ``512``, or in buckets ``512_buckets``."""
        return str(self.image_size) if self.buckets is None else f"{self.image_size}{IN_BUCKETS}"

    @property
    def drops_encoded_captions(self) -> bool:
        """Whether stored encoded captions become the empty one, which has to be stored too."""
        is_stored = self.data_format != "synthetic" and self.wants_latents
        return is_stored and self.caption_drop_probability > 0

    @property
    def global_batch_size(self) -> int:
        """Images per batch of all ranks together."""
        return self.device_batch_size * self.world_size
