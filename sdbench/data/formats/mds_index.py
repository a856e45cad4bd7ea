"""MDS data sets: their location, the content of index.json, and checks for a run; no torch.

MosaicML diffusion's precompute_latents.py stores latents as the bytes of float16 numbers, and no
bytes where the picture was smaller than the size that is asked for: such a latent is missing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.files import new_file
from sdbench.data.checks import bad_place, wrong_type
from sdbench.data.formats.latent_columns import columns_of, find_image_columns
from sdbench.data.formats.mds_entries import (
    INDEX_NAME,
    check_shard,
    encodings_of,
    parse_index,
    read_bounds,
)
from sdbench.data.places.listing import describe_neighbours
from sdbench.data.places.remote import cache_folder, is_url
from sdbench.data.places.remote_files import fetch
from sdbench.data.samples import SampleType
from sdbench.data.source import SourceConfig
from sdbench.settings.data import DataSettings

# The encoding of a column that may be empty.
BYTES = "bytes"
# Encodings of pictures and captions: the bytes of a file, a picture of PIL, text.
PICTURE_ENCODINGS = {"image": (BYTES, "jpeg", "png", "pil"), "caption": ("str",)}
MADE_BY = "a folder made by `python -m sdbench convert` or `precompute`"
# Of several hashes in an index, the first one in this list is checked.
HASHES_BY_COST = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32", "sha1", "md5", "sha256")
# The value of --missing_latents with which samples are left out.
LEAVE_OUT = "leave_out"


@dataclass(frozen=True, kw_only=True)
class MdsPlace:
    """Where one MDS data set is."""

    remote: str | None  # a folder or URL that shards are copied from; None: they are read in place
    local: str  # the folder where shards lie or are kept
    proportion: float | None  # the share of an epoch; None for a single data set
    index: bytes  # the content of its index.json

    @property
    def source(self) -> str:
        """The user's own folder or URL."""
        return self.remote or self.local

    @functools.cached_property
    def shards(self) -> list[dict]:
        """The entries of the shards in its index.json; a `ConfigError` if that is damaged."""
        try:
            return parse_index(self.index)
        except ValueError as error:
            raise bad_place(
                f"index.json is damaged or holds no shards ({error})",
                value=f"{self.source.rstrip('/')}/{INDEX_NAME}",
                allowed=MADE_BY,
            ) from error

    @property
    def columns(self) -> set[str]:
        """Names of the columns that all shards have."""
        return set.intersection(*(set(shard["column_names"]) for shard in self.shards))

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(shard["samples"] for shard in self.shards)


def check(config: SourceConfig) -> int:
    """Check indexes and local shards; return the number of samples of an epoch."""
    num_samples = 0
    for place in locate_mds(config):
        columns = _check_columns(place, config=config)
        _check_hashes(place, wanted=config.validate_hash)
        check_files(place)
        if config.wants_latents:
            column, *_ = columns.values()
            num_samples += _count_with_latents(place, column, config=config)
        else:
            num_samples += place.num_samples
    return num_samples


def check_files(place: MdsPlace) -> None:
    """Check the shards of a data set on disk by their sizes and headers."""
    if is_url(place.source):
        return
    folder = Path(place.source)
    for shard in place.shards:
        file = shard["raw_data"] if place.remote is None else copied_file(shard)
        path = folder / file["basename"]
        try:
            check_shard(path, file, shard, hashes={})
        except (OSError, ValueError) as error:
            raise bad_place(
                f"A shard is missing, is damaged, or contradicts {INDEX_NAME} ({error})",
                value=str(path),
                allowed="a complete data set: copy or convert it again",
            ) from error


def read_columns(config: SourceConfig) -> set[str]:
    """Return the names of the columns that all shards of a single data set have."""
    (place,) = locate_mds(config)
    return place.columns


def list_files(config: SourceConfig) -> list[str]:
    """Return the index of each data set: shards of all data sets have the same names."""
    return [f"{place.source.rstrip('/')}/{INDEX_NAME}" for place in locate_mds(config)]


def locate_mds(config: SourceConfig) -> list[MdsPlace]:
    """Decide for each data set where shards are read from and where they are kept, by `locate`."""
    if config.streams is None:
        return [locate(config.remote, config.local)]
    return [
        locate(source, None, proportion=proportion)
        for source, proportion in parse_streams(config.streams)
    ]


