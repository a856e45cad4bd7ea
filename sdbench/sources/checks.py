"""Can this data feed a run? Answered from files' names and sizes, without torch.

The checks run on every rank before any weights are built.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from sdbench.errors import ConfigError
from sdbench.sources.config import NUM_SYNTHETIC_IMAGES, SourceConfig

MDS_COLUMNS = {"jpg", "caption"}


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


def check_mds(config: SourceConfig) -> int | None:
    """Check an MDS data set by its index and the sizes of its shards.

    What is only behind a URL cannot be read cheaply; it is checked when the loader is built.

    Returns:
        The number of samples, or None for a URL.
    """
    check_tokenizer_folder(config.tokenizer_folder)
    if config.latents != "online":
        raise ConfigError(
            "An MDS data set of images holds no latents",
            value=config.latents,
            allowed="online (or --use_synth_data for precomputed)",
            flag="--latents",
        )
    remote, local = locate_mds(remote=config.remote, local=config.local)
    if remote is not None and is_url(remote):
        return None
    folder = Path(remote or local)
    shards = read_shards(folder)
    for shard in shards:
        check_shard_file(folder, shard)
    num_samples = sum(shard["samples"] for shard in shards)
    check_enough_samples(config, num_samples=num_samples)
    return num_samples


def locate_mds(*, remote: str | None, local: str | None) -> tuple[str | None, str]:
    """Decide where shards are read from and where they are kept.

    A folder on disk is read in place: nothing is copied unless both flags are given. For a URL
    without ``--local`` the cache is a folder of the system's temporary directory named after the
    URL, because two data sets must not share one (the reference has a single fixed default,
    /tmp/mds-cache/mds-laion-2/).

    Returns:
        (remote, local) as Streaming takes them; remote is None when nothing is to be copied.
    """
    if remote is None or remote == local:
        assert local is not None, "resolve_format lets no MDS data set without a folder pass"
        return None, local
    if local is not None:
        return remote, local
    if not is_url(remote):
        return None, remote
    name = remote.rstrip("/").rsplit("/", 1)[-1]
    digest = hashlib.sha256(remote.encode()).hexdigest()[:12]
    return remote, str(Path(tempfile.gettempdir(), "mds-cache", f"{name}-{digest}"))


def is_url(place: str) -> bool:
    """Whether `place` is in an object store rather than on disk."""
    return "://" in place


def read_shards(folder: Path) -> list[dict]:
    """Read the list of shards in a folder's ``index.json``.

    Raises:
        ConfigError: There is no such folder, no index, or it is not one of image-caption pairs.
    """
    flag = "--remote or --local"
    allowed = "a folder made by `python -m sdbench convert`"
    if not folder.is_dir():
        raise ConfigError("No such data folder", value=str(folder), allowed=allowed, flag=flag)
    index = folder / "index.json"
    if not index.is_file():
        below = [str(path.parent) for path in sorted(folder.glob("*/index.json"))]
        what = (
            "The data folder holds no index.json"
            if any(folder.iterdir())
            else ("The data folder is empty")
        )
        nearest = f"; nearest: {', '.join(below)}" if below else ""
        raise ConfigError(what, value=str(folder), allowed=allowed + nearest, flag=flag)
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["shards"]
        formats = {shard["format"] for shard in shards}
        columns = set.intersection(*(set(shard["column_names"]) for shard in shards))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"index.json is damaged or holds no shards ({error})",
            value=str(index),
            allowed=allowed,
            flag=flag,
        ) from error
    if formats != {"mds"} or not columns >= MDS_COLUMNS:
        raise ConfigError(
            "Not an MDS data set of images with captions",
            value=f"{'/'.join(sorted(formats))} with columns {', '.join(sorted(columns))}",
            allowed="mds with columns jpg and caption",
            flag=flag,
        )
    return shards


def check_shard_file(folder: Path, shard: dict) -> None:
    """Check that a shard's file, raw or compressed, is there and as long as the index says.

    Raises:
        ConfigError: It is missing or has been cut.
    """
    files = [shard["raw_data"]] + ([shard["zip_data"]] if shard["zip_data"] else [])
    present = [file for file in files if (folder / file["basename"]).is_file()]
    if not present:
        raise ConfigError(
            f"A shard that index.json names is missing from {folder}",
            value=files[-1]["basename"],
            allowed="a complete data set: copy or convert it again",
            flag="--remote or --local",
        )
    path = folder / present[0]["basename"]
    if path.stat().st_size != present[0]["bytes"]:
        raise ConfigError(
            f"A shard is damaged: index.json says that {path} has {present[0]['bytes']} bytes",
            value=path.stat().st_size,
            allowed="a complete data set: copy or convert it again",
            flag="--remote or --local",
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
