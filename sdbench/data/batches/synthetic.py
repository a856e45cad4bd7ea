"""Synthetic samples, for runs in which data must not be the bottleneck.

Samples are drawn once and handed out again and again: drawing 3 x 512 x 512 normal numbers per
sample, as the reference does, takes a core about 4 ms and can become the bottleneck.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from sdbench.base.conditions import (
    CLIP,
    SIZES,
    STABLE_DIFFUSION_2,
    Captions,
    Condition,
    ModelInputs,
)
from sdbench.base.shape import Shape
from sdbench.data.batches.batches import Batch, BatchReader, BatchReport
from sdbench.data.batches.shared_batches import SharedBatches
from sdbench.data.batches.transforms import to_float
from sdbench.data.buckets import Mixture, fill_buckets
from sdbench.data.order.epochs import Key
from sdbench.data.samples import Samples, SampleType
from sdbench.data.source import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    NUM_SYNTHETIC_IMAGES,
    VAE_FACTOR,
    VOCABULARY_SIZE,
    SourceConfig,
)

# Distinct samples per rank. 64 images of 512 px take 50 MB as uint8 and 201 MB as float32.
NUM_DISTINCT = 64

# Any small posterior deviation will do, as it is only sampled from: exp(-10 / 2) = 0.007.
LATENT_LOGVAR = -10.0

# T5's end of a caption, and the tokens of bytes in ByT5, which its other vocabularies have as well.
T5_EOS_TOKEN_ID = 1
T5_BYTES = (3, 259)


class SyntheticImageCaptionDataset(Dataset):
    """Noise images with random captions, or noise latents with random text embeddings.

    Token ids are drawn from the whole vocabulary, 0 to 49407, so that every row of the embedding
    table may be read; each caption begins with bos (49406) and ends with eos (49407). Those of T5
    are bytes that end with eos. Images are uniform over all pixel values. Sample `i` is number
    `i % 64` of the samples drawn; each rank draws its own.
    """

    def __init__(
        self,
        *,
        shape: Shape,
        seed: int,
        rank: int = 0,
        num_images: int = NUM_SYNTHETIC_IMAGES,
        image_dtype: str = "uint8",
        wants_latents: bool = False,
        inputs: ModelInputs = STABLE_DIFFUSION_2,
        num_distinct: int = NUM_DISTINCT,
    ) -> None:
        """Draw the samples, which `seed` and `rank` decide.

        An epoch has `num_images` over all ranks. Images are ``uint8``, or ``float32`` in [-1, 1];
        latents are float16. `inputs` is what the model reads.
        """
        self.num_images = num_images
        self._num_distinct = num_distinct
        generator = np.random.default_rng([seed, rank])
        if wants_latents:
            sides = (shape.height // VAE_FACTOR, shape.width // VAE_FACTOR)
            size = (num_distinct, inputs.latent_channels, *sides)
            mean = generator.standard_normal(size) * inputs.latent_std
            encoded = {
                one.name: _draw_condition(one, generator, num_distinct) for one in inputs.conditions
            }
            samples = {
                "latent_mean": mean.astype(np.float16),
                "latent_logvar": np.full(size, LATENT_LOGVAR, dtype=np.float16),
                **encoded,
            }
        else:
            size = (num_distinct, 3, shape.height, shape.width)
            image = generator.integers(0, 256, size=size, dtype=np.uint8)
            ids = {one.name: _draw_ids(one, generator, num_distinct) for one in inputs.captions}
            if image_dtype == "float32":
                image = to_float(image)
            samples = {"image": image, **ids}
        if inputs.tells_sizes:
            whole = (shape.height, shape.width, 0, 0, shape.height, shape.width)
            samples[SIZES] = np.tile(np.float32(whole), (num_distinct, 1))
        self.samples = {name: torch.from_numpy(values) for name, values in samples.items()}

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index % self._num_distinct] for name, values in self.samples.items()}


def _draw_ids(captions: Captions, generator: np.random.Generator, num: int) -> np.ndarray:
    shape = (num, captions.num_tokens)
    if captions.kind == CLIP:
        ids = generator.integers(0, VOCABULARY_SIZE, size=shape)
        ids[:, 0] = BOS_TOKEN_ID
        ids[:, -1] = EOS_TOKEN_ID
        return ids
    ids = generator.integers(*T5_BYTES, size=shape)
    ids[:, -1] = T5_EOS_TOKEN_ID
    return ids


def _draw_condition(condition: Condition, generator: np.random.Generator, num: int) -> np.ndarray:
    """Draw normal numbers: float32 as such, as T5's states would take gigabytes in float64."""
    shape = (num, *condition.shape)
    if condition.dtype == "float32":
        return generator.standard_normal(shape, dtype=np.float32)
    return generator.standard_normal(shape).astype(condition.dtype)


class SyntheticBatchReader(BatchReader):
    """Gathers batches of a synthetic data set in one copy."""

    def __init__(self, *, config: SourceConfig) -> None:
        num_images = config.num_images or NUM_SYNTHETIC_IMAGES
        super().__init__(Samples([num_images]), config=config)
        if config.buckets is not None:
            self.mixture = mix_synthetic(config, num_images)
        self.sample_type = SampleType.MOMENTS if config.wants_latents else SampleType.IMAGES
        self._num_distinct = -(-NUM_DISTINCT // len(self.shapes))
        self._samples = [self._draw(shape) for shape in self.shapes]
        layouts = [
            {name: (values.shape[1:], values.dtype) for name, values in samples.items()}
            for samples in self._samples
        ]
        self._slots = SharedBatches(*layouts, prefetch_factor=config.prefetch_factor)

    def _draw(self, shape: Shape) -> dict[str, torch.Tensor]:
        return SyntheticImageCaptionDataset(
            shape=shape,
            seed=self.config.seed,
            rank=self.config.rank,
            image_dtype=self.config.image_dtype,
            wants_latents=self.config.wants_latents,
            inputs=self.config.inputs,
            num_distinct=self._num_distinct,
        ).samples

    def name(self, index: int) -> str:
        """Return its number among the samples that this rank draws."""
        number = index % self._num_distinct
        return f"synthetic, sample {number} of rank {self.config.rank}"

    def read_good(self, keys: Sequence[Key]) -> Batch:
        """Gather the samples, which are never bad."""
        report = BatchReport(num_images=len(keys))
        with report.phase("collate"):
            bucket = self.bucket_of(keys[0].index)
            tensors, report.slot = self._slots.take(len(keys), layout=bucket)
            drawn = torch.tensor([key.index % self._num_distinct for key in keys])
            for name, values in self._samples[bucket].items():
                torch.index_select(values, 0, drawn, out=tensors[name])
        return Batch(tensors, list(keys), report, [""] * len(keys))


def mix_synthetic(config: SourceConfig, num_images: int) -> Mixture:
    """Put synthetic samples into buckets: the shapes of a size are equally frequent."""
    shapes = config.shapes.shapes
    chances = [
        sum(one.share / len(one.shapes) for one in config.shapes.budgets if shape in one.shapes)
        for shape in shapes
    ]
    shares = np.array(chances) / sum(chances)
    drawn = np.random.default_rng(config.seed).choice(len(shapes), num_images, p=shares)
    return fill_buckets(shapes, drawn, sizes=np.array(shapes)[drawn])
