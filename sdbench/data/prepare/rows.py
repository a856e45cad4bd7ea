"""Stored samples as rows of a data set of ours: checked, in our columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sdbench.base.errors import RunError
from sdbench.data import detect_format, open_samples
from sdbench.data.formats.mds_index import locate_mds
from sdbench.data.formats.parquet import find_files
from sdbench.data.latent_columns import (
    SPELLINGS,
    check_array,
    check_finite,
    find_image_sizes,
)
from sdbench.data.prepare.chunk_formats import Columns, Row, image_extension
from sdbench.data.samples import (
    ImageSample,
    LatentSample,
    MissingLatentError,
    Samples,
    check_whole,
    undecodable,
)
from sdbench.data.source import VAE_FACTOR, SourceConfig


class ImageRowReader:
    """Images as they are, with their captions and sizes."""

    columns: Mapping[str, str] = {"jpg": "bytes", "caption": "str", "width": "int", "height": "int"}

    def __init__(self, samples: Samples, *, as_files: bool = False) -> None:
        """Set up; nothing is read yet.

        Args:
            samples: Stored images.
            as_files: Whether each image must be of a type that makes a file of its own.
        """
        self.num_dropped = samples.num_dropped
        self._samples = samples
        self._as_files = as_files

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def taken(self) -> set[str]:
        """Columns of the source that are read."""
        return set(self._samples.columns.values())

    def read(self, index: int) -> Row:
        """Read a sample and decode its image wholly, which finds truncated ones.

        Raises:
            BadSampleError: Image or caption are missing, or the image cannot be decoded.
            RunError: The file that holds it is missing or damaged.
        """
        # It imports torch, which --help does without.
        from sdbench.data.pipeline.transforms import measure_image

        sample = self._samples.read(index)
        assert isinstance(sample, ImageSample)
        check_whole(sample)
        try:
            width, height = measure_image(sample.image)
            if self._as_files:
                image_extension(sample.image)
        except (OSError, ValueError) as error:
            raise undecodable(sample, error) from error
        return {"jpg": sample.image, "caption": sample.caption, "width": width, "height": height}


class LatentRowReader:
    """Encoded images of one or more resolutions with their encoded captions, as float16."""

    num_dropped = 0

    def __init__(
        self, samples: Mapping[int, Samples], *, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Set up; nothing is read yet.

        Args:
            samples: Image size in pixels to the same data set, opened for that resolution.
            shapes: Column to the shape that its arrays must have.
        """
        self.columns: Columns = {
            column: f"ndarray:float16:{','.join(map(str, shape))}"
            for column, shape in shapes.items()
        }
        self._samples = samples
        self._shapes = shapes

    def __len__(self) -> int:
        return len(next(iter(self._samples.values())))

    @property
    def taken(self) -> set[str]:
        """Columns of the source that are read."""
        return {name for samples in self._samples.values() for name in samples.columns.values()}

    def read(self, index: int) -> Row:
        """Read a sample.

        Raises:
            BadSampleError: An array has a wrong shape, no floating type, or a value that is not
                finite in float16. `MissingLatentError` if no more is wrong than that a resolution
                is missing.
            RunError: The file that holds it is missing or damaged.
        """
        row = {}
        missing = None
        for image_size, samples in self._samples.items():
            try:
                sample = samples.read(index)
            except MissingLatentError as error:
                # The other resolutions are looked at all the same.
                missing = error
                continue
            assert isinstance(sample, LatentSample)
            for name, array in sample.arrays.items():
                column = name_column(name, image_size=image_size)
                place = f"{sample.name}, {column}"
                check_array(place, array, shape=self._shapes[column])
                with np.errstate(over="ignore"):
                    row[column] = np.array(array, dtype=np.float16)
                check_finite(place, row[column])
        if missing is not None:
            raise missing
        return row


RowReader = ImageRowReader | LatentRowReader


def describe_source(place: str, *, data_format: str, **options: Any) -> SourceConfig:
    """Describe a data set that is read sample by sample, without batches or resizing.

    Args:
        place: Folder, file or URL.
        data_format: A name of `data.SOURCES`, or ``auto``.
        options: More of `SourceConfig`.
    """
    return SourceConfig(
        data_format=detect_format(place) if data_format == "auto" else data_format,
        remote=place,
        image_size=VAE_FACTOR,
        device_batch_size=1,
        seed=0,
        # Whoever reads sample by sample decides about each.
        on_bad_sample="skip",
        **options,
    )


def open_rows(config: SourceConfig, *, as_files: bool = False) -> RowReader:
    """Open a data set, latents in all their resolutions.

    Args:
        config: The data set; its image size is not used.
        as_files: Whether each image must be of a type that makes a file of its own.

    Raises:
        ConfigError: There is none, or it holds no samples of the kind asked for.
    """
    if not config.wants_latents:
        return ImageRowReader(open_samples(config), as_files=as_files)
    configs = {
        image_size: dataclasses.replace(config, image_size=image_size)
        for image_size in find_image_sizes(read_columns(config))
    }
    if not configs:
        # Says what is there and what is needed.
        open_samples(config)
    samples = {image_size: open_samples(config) for image_size, config in configs.items()}
    shapes = {
        name_column(name, image_size=image_size): shape
        for image_size, config in configs.items()
        for name, shape in samples[image_size].sample_type.array_shapes(config).items()
    }
    return LatentRowReader(samples, shapes=shapes)


def read_columns(config: SourceConfig) -> set[str]:
    """Names of the columns that all files of a data set have; none where files have no columns.

    Raises:
        ConfigError: There is no data set, or its index is damaged.
        RunError: A parquet file is damaged.
    """
    if config.data_format == "mds":
        (place,) = locate_mds(config)
        return set.intersection(*(set(shard["column_names"]) for shard in place.shards))
    if config.data_format == "parquet":
        assert config.remote is not None
        files = find_files(config.remote, local=config.local)
        return set.intersection(*(_read_parquet_columns(path) for path in files))
    return set()


def _read_parquet_columns(path: Path) -> set[str]:
    import pyarrow.parquet

    try:
        return set(pyarrow.parquet.read_schema(path).names)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{path} is damaged ({reason}).") from error


def name_column(name: str, *, image_size: int) -> str:
    """Our name of the column for an array of `LatentSample`."""
    return SPELLINGS[name][0].replace("<px>", str(image_size))
