"""Stored samples as rows of a new data set: checked, under our column names."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from sdbench.base.conditions import POOLED_EMBEDDING, SIZES
from sdbench.data import open_samples
from sdbench.data.checks import bad_place
from sdbench.data.convert.chunk_formats import Columns, Row
from sdbench.data.convert.maker import read_encoded
from sdbench.data.formats.data_formats import detect_format, read_columns
from sdbench.data.formats.identity import PROVENANCE_NAME
from sdbench.data.formats.latent_columns import (
    array_columns,
    check_array,
    check_finite,
    find_resolutions,
    name_column,
    narrow,
)
from sdbench.data.samples import (
    ImageSample,
    LatentSample,
    MissingLatentError,
    Samples,
    check_caption,
    check_whole,
    decoding,
)
from sdbench.data.source import IN_BUCKETS, VAE_FACTOR, SourceConfig
from sdbench.settings.buckets import AUTO


class RowReader:
    """Samples as rows of a new data set; pictures and latents have a subclass each.

    Attributes:
        columns: Ours, with their MDS encodings.
        taken: The columns of the source that are read.
        num_dropped: Samples that the filters leave out.
        profiles: `Picture.profile`, where it is not sRGB, of what this process has read, counted.
    """

    columns: Columns
    taken: set[str]
    num_dropped = 0

    def __init__(self) -> None:
        self.profiles: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> Row:
        """Read a sample; a `BadSampleError` if it cannot be used."""
        raise NotImplementedError

    def take_profiles(self) -> Mapping[str, int]:
        """Return `profiles`, which begin anew."""
        taken, self.profiles = self.profiles, collections.Counter()
        return taken


class ImageRowReader(RowReader):
    """Image files unchanged, with their captions and sizes."""

    columns: Mapping[str, str] = {"jpg": "bytes", "caption": "str", "width": "int", "height": "int"}

    def __init__(self, samples: Samples, *, config: SourceConfig) -> None:
        super().__init__()
        self.num_dropped = samples.num_dropped
        self.taken = set(samples.columns.values())
        self._samples = samples
        self._config = config

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, index: int) -> Row:
        """Read a sample and decode its image wholly, which finds truncated ones."""
        # It imports torch, which --help does without.
        from sdbench.data.batches.transforms import measure_image

        sample = self._samples.read(index)
        assert isinstance(sample, ImageSample)
        check_whole(sample, empty_captions=self._config.empty_captions)
        with decoding(sample.name):
            (width, height), profile = measure_image(sample.image, read_avif=self._config.read_avif)
        if profile is not None:
            self.profiles[profile] += 1
        return {"jpg": sample.image, "caption": sample.caption, "width": width, "height": height}

    def check_caption(self, index: int) -> None:
        """Look at the caption of a sample alone, which costs no decoding."""
        self._samples.needs_images = False
        sample = self._samples.read(index)
        assert isinstance(sample, ImageSample)
        check_caption(sample, empty_captions=self._config.empty_captions)


class LatentRowReader(RowReader):
    """Encoded images of one or more resolutions with their encoded captions."""

    def __init__(self, resolutions: list[tuple[SourceConfig, Samples]]) -> None:
        """`resolutions` are the same data set, described and opened for each of its image sizes."""
        super().__init__()
        self.resolutions = resolutions
        self.columns, self.taken = {}, set()
        for config, samples in resolutions:
            self.columns |= array_columns(samples.sample_type, config)
            self.taken |= set(samples.columns.values())

    def __len__(self) -> int:
        return len(self.resolutions[0][1])

    def read(self, index: int) -> Row:
        """Read a sample; a `MissingLatentError` if only a resolution is missing."""
        row = {}
        missing = None
        for config, samples in self.resolutions:
            try:
                sample = samples.read(index)
            except MissingLatentError as error:
                # The other resolutions are checked all the same.
                missing = error
                continue
            assert isinstance(sample, LatentSample)
            for array in samples.sample_type.arrays(config):
                column = name_column(array, resolution=config.resolution)
                place = f"{sample.name}, {column}"
                check_array(place, sample.arrays[array.name], shape=array.shape)
                row[column] = narrow(sample.arrays[array.name], array.dtype)
                check_finite(place, row[column])
        if missing is not None:
            raise missing
        return row


def describe_source(
    place: str, *, data_format: str, flags: Any = None, **options: Any
) -> SourceConfig:
    """Describe a data set that is read sample by sample, without batches or resizing.

    Its fields are those of the same name in `flags`, and `options`, which take precedence.
    """
    options = {
        "data_format": detect_format(place) if data_format == "auto" else data_format,
        "remote": place,
        "image_size": VAE_FACTOR,
        "device_batch_size": 1,
        "seed": 0,
        # The caller decides what to do about each bad sample.
        "on_bad_sample": "skip",
        **options,
    }
    if flags is None:
        return SourceConfig(**options)
    inputs = read_encoded(place, width=flags.text_embedding_dim)
    return SourceConfig.from_settings(flags, inputs=inputs, **options)


def open_rows(config: SourceConfig) -> RowReader:
    """Open a data set, latents in all their resolutions."""
    if not config.wants_latents:
        return ImageRowReader(open_samples(config), config=config)
    columns = read_columns(config)
    _check_explained(columns, config)
    # Without any size, the check of this one says what is there and what is needed.
    configs = [
        dataclasses.replace(
            config,
            image_size=int(resolution.removesuffix(IN_BUCKETS)),
            buckets=AUTO if resolution.endswith(IN_BUCKETS) else None,
        )
        for resolution in find_resolutions(columns) or [config.resolution]
    ]
    return LatentRowReader([(config, open_samples(config)) for config in configs])


def _check_explained(columns: Iterable[str], config: SourceConfig) -> None:
    """Refuse encoded samples of a family whose description is not there: a part would be lost."""
    known = {condition.name for condition in config.inputs.beside_latents}
    # How the names of our columns begin: those of sizes end with a number of pixels.
    unknown = {POOLED_EMBEDDING, SIZES} - known
    strange = [column for column in sorted(columns) if column.startswith(tuple(unknown))]
    if strange:
        raise bad_place(
            "The data set has no description of these encoded parts",
            value=", ".join(strange),
            allowed=f"a folder with {PROVENANCE_NAME} as precompute has written it",
        )