def parse_streams(text: str) -> list[tuple[str, float]]:
    """Parse ``PLACE=PROPORTION,PLACE=PROPORTION``; a proportion has to be above 0."""
    streams = []
    for part in text.split(","):
        source, _, proportion = part.strip().rpartition("=")
        try:
            number = float(proportion)
        except ValueError:
            number = 0.0
        if not source or not 0 < number < float("inf"):
            raise ConfigError(
                "A stream has no place or no proportion",
                value=part,
                allowed="PLACE=PROPORTION,... e.g. s3://bucket/a=0.7,data/b=0.3",
                flag="--streams",
            )
        streams.append((source, number))
    return streams


def places_of(source: DataSettings) -> list[str]:
    """Return the places of the data sets that a source, or settings, of any format name."""
    if source.streams is not None:
        return [place for place, _ in parse_streams(source.streams)]
    return [source.remote or source.local or ""]


def locate(remote: str | None, local: str | None, *, proportion: float | None = None) -> MdsPlace:
    """Decide where the shards of one data set are read from and where they are kept.

    A folder on disk is read in place, unless both places are given, or a shard lies there only in
    compressed form. Copies of a URL without `local`, and decompressed shards, go to a folder of the
    user's cache named after the place and its index: two data sets, or two versions of one, must
    not share a cache.
    """
    if remote is None or (local and os.path.realpath(local) == os.path.realpath(remote)):
        remote, local = local, None
    index = _read_index(remote)
    if local is not None:
        copy = Path(local, INDEX_NAME)
        if copy.is_file() and copy.read_bytes() != index:
            raise ConfigError(
                f"The folder for copies holds another data set, or another version of {remote}",
                value=local,
                allowed="a separate folder for each data set, or this one emptied",
                flag="--local",
            )
    elif not is_url(remote):
        in_place = MdsPlace(remote=None, local=remote, proportion=proportion, index=index)
        if not _has_packed_shards(in_place):
            return in_place
        remote = str(Path(remote).absolute())
    if local is None:
        local = str(cache_folder(f"{remote}\n{hashlib.sha256(index).hexdigest()}", None))
    return MdsPlace(remote=remote, local=local, proportion=proportion, index=index)


def _has_packed_shards(place: MdsPlace) -> bool:
    """Return True if a shard lies there only in compressed form; False for a damaged index."""
    try:
        return any(is_packed(shard, place.local) for shard in place.shards)
    except ConfigError:
        return False


def is_packed(shard: dict, folder: str) -> bool:
    """Return True for a shard with a compressed form that is not decompressed in `folder`."""
    return bool(shard["zip_data"]) and not Path(folder, shard["raw_data"]["basename"]).is_file()


def keep_index(place: MdsPlace) -> None:
    """Write the index.json of a data set to the folder for copies of its shards."""
    index = Path(place.local, INDEX_NAME)
    if index.is_file() and index.read_bytes() == place.index:
        return
    index.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with new_file(index) as new:
        new.write_bytes(place.index)


def _read_index(source: str) -> bytes:
    """Read the ``index.json`` of a folder or a URL."""
    if is_url(source):
        with tempfile.TemporaryDirectory() as folder:
            return fetch(f"{source.rstrip('/')}/{INDEX_NAME}", cache=Path(folder)).read_bytes()
    folder = Path(source)
    index = folder / INDEX_NAME
    if index.is_file():
        return index.read_bytes()
    if not folder.is_dir():
        raise bad_place(
            "No such data folder",
            value=source,
            allowed=f"a folder of pictures, or {MADE_BY}; {describe_neighbours(source)}",
        )
    below = [str(path.parent) for path in sorted(folder.glob(f"*/{INDEX_NAME}"))]
    raise bad_place(
        f"The data folder holds no {INDEX_NAME}",
        value=source,
        allowed=MADE_BY + (f"; nearest: {', '.join(below)}" if below else ""),
    )


