"""Where MDS data sets lie, what index.json says of them, and whether they fit a run; no torch."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdbench.base.errors import ConfigError
from sdbench.data.formats.checks import (
    PLACE_FLAGS,
    check_enough_samples,
    check_no_captions_dropped,
    check_tokenizer_folder,
)
from sdbench.data.formats.missing_latents import count_samples
from sdbench.data.latent_columns import find_latent_columns
from sdbench.data.remote import cache_folder, fetch, is_url
from sdbench.data.samples import SampleType
from sdbench.data.source import SourceConfig

INDEX_NAME = "index.json"
MDS_COLUMNS = {"jpg", "caption"}
MADE_BY = "a folder made by `python -m sdbench convert` or `precompute`"
# Of several hashes in an index the one that is cheapest to compute is checked.
HASHES_BY_COST = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32", "sha1", "md5", "sha256")


@dataclass(frozen=True, kw_only=True)
class MdsPlace:
    """Where one MDS data set is.

    Attributes:
        remote: Folder or URL that shards are copied from, or None when they are read in place.
        local: Folder where shards lie or are kept.
        proportion: Share of the samples of an epoch, or None when there is a single data set.
        index: Content of its index.json.
    """

    remote: str | None
    local: str
    proportion: float | None
    index: bytes

    @property
    def source(self) -> str:
        """The user's own folder or URL."""
        return self.remote or self.local

    @functools.cached_property
    def shards(self) -> list[dict]:
        """The entries of the shards in its index.json.

        Raises:
            ConfigError: It is damaged, or not one of MDS shards.
        """
        return parse_index(self.index, source=self.source)


def check(config: SourceConfig) -> int:
    """Check MDS data by index and, on disk, by the sizes of shards and of latents stored as bytes.

    Of a URL the index is downloaded, nothing else.

    Returns:
        The number of samples of an epoch.
    """
    if config.wants_latents:
        check_no_captions_dropped(config)
    else:
        check_tokenizer_folder(config.tokenizer_folder)
    num_samples = 0
    for place in locate_mds(config):
        check_columns(place, config=config)
        check_hashes(place, wanted=config.validate_hash)
        if not is_url(place.source):
            for shard in place.shards:
                file = shard["raw_data"] if place.remote is None else copied_file(shard)
                check_shard_file(Path(place.source), file)
        num_samples += count_samples(place, config=config)
    check_enough_samples(config, num_samples=num_samples)
    return num_samples


def locate_mds(config: SourceConfig) -> list[MdsPlace]:
    """Decide where shards are read from and where they are kept.

    A folder on disk is read in place: nothing is copied unless both flags are given, or shards
    lie there in their compressed form alone, which are unpacked elsewhere. For those, and for a URL
    without ``--local``, the copies go to a folder of the user's cache that is named after the place
    and its index, because two data sets, or two versions of one, must not share a cache (the
    reference has a single fixed default, /tmp/mds-cache/mds-laion-2/).

    Raises:
        ConfigError: A place has no index, the cache given is another data set's, or as
            `private_folder`.
    """
    if config.streams is None:
        return [locate(config.remote, config.local)]
    return [
        locate(source, None, proportion=proportion)
        for source, proportion in parse_streams(config.streams)
    ]


def parse_streams(text: str) -> list[tuple[str, float]]:
    """Take ``PLACE=PROPORTION,PLACE=PROPORTION`` apart.

    Raises:
        ConfigError: It is not of that form, or a proportion is not above 0.
    """
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


def locate(remote: str | None, local: str | None, *, proportion: float | None = None) -> MdsPlace:
    """Decide of one data set as `locate_mds` does of all.

    Raises:
        ConfigError: As `locate_mds`.
    """
    if remote is None or (local is not None and _is_same_folder(remote, local)):
        assert local is not None, "resolve_format lets no MDS data set without a folder pass"
        remote, local = local, None
    index = read_index(remote)
    if local is not None:
        check_cache(Path(local), remote=remote, index=index)
        return MdsPlace(remote=remote, local=local, proportion=proportion, index=index)
    if not is_url(remote):
        if not _has_packed_shards(Path(remote), index):
            return MdsPlace(remote=None, local=remote, proportion=proportion, index=index)
        remote = str(Path(remote).absolute())
    digest = hashlib.sha256(index).hexdigest()
    cache = cache_folder(f"{remote}\n{digest}", None)
    return MdsPlace(remote=remote, local=str(cache), proportion=proportion, index=index)


def _is_same_folder(remote: str, local: str) -> bool:
    return not is_url(remote) and Path(remote).resolve() == Path(local).resolve()


def _has_packed_shards(folder: Path, index: bytes) -> bool:
    """Whether a shard lies there in its compressed form alone; an index that is damaged has none.

    Args:
        folder: Of the data set.
        index: Content of its index.json.
    """
    try:
        shards = parse_index(index, source=str(folder))
    except ConfigError:
        return False
    return any(
        shard["zip_data"] and not (folder / shard["raw_data"]["basename"]).is_file()
        for shard in shards
    )


def check_cache(cache: Path, *, remote: str, index: bytes) -> None:
    """Check that what a cache folder holds are copies of this data set's shards.

    Raises:
        ConfigError: It holds another data set, or another version of this one.
    """
    cached = cache / INDEX_NAME
    if cached.is_file() and cached.read_bytes() != index:
        raise ConfigError(
            f"The cache holds another data set, or another version of {remote}",
            value=str(cache),
            allowed="a folder of its own for each data set, or one to be emptied first",
            flag="--local",
        )


