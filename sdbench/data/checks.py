"""Checks that data formats share, and the check of synthetic data; no torch."""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from sdbench.base.conditions import T5, Captions
from sdbench.base.errors import ConfigError
from sdbench.base.outside import read_json_object, refuse_errors
from sdbench.data.source import NUM_SYNTHETIC_IMAGES, VAE_FACTOR, SourceConfig
from sdbench.settings.data import DataSettings

PLACE_FLAGS = "--remote or --local"
TOKENIZER_FLAG = "--model_name"
# A class of transformers.
BYT5 = "ByT5Tokenizer"
# How the files of a format may end; ``.tar.gz`` and ``.tgz`` are gzip files.
ENDINGS = {"webdataset": (".tar", ".tar.gz", ".tgz"), "parquet": (".parquet", ".parq")}


def ends_as(name: str, data_format: str) -> bool:
    """Return True for a file of a format by its name, in small or capital letters."""
    return name.lower().endswith(ENDINGS[data_format])


@functools.cache
def tell_once(sentence: str) -> None:
    """Print a sentence on stderr, once per process."""
    print(sentence, file=sys.stderr)


def tell_unpacking(place: str, folder: str | Path) -> None:
    """Print where the packed files of a data set are unpacked to."""
    tell_once(f"The packed files of {place} are unpacked to {folder}.")


def bad_place(what: str, *, value: object, allowed: str) -> ConfigError:
    """Return the error for a data place with the wrong content."""
    return ConfigError(what, value=value, allowed=allowed, flag=PLACE_FLAGS)


def wrong_type(column: str, *, place: str, part: str, kind: str, allowed: str) -> ConfigError:
    """Return the error for a column of a type that cannot hold this `part` of a sample."""
    return bad_place(
        f"The column {column} of {place} is of a type that no {part} is read from",
        value=kind,
        allowed=allowed,
    )


def check_synthetic(config: SourceConfig) -> int:
    """Check the size of synthetic latents; return the number of samples of an epoch."""
    if config.wants_latents and config.image_size % VAE_FACTOR:
        raise ConfigError(
            "Latents need an image side that is a multiple of 8",
            value=config.image_size,
            allowed=f"a multiple of 8, e.g. {max(config.image_size // VAE_FACTOR, 1) * VAE_FACTOR}",
            flag="--image_size",
        )
    return config.num_images or NUM_SYNTHETIC_IMAGES


def check_flags(config: DataSettings, *, has_columns: bool) -> None:
    """Refuse flags that do not apply to a source of this format."""
    data_format = config.data_format
    is_encoded = data_format != "synthetic" and config.wants_latents
    streams_tars = config.is_streamed and data_format == "webdataset"
    when_made = "this flag when latents are made, by python -m sdbench precompute"
    refused = {  # flag to whether it is refused, and what is allowed
        "remote_files": (
            config.is_streamed and data_format not in ("webdataset", "parquet"),
            "copy (shards of MDS are copied as they are needed), or tars or parquet files",
        ),
        "local": (
            config.is_streamed and config.remote and config.local,
            "no folder for copies, or --remote_files copy",
        ),
        "tar_sizes": (
            config.tar_sizes is not None and not streams_tars,
            "this flag for tars with --remote_files stream",
        ),
        "filters": (
            config.filters and streams_tars,
            "--remote_files copy: how many samples of a stream meet them is not known beforehand",
        ),
        "missing_latents": (
            config.missing_latents != "error" and not (is_encoded and data_format == "mds"),
            "error, or --data_format mds --latents precomputed",
        ),
        "latents": (
            is_encoded and not has_columns,
            "online; python -m sdbench precompute makes latents of it",
        ),
        "horizontal_flip_probability": (
            is_encoded and config.horizontal_flip_probability,
            when_made,
        ),
        "crop": (is_encoded and config.crop != "center", when_made),
    }
    for name, (is_refused, allowed) in refused.items():
        if is_refused:
            what = "precomputed latents" if is_encoded else "data"
            raise ConfigError(
                f"--{name} cannot be followed for {what} of the format {data_format}",
                value=getattr(config, name),
                allowed=allowed,
                flag=f"--{name}",
            )


def check_tokenizer_folder(captions: Captions) -> None:
    """Check the folder of a tokenizer, if one is given: its files, and the ids that it makes."""
    folder = captions.folder
    if folder is None:
        return
    whole = folder / "tokenizer.json"
    if captions.kind == T5:
        is_there = whole.is_file() or names_byt5(folder)
        allowed = f"tokenizer.json, or the files of a {BYT5}, which has no vocabulary"
    else:
        names = ("vocab.json", "merges.txt")
        is_there = whole.is_file() or all((folder / name).is_file() for name in names)
        allowed = "tokenizer.json, or vocab.json with merges.txt"
    refusal = functools.partial(
        ConfigError, value=str(folder), allowed=allowed, flag=TOKENIZER_FLAG
    )
    if not is_there:
        raise refusal("The model folder holds no tokenizer")
    with refuse_tokenizer(folder):
        if whole.is_file():
            from tokenizers import Tokenizer

            ids = Tokenizer.from_file(str(whole)).get_vocab().values()
        elif captions.kind == T5:
            return
        else:
            ids = read_json_object(folder / "vocab.json").values()
        largest = max(map(int, ids))
    if captions.vocabulary_size is not None and largest >= captions.vocabulary_size:
        raise refusal(
            f"The tokenizer makes ids up to {largest}, and its text encoder knows those below "
            f"{captions.vocabulary_size}"
        )


def refuse_tokenizer(folder: Path) -> AbstractContextManager[None]:
    """Make a ConfigError of each error that a library raises for files of a tokenizer."""
    return refuse_errors(
        "The tokenizer of the model folder cannot be read",
        value=str(folder),
        allowed="files as they were saved",
        flag=TOKENIZER_FLAG,
    )


def names_byt5(folder: Path) -> bool:
    """Return whether a folder says that its tokenizer is that of ByT5, whose tokens are bytes."""
    try:
        return read_json_object(folder / "tokenizer_config.json").get("tokenizer_class") == BYT5
    except (OSError, ValueError):
        return False


def check_enough_samples(config: SourceConfig, *, num_samples: int) -> None:
    """Check that the data set fills a global batch; the error names the largest one that fits."""
    if num_samples >= config.global_batch_size:
        return
    place = config.streams or config.remote or config.local
    what = "The data set" if place is None else f"The data set {place}"
    if not num_samples:
        raise bad_place(f"{what} has no samples", value=place, allowed="one with samples")
    largest = num_samples // config.world_size * config.world_size
    nearest = f"at most {largest}" if largest else f"at most {num_samples} ranks"
    raise ConfigError(
        f"{what} has {num_samples} samples, fewer than one global batch "
        f"({config.device_batch_size} per rank x {config.world_size} ranks)",
        value=config.global_batch_size,
        allowed=nearest,
        flag="--batch_size (or another data set with --remote or --local)",
    )
