"""The types of stored samples, and `Samples`, the interface by which they are read by number.

Each data format has one subclass of `Samples`, which returns samples in stored order and undecoded.
Decoding, cropping, tokenizing and batching are the same for all formats: see
sdbench/data/batches/batches.py.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from sdbench.base.conditions import BFLOAT16, NUM_SIZES, SIZES, Condition
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.escape import as_utf8
from sdbench.base.outside import HAS_NUL
from sdbench.base.shape import Shape
from sdbench.data.source import VAE_FACTOR, SourceConfig
from sdbench.settings.data import KEEP

if TYPE_CHECKING:
    import numpy as np

# The VAE's moments are stored as one array and delivered as two.
DELIVERED_NAMES = {"moments": ("latent_mean", "latent_logvar")}
# How a run goes on, for messages about a bad sample that has ended one.
SKIP_ADVICE = (
    "--on_bad_sample skip goes on without such samples, as many as --max_bad_fraction allows"
)


class SampleType(Enum):
    """The kind of a sample; the value names the first part that is stored."""

    IMAGES = "image"  # with a caption
    # Mean and log-variance of the VAE, from which each step samples a latent.
    MOMENTS = "moments"
    LATENTS = "latent"

    @classmethod
    def of(cls, parts: Iterable[str]) -> SampleType:
        """Return the kind of a sample by the names of its parts, of which the first decides."""
        return cls(next(iter(parts)))

    def arrays(self, config: SourceConfig, shape: Shape | None = None) -> list[Condition]:
        """Describe a sample's stored arrays, the latents first; none for images, which are files.

        Latents are float16 in our own columns, and any floating type elsewhere. `shape` is that of
        the picture. Without it latents in buckets have sides of None: any.
        """
        if self is SampleType.IMAGES:
            return []
        num_channels = config.inputs.latent_channels * (2 if self is SampleType.MOMENTS else 1)
        if shape is None and config.buckets is None:
            shape = config.shape
        sides = (None, None)
        if shape is not None:
            sides = (shape.height // VAE_FACTOR, shape.width // VAE_FACTOR)
        latents = Condition(name=self.value, shape=(num_channels, *sides))
        return [latents, *config.inputs.beside_latents]

    def array_shapes(
        self, config: SourceConfig, shape: Shape | None = None
    ) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes of the arrays that `arrays` describes."""
        return {array.name: array.shape for array in self.arrays(config, shape)}

    def batch_tensors(
        self, config: SourceConfig, shape: Shape | None = None
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """Map each tensor of a batch to its shape for one sample and its dtype.

        `shape` is that of the batch's pictures; None: the square.
        """
        shape = shape or config.shape
        if self is SampleType.IMAGES:
            ids = {one.name: ((one.num_tokens,), "int64") for one in config.inputs.captions}
            sizes = {SIZES: ((NUM_SIZES,), "float32")} if config.inputs.tells_sizes else {}
            return {"image": ((3, shape.height, shape.width), config.image_dtype), **ids, **sizes}
        tensors = {}
        for array in self.arrays(config, shape):
            parts = DELIVERED_NAMES.get(array.name, (array.name,))
            first, *others = array.shape
            dtype = "float32" if array.dtype == BFLOAT16 else array.dtype
            for part in parts:
                tensors[part] = ((first // len(parts), *others), dtype)
        return tensors


def shape_of(batch: Mapping[str, Any]) -> Shape:
    """Return the shape of the pictures of a batch of images or latents."""
    if "image" in batch:
        height, width = batch["image"].shape[-2:]
        return Shape(width, height)
    latents = next(batch[name] for name in ("latent_mean", "latent") if name in batch)
    height, width = latents.shape[-2:]
    return Shape(width * VAE_FACTOR, height * VAE_FACTOR)


class ImageSample(NamedTuple):
    """One image with its caption, as stored; either may be missing."""

    name: str  # for messages: photos/a.jpg, 00001.tar: 000123, shard.00002.mds, sample 17
    image: bytes | None  # an image file of any kind
    caption: str | None  # as `clean_caption` gives it; may be empty


class LatentSample(NamedTuple):
    """One encoded image with its encoded caption, as stored.

    `arrays` has what `ModelInputs.beside_latents` names, and either ``moments``
    (2 C, S / 8, S / 8), the VAE's mean and log-variance in its output order, or ``latent``
    (C, S / 8, S / 8), a sample from them times the scaling factor. They have any floating type, and
    may be views of a file.
    """

    name: str
    arrays: dict[str, np.ndarray]


class Samples:
    """Samples of one data set by number, in stored order; each format has a subclass.

    Can be pickled or forked before its first `read`: files are opened by the process that reads.
    """

    # Number of `blocks` in each file, where seeking back is expensive or each block is a download,
    # so one process should read a file from its first byte on. None: any process may read any
    # block.
    num_blocks_of_files: Sequence[int] | None = None
    # How many sequences of samples (see `EpochOrder`) are read in turn; set by the batch reader. It
    # decides how many files or row groups are kept open (`max_kept`).
    num_lanes = 1
    # Whether the reader needs more than captions; if not, `read` may leave out the image.
    needs_images = True
    num_dropped = 0  # stored samples that a flag leaves out
    sample_type = SampleType.IMAGES  # of what `read` returns
    # Part of a sample (``image``, ``caption``, or a name of `LatentSample.arrays`) to the name of
    # its column; empty where the format has no columns.
    columns: Mapping[str, str] = {}

    def __init__(self, sizes: Sequence[int], *, blocks: Sequence[int] | None = None) -> None:
        """Set the number of samples in each part, e.g. file.

        `blocks` are the sizes of consecutive runs that are cheap to read together (a row group, a
        shard), with the same sum; by default the parts. If any order is equally cheap, pass one
        block.
        """
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self.blocks = sizes if blocks is None else blocks

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, index: int) -> tuple[int, int]:
        """Return the number of the part that holds a sample, and the position in that part."""
        part = bisect.bisect_right(self._starts, index) - 1
        return part, index - self._starts[part]

    def name(self, index: int) -> str:
        """Return where a sample is stored, as `ImageSample.name`; reads nothing."""
        raise NotImplementedError

    def read(self, index: int) -> ImageSample | LatentSample:
        """Read one sample; a `BadSampleError` if it is bad, a `RunError` if its file is."""
        raise NotImplementedError


def max_kept(num_lanes: int) -> int:
    """Return the size of an LRU cache of files or row groups that lanes read in turn.

    Each lane uses one, and may just have left another: a smaller cache would evict the next lane's
    instead, just before it is needed.
    """
    return 2 * num_lanes - 1


class BadSampleError(ValueError):
    """One sample cannot be used. The message is a sentence that begins with its name."""


class MissingLatentError(BadSampleError):
    """A sample has no encoded image of the size asked for: its picture was smaller."""


def clean_caption(text: str | None) -> str | None:
    """Return a caption without the white space and the byte-order mark around it, or None."""
    # Some editors begin text files with that mark, which a tokenizer turns into three tokens.
    return None if text is None else text.strip().removeprefix("\ufeff").strip()


def check_whole(sample: ImageSample, *, empty_captions: str = KEEP) -> None:
    """Raise a `BadSampleError` unless a sample has an image and an allowed caption."""
    if not sample.image:
        what = "no image" if sample.image is None else "the image has 0 bytes"
        raise BadSampleError(f"{sample.name}: {what}.")
    check_caption(sample, empty_captions=empty_captions)


def check_caption(sample: ImageSample, *, empty_captions: str = KEEP) -> None:
    """Raise a `BadSampleError` unless a sample has an allowed caption."""
    if sample.caption is None:
        raise BadSampleError(f"{sample.name}: no caption.")
    if as_utf8(sample.caption) != sample.caption:
        # A lone surrogate: JSON can hold one, UTF-8 cannot.
        raise BadSampleError(f"{sample.name}: the caption has half of a character.")
    if "\0" in sample.caption:
        raise BadSampleError(f"{sample.name}: the caption {HAS_NUL}.")
    if not sample.caption and empty_captions != KEEP:
        raise BadSampleError(f"{sample.name}: the caption is empty.")


@contextlib.contextmanager
def decoding(name: str, what: str = "the image") -> Iterator[None]:
    """Turn whatever a decoder raises in the block into a `BadSampleError` with a sample's name.

    A damaged file makes decoders raise errors of any type.
    """
    try:
        yield
    except (ConfigError, RunError, BadSampleError):
        raise  # ours: the run, not this file, is at fault, or it is named already
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise BadSampleError(f"{name}: {what} cannot be decoded ({reason}).") from error