def _check_columns(place: MdsPlace, *, config: SourceConfig) -> dict[str, str]:
    """Check that every shard has the columns that `config` asks for, and return them by part.

    Arrays without a fixed shape are checked when they are read.
    """
    columns = columns_of(place.columns, config)
    shapes = SampleType.of(columns).array_shapes(config)
    for shard in place.shards:
        for part, column in columns.items():
            encoding = encodings_of(shard)[column]
            stored = encoding.split(":")[2:]
            if not shapes and encoding not in PICTURE_ENCODINGS[part]:
                allowed = ", ".join(PICTURE_ENCODINGS[part])
                raise wrong_type(
                    column, place=place.source, part=part, kind=encoding, allowed=allowed
                )
            if shapes and None in shapes[part] and encoding == BYTES:
                raise wrong_type(
                    column,
                    place=place.source,
                    part=part,
                    kind=encoding,
                    allowed="arrays that tell their shape",
                )
            if shapes and stored and stored[0] != ",".join(map(str, shapes[part])):
                raise ConfigError(
                    f"The column {column} of {place.source} is of another model",
                    value=encoding,
                    allowed=f"arrays of the shape {shapes[part]}",
                    flag="--model_name",
                )
    return columns


def _check_hashes(place: MdsPlace, *, wanted: str) -> None:
    """Check that every shard has the hash that is to be compared."""
    if wanted in ("auto", "none"):
        return
    common = set.intersection(*(set(shard["raw_data"]["hashes"]) for shard in place.shards))
    if wanted not in common:
        raise ConfigError(
            f"Not every shard of {place.source} has this hash",
            value=wanted,
            allowed=", ".join(["auto", "none", *sorted(common)]),
            flag="--validate_hash",
        )


def choose_hashes(hashes: Mapping[str, str], *, wanted: str) -> dict[str, str]:
    """Choose at most one of a file's hashes by the value of ``--validate_hash``."""
    if wanted == "auto":
        wanted = next((name for name in HASHES_BY_COST if name in hashes), "none")
    return {wanted: hashes[wanted]} if wanted in hashes else {}


def copied_file(shard: dict) -> dict:
    """Return the entry of the file that Streaming copies: the compressed form, if there is one."""
    return shard["zip_data"] or shard["raw_data"]


def _count_with_latents(place: MdsPlace, column: str, *, config: SourceConfig) -> int:
    """Count the samples of an epoch, without those that lack `column` if they are left out."""
    num_samples = place.num_samples
    leaves_out = config.missing_latents == LEAVE_OUT
    if leaves_out and (place.remote is not None or config.streams is not None):
        raise ConfigError(
            "Samples without latents can only be left out of a single folder of shards on disk",
            value=config.streams or place.source,
            allowed="one folder of uncompressed shards, without a folder for copies",
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
            f"{column}, because their pictures were smaller",
            value=config.missing_latents,
            allowed=f"{LEAVE_OUT}, which goes on without them" if num_present else "another size",
            flag="--missing_latents" if num_present else "--image_size",
        )
    return num_samples


def describe_missing(place: MdsPlace) -> Iterator[str]:
    """Yield a sentence for each column of latents that is empty in some samples."""
    for column in sorted(find_image_columns(place.columns)):
        num_missing = place.num_samples - sum(map(len, find_present(place, column)))
        if num_missing:
            yield (
                f"{num_missing} of the {place.num_samples} samples have no {column}: "
                f"--missing_latents {LEAVE_OUT} trains without them"
            )


@functools.lru_cache(maxsize=16)
def find_present(place: MdsPlace, column: str) -> tuple[np.ndarray, ...]:
    """Return for each shard the positions, ascending, of the samples with a value in a column.

    The shards lie in the local folder of `place`, not compressed.
    """
    return tuple(_find_in_shard(Path(place.local), shard, column) for shard in place.shards)


def _find_in_shard(folder: Path, shard: dict, column: str) -> np.ndarray:
    if encodings_of(shard)[column] != BYTES:
        return np.arange(shard["samples"], dtype=np.uint32)
    position = shard["column_names"].index(column)
    # A sample begins with the sizes, as uint32, of the columns without a fixed one.
    offset = 4 * sum(size is None for size in shard["column_sizes"][:position])
    path = folder / shard["raw_data"]["basename"]
    try:
        begins = read_bounds(path, shard)[:-1]
        data = np.memmap(path, np.uint8, mode="r")
        sizes = data[begins[:, None] + np.arange(offset, offset + 4)].view("<u4")[:, 0]
    except (OSError, ValueError, IndexError) as error:
        raise RunError(f"Shard {path} is damaged or missing ({error}).") from error
    return np.flatnonzero(sizes).astype(np.uint32)
