"""Readers of batches: stored samples are read, decoded and tokenized into tensors.

One process reads, decodes and tokenizes a whole batch: a worker, or the training process. Each
batch carries a report of its times and bad samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from sdbench.base.conditions import NUM_SIZES, SIZES
from sdbench.base.errors import RunError
from sdbench.base.shape import Shape
from sdbench.data.batches.shared_batches import Layout, SharedBatches
from sdbench.data.batches.tokenizer import CaptionTokenizers
from sdbench.data.batches.transforms import decode_picture, to_float
from sdbench.data.buckets import Mixture
from sdbench.data.formats.empty_caption import read_empty_caption
from sdbench.data.formats.latent_columns import BITS_ENDING, check_array, check_finite
from sdbench.data.order.epochs import Key
from sdbench.data.order.mixture import check_noted, mix
from sdbench.data.samples import (
    DELIVERED_NAMES,
    SKIP_ADVICE,
    BadSampleError,
    Samples,
    SampleType,
    check_whole,
    decoding,
)
from sdbench.data.source import SourceConfig

# The phases of reading a batch, in order.
PHASES = ("read", "decode", "transform", "tokenize", "collate")


@dataclass
class BatchReport:
    """Times, sizes and bad samples of a batch."""

    num_images: int = 0  # bad ones included
    bytes_read: int = 0  # of the stored samples
    # Seconds of the loading process in each phase.
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    # A sentence for each sample that could not be used.
    bad: list[str] = field(default_factory=list)
    # Name and `Picture.profile` of each picture whose colour profile is not sRGB.
    profiles: list[tuple[str, str]] = field(default_factory=list)
    # Number of the slot of `SharedBatches`; None outside of workers.
    slot: int | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to a phase."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started_s


class Batch(NamedTuple):
    """Tensors by name and captions, in the order of `keys`, and the batch's report.

    A caption is the text that was tokenized; None if no text was.
    """

    tensors: dict[str, torch.Tensor]
    keys: list[Key]
    report: BatchReport
    captions: list[str | None]

    def take(self, positions: Sequence[int]) -> Batch:
        """Return the samples at some positions, which may be repeated."""
        tensors = {name: tensor[list(positions)] for name, tensor in self.tensors.items()}
        keys = [self.keys[position] for position in positions]
        captions = [self.captions[position] for position in positions]
        return Batch(tensors, keys, self.report, captions)

    def fill_up(self) -> Batch:
        """Return a full batch, repeating good samples for bad ones; a `RunError` if all are bad."""
        num_samples = self.report.num_images
        if len(self.keys) == num_samples:
            return self
        if not self.keys:
            raise RunError(f"All {num_samples} samples of a batch are bad: {self.report.bad[0]}")
        # 0 1 2 0 for a batch of 4 with a bad one.
        return self.take([number % len(self.keys) for number in range(num_samples)])


class BatchReader:
    """Makes batches of the samples of a data set; a subclass for each kind of samples.

    A bad sample stops the run, or with ``--on_bad_sample skip`` another sample of its batch takes
    its place, so that every batch is full and all ranks take equally many steps.

    Attributes:
        num_samples: Of the data set.
        num_lanes: As `Order.num_lanes`.
        fills_up: Whether good samples are repeated for bad ones; else bad ones are left out.
        may_skip: Whether a run may leave bad samples out, so that an error may advise it.
        mixture: The bucket of each sample; None without buckets.
        shapes: The shapes of the batches.
    """

    fills_up = True
    may_skip = True
    mixture: Mixture | None = None

    def __init__(self, samples: Samples, *, config: SourceConfig) -> None:
        self.samples = samples
        self.sample_type = samples.sample_type
        self.num_samples = len(samples)
        self.config = config
        self.num_lanes: Mapping[int, int] = {}

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the batches."""
        return (self.config.shape,) if self.mixture is None else self.mixture.shapes

    def bucket_of(self, index: int) -> int:
        """Return the number of a sample's shape in `shapes`, below 0 for one that is not used."""
        return 0 if self.mixture is None else int(self.mixture.bucket_of[index])

    def split(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """Return the samples that are used, in lists of one shape."""
        return [indices] if self.mixture is None else self.mixture.split(indices)

    def name(self, index: int) -> str:
        """Return where a sample is stored, for messages."""
        return self.samples.name(index)

    def __call__(self, keys: Sequence[Key]) -> Batch | RunError:
        """Make a batch of the samples that `keys` name.

        A `RunError` is returned, not raised: torch would wrap one from a worker in a traceback.
        """
        try:
            batch = self.read_good(keys)
            return batch.fill_up() if self.fills_up else batch
        except RunError as error:
            return error

    def read_good(self, keys: Sequence[Key]) -> Batch:
        """Make a batch of the samples that can be used; a `RunError` if one may not be skipped."""
        raise NotImplementedError


class SampleBatchReader(BatchReader):
    """Reads stored samples one after the other into the tensors of a batch, of one shape."""

    def __init__(self, samples: Samples, *, config: SourceConfig) -> None:
        super().__init__(samples, config=config)
        if config.buckets is not None:
            self.mixture = config.mixture or mix(samples, config)
        layouts = map(self._layout, self.shapes)
        self._slots = SharedBatches(*layouts, prefetch_factor=config.prefetch_factor)

    def _layout(self, shape: Shape) -> Layout:
        """Describe the tensors in which a batch of pictures of this shape is made."""
        raise NotImplementedError

    def read_good(self, keys: Sequence[Key]) -> Batch:
        """Read as `BatchReader.read_good` says."""
        report = BatchReport(num_images=len(keys))
        bucket = self.bucket_of(keys[0].index)
        assert all(self.bucket_of(key.index) == bucket for key in keys), "a batch has one shape"
        target, report.slot = self._slots.take(len(keys), layout=bucket)
        # Indexing arrays takes a fraction of the time that indexing tensors takes.
        self._arrays = {name: tensor.numpy() for name, tensor in target.items()}
        # Each bucket comes to files of its own.
        self.samples.num_lanes = self.num_lanes.get(keys[0].epoch, 1) * len(self.shapes)
        good, captions = [], []
        for key in keys:
            try:
                captions.append(self._read_into(len(good), key=key, report=report))
            except BadSampleError as error:
                if self.config.on_bad_sample == "error":
                    advice = f" ({SKIP_ADVICE})"
                    raise RunError(f"{error}{advice if self.may_skip else ''}") from error
                report.bad.append(str(error))
            else:
                good.append(key)
        tensors = {name: tensor[: len(good)] for name, tensor in target.items()}
        return Batch(self._finish(tensors, captions, report), good, report, captions)

    def _read_into(self, position: int, *, key: Key, report: BatchReport) -> str | None:
        """Read a sample into a position of `_arrays`; return its caption, if it has one as text."""
        raise NotImplementedError

    def _finish(
        self, tensors: dict[str, torch.Tensor], captions: list[str | None], report: BatchReport
    ) -> dict[str, torch.Tensor]:
        return tensors


class ImageBatchReader(SampleBatchReader):
    """Makes ``{image: (B, 3, H, W) uint8 or float32, input_ids: (B, 77) int64}``.

    Models with several text encoders have ids for each, and some are told ``sizes``, (B, 6).
    Images are channels_last in memory, as decoders write them: separating the channels took a
    seventh of the time of an image.
    """

    def __init__(self, samples: Samples, *, config: SourceConfig) -> None:
        super().__init__(samples, config=config)
        self._tokenize = CaptionTokenizers(config.inputs.captions, new_token=config.new_token)

    def _layout(self, shape: Shape) -> Layout:
        layout: dict[str, Any] = {"image": ((shape.height, shape.width, 3), torch.uint8)}
        if self.config.inputs.tells_sizes:
            layout[SIZES] = ((NUM_SIZES,), torch.float32)
        return layout

    def _read_into(self, position: int, *, key: Key, report: BatchReport) -> str:
        with report.phase("read"):
            sample = self.samples.read(key.index)
        config = self.config
        x, y, flip, drop = _draw_chances(config, key)
        if config.caption is not None:
            sample = sample._replace(caption=config.caption)
        check_whole(sample, empty_captions=config.empty_captions)
        report.bytes_read += len(sample.image) + len(sample.caption)
        with decoding(sample.name):
            picture = decode_picture(
                sample.image,
                shape=self.shapes[self.bucket_of(key.index)],
                crop=(x, y) if config.crop == "random" else None,
                flip=bool(flip < config.horizontal_flip_probability),
                read_avif=config.read_avif,
                phase=report.phase,
            )
        if picture.profile is not None:
            report.profiles.append((sample.name, picture.profile))
        if self.mixture is not None:
            check_noted(sample.name, picture.sizes[1::-1], self.mixture.sizes[key.index])
        with report.phase("collate"):
            self._arrays["image"][position] = picture.pixels.transpose(1, 2, 0)
            if config.inputs.tells_sizes:
                self._arrays[SIZES][position] = picture.sizes
        return "" if drop < config.caption_drop_probability else sample.caption

    def _finish(
        self, tensors: dict[str, torch.Tensor], captions: list[str], report: BatchReport
    ) -> dict[str, torch.Tensor]:
        tensors["image"] = tensors["image"].permute(0, 3, 1, 2)
        if self.config.image_dtype == "float32":
            with report.phase("transform"):
                tensors["image"] = torch.from_numpy(to_float(tensors["image"].numpy()))
        with report.phase("tokenize"):
            for name, ids in self._tokenize(captions).items():
                tensors[name] = torch.from_numpy(ids)
        return tensors


def _draw_chances(config: SourceConfig, key: Key) -> np.ndarray:
    """Four numbers from 0 to 1: two for the crop, one for mirroring, one for the caption.

    Seeded by sample and epoch, so that neither workers nor ranks nor a resume change them.
    """
    return np.random.default_rng([config.seed, key.epoch, key.index]).random(4)


class LatentBatchReader(SampleBatchReader):
    """Makes ``{latent_mean, latent_logvar | latent: (B, C, H / 8, W / 8), text_embedding}``.

    Latents are float16, and what is beside them has the shapes and types that the model asks for.
    Each value is copied once, from the file's pages into the batch; bfloat16 is widened before.
    """

    def __init__(self, samples: Samples, *, config: SourceConfig) -> None:
        super().__init__(samples, config=config)
        self._empty = read_empty_caption(config) if config.drops_encoded_captions else {}
        self._shapes = [self.sample_type.array_shapes(config, shape) for shape in self.shapes]

    def _layout(self, shape: Shape) -> Layout:
        tensors = self.sample_type.batch_tensors(self.config, shape)
        return {name: (sides, getattr(torch, dtype)) for name, (sides, dtype) in tensors.items()}

    def _read_into(self, position: int, *, key: Key, report: BatchReport) -> None:
        with report.phase("read"):
            sample = self.samples.read(key.index)
        arrays = sample.arrays
        if self._empty:
            *_, drop = _draw_chances(self.config, key)
            if drop < self.config.caption_drop_probability:
                arrays = arrays | self._empty
        with report.phase("collate"):
            for name, shape in self._shapes[self.bucket_of(key.index)].items():
                stored = arrays[name]
                check_array(f"{sample.name}, {name}", stored, shape=shape)
                is_widened = self.samples.columns.get(name, "").endswith(BITS_ENDING)
                report.bytes_read += stored.nbytes // (2 if is_widened else 1)
                parts = DELIVERED_NAMES.get(name, (name,))
                length = shape[0] // len(parts)
                for number, part in enumerate(parts):
                    copy = self._arrays[part][position]
                    with np.errstate(over="ignore"):
                        copy[:] = stored[number * length : (number + 1) * length]
                    # Checks the copy, which is aligned, in the processor's cache, and narrow.
                    check_finite(f"{sample.name}, {name}", copy)


def make_batches(samples: Samples, *, config: SourceConfig) -> SampleBatchReader:
    """Choose the reader for the type of the samples."""
    is_image = samples.sample_type is SampleType.IMAGES
    return (ImageBatchReader if is_image else LatentBatchReader)(samples, config=config)
