"""Samples of an MDS data set that have no encoded image of the size asked for.

MosaicML diffusion's precompute_latents.py stores latents as the bytes of float16 numbers, and no
bytes where the picture was smaller than that size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdbench.base.errors import ConfigError, RunError
from sdbench.data.formats.mds_entries import encodings_of, read_bounds
from sdbench.data.latent_columns import find_image_columns
from sdbench.data.source import SourceConfig

if TYPE_CHECKING:
    from sdbench.data.formats.mds_index import MdsPlace

LEAVE_OUT = "leave_out"
# The encoding of a column that may be empty.
BYTES = "bytes"


def count_samples(place: MdsPlace, column: str, *, config: SourceConfig) -> int:
    """Count the samples of an epoch; in a local folder, those with a value in this column."""
    num_samples = place.num_samples
    leaves_out = config.missing_latents == LEAVE_OUT
    if leaves_out and (place.remote is not None or config.streams is not None):
        raise ConfigError(
            "Which samples have no latents is told by the shards, of a single folder on disk",
            value=config.streams or place.source,
            allowed="one folder of shards that are not compressed, without another for copies",
            flag="--missing_latents, --remote, --local or --streams",
        )
    if place.remote is not None:
        return num_samples
    num_present = sum(map(len, find_present(place, column)))
    if leaves_out and num_present:
        return num_present
    if num_present < num_samples and (leaves_out or config.on_bad_sample == "error"):
        raise ConfigError(
            f"{num_samples - num_present} of the {num_samples} samples of {place.source} have no "
            f"{column}, as their pictures were smaller",
            value=config.missing_latents,
            allowed=f"{LEAVE_OUT}, which goes on without them" if num_present else "another size",
            flag="--missing_latents" if num_present else "--image_size",
        )
    return num_samples


@functools.lru_cache(maxsize=16)
def find_present(place: MdsPlace, column: str) -> tuple[np.ndarray, ...]:
    """Return for each shard the positions, ascending, of the samples with a value in a column.

    The shards lie in the local folder of `place`, not compressed.
    """
    return tuple(
        np.flatnonzero(_read_sizes(Path(place.local), shard, column)).astype(np.uint32)
        if encodings_of(shard)[column] == BYTES
        else np.arange(shard["samples"], dtype=np.uint32)
        for shard in place.shards
    )


def describe_missing(place: MdsPlace) -> Iterator[str]:
    """Yield a sentence for each column of latents that is empty in some samples."""
    for column in sorted(find_image_columns(place.columns)):
        num_missing = place.num_samples - sum(map(len, find_present(place, column)))
        if num_missing:
            yield (
                f"{num_missing} of the {place.num_samples} samples have no {column}: "
                f"--missing_latents {LEAVE_OUT} trains without them"
            )


def check_lengths(
    place: MdsPlace, columns: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that some sample of the first shard has arrays of as many bytes as the model wants."""
    shard = place.shards[0]
    for part, shape in shapes.items():
        if place.remote is not None or encodings_of(shard)[columns[part]] != BYTES:
            continue
        found = set(_read_sizes(Path(place.local), shard, columns[part]).tolist()) - {0}
        wanted = math.prod(shape) * np.dtype(np.float16).itemsize
        if found and wanted not in found:
            raise ConfigError(
                f"The column {columns[part]} of {place.source} is of another model",
                value=f"{min(found)} bytes",
                allowed=f"{wanted} bytes, which are float16 numbers of the shape {shape}",
                flag="--model_name",
            )


def _read_sizes(folder: Path, shard: dict, column: str) -> np.ndarray:
    """Return the bytes of each sample of a shard in a column without a fixed size."""
    position = shard["column_names"].index(column)
    # A sample begins with the sizes, as uint32, of the columns without a fixed one.
    offset = 4 * sum(size is None for size in shard["column_sizes"][:position])
    path = folder / shard["raw_data"]["basename"]
    try:
        begins = read_bounds(path, shard)[:-1]
        data = np.memmap(path, np.uint8, mode="r")
        return data[begins[:, None] + np.arange(offset, offset + 4)].view("<u4")[:, 0]
    except (OSError, ValueError, IndexError) as error:
        raise RunError(f"Shard {path} is damaged or missing ({error}).") from error
