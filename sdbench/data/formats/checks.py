"""Checks that data formats share, and the check of synthetic data; no torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from pathlib import Path

from sdbench.base.errors import ConfigError
from sdbench.data.source import NUM_SYNTHETIC_IMAGES, VAE_FACTOR, SourceConfig

PLACE_FLAGS = "--remote or --local"
# How the files of a kind may end; the last two of the first are gzip files.
ENDINGS = {".tar": (".tar", ".tar.gz", ".tgz"), ".parquet": (".parquet", ".parq")}


def ends_as(name: str, suffix: str) -> bool:
    """Return True for a file of a kind by its name, in small or capital letters."""
    return name.lower().endswith(ENDINGS[suffix])


# Columns of pictures and of captions, in the order of preference: ours and LAION's, Hugging Face's,
# others'.
IMAGE_COLUMNS = ("jpg", "image", "image_bytes", "image.bytes", "png", "webp")
CAPTION_COLUMNS = ("caption", "text", "TEXT")


@functools.cache
def tell_once(sentence: str) -> None:
    """Print a sentence on stderr, at the first call with it in this process."""
    print(sentence, file=sys.stderr)


def find_picture_columns(names: Collection[str]) -> dict[str, str] | None:
    """Map ``image`` and ``caption`` to the name of the column; None if one is missing."""
    image = next((name for name in IMAGE_COLUMNS if name in names), None)
    caption = next((name for name in CAPTION_COLUMNS if name in names), None)
    return None if image is None or caption is None else {"image": image, "caption": caption}


def lacks_columns(names: Collection[str], *, place: str) -> ConfigError:
    """Return the error for a data set without the columns that `find_picture_columns` looks for."""
    wanted = f"{' | '.join(IMAGE_COLUMNS)}, and {' | '.join(CAPTION_COLUMNS)}"
    return ConfigError(
        f"{place} lacks a column of pictures with captions",
        value=f"columns {', '.join(sorted(names))}",
        allowed=f"{wanted}; for latents --latents precomputed",
        flag=PLACE_FLAGS,
    )


def wrong_type(column: str, *, place: str, part: str, kind: str, allowed: str) -> ConfigError:
    """Return the error for a column whose type no `part` of a sample is read from."""
    return ConfigError(
        f"The column {column} of {place} is of a type that no {part} is read from",
        value=kind,
        allowed=allowed,
        flag=PLACE_FLAGS,
    )


def check_synthetic(config: SourceConfig) -> int:
    """Check the size of synthetic latents; return the number of samples of an epoch."""
    if config.wants_latents and config.image_size % VAE_FACTOR:
        raise ConfigError(
            "Latents have an eighth of the image's side",
            value=config.image_size,
            allowed=f"a multiple of 8, e.g. {max(config.image_size // VAE_FACTOR, 1) * VAE_FACTOR}",
            flag="--image_size",
        )
    return config.num_images or NUM_SYNTHETIC_IMAGES


def check_not_augmented(config: SourceConfig) -> None:
    """Refuse crops, flips and dropped captions of encoded samples."""
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


def check_tokenizer_folder(folder: Path | None) -> None:
    """Check that a CLIP tokenizer can be loaded from `folder`, if one is given."""
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
    """Check that the data set fills a global batch; the error names the largest that fits."""
    if num_samples >= config.global_batch_size:
        return
    place = config.streams or config.remote or config.local
    what = "The data set" if place is None else f"The data set {place}"
    if not num_samples:
        raise ConfigError(
            f"{what} has no samples", value=place, allowed="one with samples", flag=PLACE_FLAGS
        )
    largest = num_samples // config.world_size * config.world_size
    nearest = f"at most {largest}" if largest else f"at most {num_samples} ranks"
    raise ConfigError(
        f"{what} has {num_samples} samples, fewer than one global batch "
        f"({config.device_batch_size} per rank x {config.world_size} ranks)",
        value=config.global_batch_size,
        allowed=nearest,
        flag="--batch_size (or another data set with --remote or --local)",
    )