def read_index(source: str) -> bytes:
    """Read the ``index.json`` of a folder or a URL.

    Raises:
        ConfigError: There is none.
    """
    if is_url(source):
        with tempfile.TemporaryDirectory() as folder:
            return fetch(f"{source.rstrip('/')}/{INDEX_NAME}", cache=Path(folder)).read_bytes()
    folder = Path(source)
    index = folder / INDEX_NAME
    if index.is_file():
        return index.read_bytes()
    if not folder.is_dir():
        what = "No such data folder"
    elif any(folder.iterdir()):
        what = "The data folder holds no index.json"
    else:
        what = "The data folder is empty"
    below = [str(path.parent) for path in sorted(folder.glob(f"*/{INDEX_NAME}"))]
    nearest = f"; nearest: {', '.join(below)}" if below else ""
    raise ConfigError(what, value=source, allowed=MADE_BY + nearest, flag=PLACE_FLAGS)


def parse_index(index: bytes, *, source: str) -> list[dict]:
    """The entries of the shards in an ``index.json``.

    Args:
        index: Its content.
        source: Where it is from, for messages.

    Raises:
        ConfigError: It is damaged, or not one of MDS shards.
    """
    try:
        shards = json.loads(index)["shards"]
        formats = {shard["format"] for shard in shards}
        complete = all(
            {"samples", "column_names", "raw_data", "zip_data"} <= set(shard) for shard in shards
        )
        if not complete or formats != {"mds"}:
            raise ValueError(f"no MDS shards: {', '.join(sorted(formats)) or 'none at all'}")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"index.json is damaged or holds no shards ({error})",
            value=f"{source.rstrip('/')}/{INDEX_NAME}",
            allowed=MADE_BY,
            flag=PLACE_FLAGS,
        ) from error
    return shards


def check_columns(place: MdsPlace, *, config: SourceConfig) -> None:
    """Check that every shard has the columns that `config` asks for.

    Raises:
        ConfigError: A column is missing, or holds arrays of another shape. (Arrays without a fixed
            shape are checked when they are read.)
    """
    columns = set.intersection(*(set(shard["column_names"]) for shard in place.shards))
    if config.wants_latents:
        found = find_latent_columns(columns, image_size=config.image_size)
        for shard in place.shards:
            _check_encodings(shard, found, source=place.source, config=config)
    elif not columns >= MDS_COLUMNS:
        raise ConfigError(
            f"{place.source} is not a data set of images with captions",
            value=f"columns {', '.join(sorted(columns))}",
            allowed="columns jpg and caption; for latents --latents precomputed",
            flag=PLACE_FLAGS,
        )


def _check_encodings(
    shard: dict, columns: Mapping[str, str], *, source: str, config: SourceConfig
) -> None:
    encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    for name, shape in SampleType(tuple(columns)).array_shapes(config).items():
        encoding = encodings[columns[name]]
        stored = encoding.split(":")[2:]
        if stored and stored[0] != ",".join(map(str, shape)):
            raise ConfigError(
                f"The column {columns[name]} of {source} is of another model",
                value=encoding,
                allowed=f"arrays of the shape {shape}",
                flag="--model_name",
            )


def check_hashes(place: MdsPlace, *, wanted: str) -> None:
    """Check that every shard has the hash that is to be compared.

    Raises:
        ConfigError: It has not.
    """
    if wanted in ("auto", "none"):
        return
    common = set.intersection(*(set(shard["raw_data"]["hashes"]) for shard in place.shards))
    if wanted not in common:
        raise ConfigError(
            f"{place.source} has no such hash of every shard",
            value=wanted,
            allowed=", ".join(["auto", "none", *sorted(common)]),
            flag="--validate_hash",
        )


def choose_hash(hashes: Mapping[str, str], *, wanted: str) -> str | None:
    """Which of a shard's hashes to check.

    Args:
        hashes: Algorithm to digest, as index.json has them.
        wanted: ``auto``, ``none``, or an algorithm.

    Returns:
        An algorithm, or None when there is nothing to check.
    """
    if wanted == "auto":
        return next((name for name in HASHES_BY_COST if name in hashes), None)
    return None if wanted == "none" else wanted


def copied_file(shard: dict) -> dict:
    """The entry of the file that Streaming copies: the compressed form, where there is one."""
    return shard["zip_data"] or shard["raw_data"]


def check_shard_file(folder: Path, file: dict) -> None:
    """Check that the file of a shard is there and as long as the index says.

    Args:
        folder: Of the data set.
        file: Its entry in the index, raw or compressed.

    Raises:
        ConfigError: It is missing or has been cut.
    """
    path = folder / file["basename"]
    if not path.is_file():
        raise ConfigError(
            f"A shard that index.json names is missing from {folder}",
            value=file["basename"],
            allowed="a complete data set: copy or convert it again",
            flag=PLACE_FLAGS,
        )
    if path.stat().st_size != file["bytes"]:
        raise ConfigError(
            f"A shard is damaged: index.json says that {path} has {file['bytes']} bytes",
            value=path.stat().st_size,
            allowed="a complete data set: copy or convert it again",
            flag=PLACE_FLAGS,
        )
