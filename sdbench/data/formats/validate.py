"""Can this data feed a run? Answered from files' names and sizes, without torch.

The checks run on every rank before any weights are built. Each data format has its own, the ones of
synthetic and MDS data and those that formats share are here.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sdbench.base.errors import ConfigError
from sdbench.data.formats.missing_latents import count_samples
from sdbench.data.latent_columns import array_shapes, find_latent_columns
from sdbench.data.remote import cache_folder, fetch, is_url
from sdbench.data.source import NUM_SYNTHETIC_IMAGES, SourceConfig

INDEX_NAME = "index.json"
MDS_COLUMNS = {"jpg", "caption"}
MADE_BY = "a folder made by `python -m sdbench convert` or `precompute`"
PLACE_FLAGS = "--remote or --local"


def check_synthetic(config: SourceConfig) -> int:
    """Check that one global batch fits into an epoch of synthetic data; return its samples."""
    num_samples = config.num_images or NUM_SYNTHETIC_IMAGES
    check_enough_samples(config, num_samples=num_samples)
    if config.latents == "precomputed" and config.image_size % 8:
        raise ConfigError(
            "Latents have an eighth of the image's side",
            value=config.image_size,
            allowed=f"a multiple of 8, e.g. {max(config.image_size // 8, 1) * 8}",
            flag="--image_size",
        )
    return num_samples


@dataclass(frozen=True, kw_only=True)
class Place:
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


def check_mds(config: SourceConfig) -> int:
    """Check MDS data by index and, on disk, by the sizes of shards and of latents stored as bytes.

    Of a URL the index is downloaded, nothing else.

    Returns:
        The number of samples of an epoch.
    """
    if config.latents == "online":
        check_tokenizer_folder(config.tokenizer_folder)
    else:
        check_no_captions_dropped(config)
    num_samples = 0
    for place in locate_mds(config):
        source = place.source
        shards = parse_index(place.index, source=source)
        check_columns(shards, source=source, config=config)
        check_hashes(shards, source=source, wanted=config.validate_hash)
        if not is_url(source):
            for shard in shards:
                file = shard["raw_data"] if place.remote is None else copied_file(shard)
                check_shard_file(Path(source), file)
        num_samples += count_samples(place, shards, config=config)
    check_enough_samples(config, num_samples=num_samples)
    return num_samples


def locate_mds(config: SourceConfig) -> list[Place]:
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


def locate(remote: str | None, local: str | None, *, proportion: float | None = None) -> Place:
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
        return Place(remote=remote, local=local, proportion=proportion, index=index)
    if not is_url(remote):
        if not _has_packed_shards(Path(remote), index):
            return Place(remote=None, local=remote, proportion=proportion, index=index)
        remote = str(Path(remote).absolute())
    digest = hashlib.sha256(index).hexdigest()
    cache = cache_folder(f"{remote}\n{digest}", None)
    return Place(remote=remote, local=str(cache), proportion=proportion, index=index)


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


def read_shards(folder: Path) -> list[dict]:
    """The entries of the shards in the ``index.json`` of a folder.

    Raises:
        ConfigError: There is no such folder, no index, or a damaged one.
    """
    return parse_index(read_index(str(folder)), source=str(folder))


def check_columns(shards: list[dict], *, source: str, config: SourceConfig) -> None:
    """Check that every shard has the columns that `config` asks for.

    Raises:
        ConfigError: A column is missing.
    """
    columns = set.intersection(*(set(shard["column_names"]) for shard in shards))
    if config.latents == "precomputed":
        found = find_latent_columns(columns, image_size=config.image_size)
        for shard in shards:
            check_encodings(shard, found, source=source, config=config)
    elif not columns >= MDS_COLUMNS:
        raise ConfigError(
            f"{source} is not a data set of images with captions",
            value=f"columns {', '.join(sorted(columns))}",
            allowed="columns jpg and caption; for latents --latents precomputed",
            flag=PLACE_FLAGS,
        )


def check_encodings(
    shard: dict, columns: Mapping[str, str], *, source: str, config: SourceConfig
) -> None:
    """Check that the arrays of a shard have the shapes that the model wants.

    Raises:
        ConfigError: One has another shape. Those without a fixed shape are checked as they come.
    """
    encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    for name, shape in array_shapes(columns, config=config).items():
        encoding = encodings[columns[name]]
        stored = encoding.split(":")[2:]
        if stored and stored[0] != ",".join(map(str, shape)):
            raise ConfigError(
                f"The column {columns[name]} of {source} is of another model",
                value=encoding,
                allowed=f"arrays of the shape {shape}",
                flag="--model_name",
            )


def check_hashes(shards: list[dict], *, source: str, wanted: str) -> None:
    """Check that every shard has the hash that is to be compared.

    Raises:
        ConfigError: It has not.
    """
    if wanted in ("auto", "none"):
        return
    common = set.intersection(*(set(shard["raw_data"]["hashes"]) for shard in shards))
    if wanted not in common:
        raise ConfigError(
            f"{source} has no such hash of every shard",
            value=wanted,
            allowed=", ".join(["auto", "none", *sorted(common)]),
            flag="--validate_hash",
        )


def check_images_wanted(config: SourceConfig, *, what: str) -> None:
    """Check that latents are not asked of data that cannot hold them.

    Raises:
        ConfigError: They are.
    """
    if config.latents != "online":
        raise ConfigError(
            f"{what} holds no latents",
            value=config.latents,
            allowed="online; python -m sdbench precompute makes latents of it",
            flag="--latents",
        )


def check_no_captions_dropped(config: SourceConfig) -> None:
    """Check that nothing is asked of encoded samples that only pictures and texts allow.

    Raises:
        ConfigError: Captions are to be dropped, or pictures to be cropped or flipped.
    """
    changes = {
        "caption_drop_probability": config.caption_drop_probability,
        "horizontal_flip_probability": config.horizontal_flip_probability,
        "crop": config.crop if config.crop != "center" else 0,
    }
    for name, value in changes.items():
        if value:
            raise ConfigError(
                "Precomputed latents cannot be changed any more",
                value=value,
                allowed="this flag when they are made, by python -m sdbench precompute",
                flag=f"--{name}",
            )


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


def check_tokenizer_folder(folder: Path | None) -> None:
    """Check that a tokenizer can be loaded from `folder`, if one is given.

    Raises:
        ConfigError: Neither form of a CLIP tokenizer is there.
    """
    if folder is None or (folder / "tokenizer.json").is_file():
        return
    if not all((folder / name).is_file() for name in ("vocab.json", "merges.txt")):
        raise ConfigError(
            "The model folder holds no tokenizer",
            value=str(folder),
            allowed="tokenizer.json, or vocab.json with merges.txt",
            flag="--model_name",
        )


def check_enough_samples(config: SourceConfig, *, num_samples: int) -> None:
    """Check that the data set holds at least one batch of all ranks together.

    Raises:
        ConfigError: It does not; the largest batch that fits is named.
    """
    if num_samples >= config.global_batch_size:
        return
    largest = num_samples // config.world_size * config.world_size
    nearest = f"at most {largest}" if largest else f"fewer than {config.world_size} ranks"
    raise ConfigError(
        f"The data set has {num_samples} samples, fewer than one global batch "
        f"({config.device_batch_size} per rank x {config.world_size} ranks)",
        value=config.global_batch_size,
        allowed=nearest,
        flag="--batch_size (or another data set with --remote or --local)",
    )
