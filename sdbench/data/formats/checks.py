"""Checks that data formats share, and those of synthetic data, without torch."""

from __future__ import annotations

from pathlib import Path

from sdbench.base.errors import ConfigError
from sdbench.data.source import NUM_SYNTHETIC_IMAGES, VAE_FACTOR, SourceConfig

PLACE_FLAGS = "--remote or --local"
# How gzip files of a kind end.
PACKED_ENDINGS = {".tar": (".tar.gz", ".tgz")}


def endings(suffix: str) -> tuple[str, ...]:
    """How the files of a kind may end: with its suffix, or as packed ones do."""
    return (suffix, *PACKED_ENDINGS.get(suffix, ()))


def check_synthetic(config: SourceConfig) -> int:
    """Check the size of synthetic latents; return the number of samples of an epoch.

    Raises:
        ConfigError: The images have no whole number of latents along a side.
    """
    if config.wants_latents and config.image_size % VAE_FACTOR:
        raise ConfigError(
            "Latents have an eighth of the image's side",
            value=config.image_size,
            allowed=f"a multiple of 8, e.g. {max(config.image_size // VAE_FACTOR, 1) * VAE_FACTOR}",
            flag="--image_size",
        )
    return config.num_images or NUM_SYNTHETIC_IMAGES


def check_not_augmented(config: SourceConfig) -> None:
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
