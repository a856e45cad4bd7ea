"""`ModelInputs`: what a batch has beside pictures. Models ask for it, data sources deliver it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CLIP, T5 = "clip", "t5"
BFLOAT16 = "bfloat16"
# CLIP's context length: `max_position_embeddings` of the text encoders.
NUM_CLIP_TOKENS = 77
# That of diffusers' AutoencoderKL if its configuration has none, as those saved before the key.
SCALING_FACTOR = 0.18215
TEXT_EMBEDDING = "text_embedding"
POOLED_EMBEDDING = "pooled_embedding"
# The scale of guidance that a denoiser is told; the objective of a training decides it.
GUIDANCE = "guidance"
# Six numbers in pixels, as SDXL reads them: height and width of the picture before it was resized,
# top and left of the crop after it was resized, height and width of the crop.
SIZES, NUM_SIZES = "sizes", 6


@dataclass(frozen=True, kw_only=True)
class Captions:
    """How a tokenizer turns captions into token ids. A model has one for each text encoder.

    Attributes:
        name: Of the tensor of a batch, (B, num_tokens) int64.
        kind: ``clip`` or ``t5``.
        num_tokens: Ids of a caption; a longer caption is cut, a shorter one is filled up.
        pad_token_id: The id that fills a caption up.
        folder: Of the model's own tokenizer; None: the tokenizer that this package carries.
        vocabulary_size: Ids that the text encoder knows; None: not known.
    """

    name: str = "input_ids"
    kind: str = CLIP
    num_tokens: int = NUM_CLIP_TOKENS
    pad_token_id: int = 0
    folder: Path | None = None
    vocabulary_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Condition:
    """An encoded caption, or a part of it, as one tensor of a sample.

    Attributes:
        name: Of the tensor in a batch, and of the column that stores it.
        shape: Of one sample; None stands for any side.
        dtype: In which it is stored: ``float16``, ``float32``, or ``bfloat16``, which is delivered
            as float32.
    """

    name: str = TEXT_EMBEDDING
    shape: tuple[int | None, ...] = (NUM_CLIP_TOKENS, 1024)
    dtype: str = "float16"


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What a model reads; by default what Stable Diffusion 2 does.

    Attributes:
        captions: How captions become token ids, for each text encoder.
        conditions: What a caption is encoded to.
        latent_channels: Of the VAE.
        latent_std: About the standard deviation of the VAE's latents before they are scaled.
        tells_sizes: Whether the model is told the sizes of each picture, `SIZES`.
    """

    captions: tuple[Captions, ...] = (Captions(),)
    conditions: tuple[Condition, ...] = (Condition(),)
    latent_channels: int = 4
    latent_std: float = 1 / SCALING_FACTOR
    tells_sizes: bool = False

    @property
    def beside_latents(self) -> tuple[Condition, ...]:
        """What an encoded sample has beside its latents: the conditions, and any sizes."""
        sizes = Condition(name=SIZES, shape=(NUM_SIZES,), dtype="float32")
        return (*self.conditions, sizes) if self.tells_sizes else self.conditions


STABLE_DIFFUSION_2 = ModelInputs()
