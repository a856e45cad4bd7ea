"""Sources of samples: their checks, readers and loaders.

Nothing here imports torch: functions that need it are imported when they are called.
"""

from __future__ import annotations

import dataclasses
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from sdbench.base.errors import ConfigError
from sdbench.data.checks import (
    PLACE_FLAGS,
    check_enough_samples,
    check_flags,
    check_tokenizer_folder,
)
from sdbench.data.formats.data_formats import SOURCES, call, detect_format, open_stored
from sdbench.data.source import NUM_SYNTHETIC_IMAGES, SourceConfig
from sdbench.settings.data import DataSettings

if TYPE_CHECKING:
    from sdbench.data.batches.batches import BatchReader
    from sdbench.data.batches.loader import CheckedLoader
    from sdbench.data.buckets import Mixture
    from sdbench.data.samples import Samples


@dataclasses.dataclass(frozen=True, match_args=False)
class PlaceSettings(Protocol):
    """Where data are: settings of `DataSettings`, of which precompute has no streams."""

    use_synth_data: bool
    data_format: str
    remote: str | None
    local: str | None


def check_ahead(settings: DataSettings) -> None:
    """Refuse `DataSettings` that contradict each other, without a look at the place of the data."""
    _check_places(settings)
    if settings.data_format != "auto":
        check_flags(settings, has_columns=SOURCES[settings.data_format].columns is not None)


def _check_places(settings: PlaceSettings) -> None:
    data_format, streams = settings.data_format, getattr(settings, "streams", None)
    is_synthetic = settings.use_synth_data or data_format == "synthetic"
    place = settings.remote or settings.local or streams
    if settings.use_synth_data and data_format not in ("auto", "synthetic"):
        raise ConfigError(
            "--use_synth_data and --data_format name different sources",
            value=data_format,
            allowed="auto or synthetic, or leave --use_synth_data away",
            flag="--data_format",
        )
    if is_synthetic and place:
        raise ConfigError(
            "--use_synth_data and a data folder exclude each other",
            value=place,
            allowed="a folder, or --use_synth_data",
            flag="--use_synth_data, --data_format, --remote or --local",
        )
    if streams and place != streams:
        raise ConfigError(
            "--streams and another place of the data exclude each other",
            value=place,
            allowed="one of both",
            flag="--streams, --remote or --local",
        )
    if streams and data_format not in ("auto", "mds"):
        raise ConfigError(
            "--streams takes MDS data only",
            value=data_format,
            allowed="auto or mds",
            flag="--data_format or --streams",
        )
    if not (is_synthetic or place or data_format == "auto"):
        raise ConfigError(
            f"Data of the format {data_format} needs a place",
            value=None,
            allowed="a folder or URL",
            flag=PLACE_FLAGS,
        )


def resolve_format(settings: PlaceSettings) -> str:
    """Choose the data format, a name of `SOURCES`, that settings ask for.

    ``auto`` without a place is ``synthetic``; callers must tell the user so.

    Raises:
        ConfigError: The settings contradict each other.
    """
    _check_places(settings)
    if settings.data_format != "auto":
        return settings.data_format
    if getattr(settings, "streams", None):
        return "mds"
    place = settings.remote or settings.local
    return detect_format(place) if place else "synthetic"


def check(config: SourceConfig) -> int | None:
    """Check the data settings cheaply, before any weights are built.

    Reads indexes, footers, headers and sizes, and at most a few samples. Returns the number of
    samples of an epoch over all ranks, or None where only a download would tell; it is the same on
    every rank of a machine. Raises a `RunError` for a damaged tar or a remote place that cannot be
    reached, and a `ConfigError` for any other mistake.
    """
    check_flags(config, has_columns=SOURCES[config.data_format].columns is not None)
    if SOURCES[config.data_format].open is not None and not config.wants_latents:
        for captions in config.inputs.captions:
            check_tokenizer_folder(captions)
    num_samples = call("check", config)
    if config.drops_encoded_captions:
        resolve_name("sdbench.data.formats.empty_caption:read_empty_caption")(config)
    if num_samples is not None:
        check_enough_samples(config, num_samples=num_samples)
    return num_samples


def describe_data(settings: DataSettings) -> dict[str, Any] | None:
    """Describe a stored data set for a record: `sdbench.data.formats.identity.describe_data`."""
    return resolve_name("sdbench.data.formats.identity:describe_data")(settings)


def open_samples(config: SourceConfig) -> Samples:
    """Check the source and open its stored samples, to read them by number in stored order."""
    check(config)
    return open_stored(config)


def open_batches(config: SourceConfig) -> BatchReader:
    """Check the source and open a reader that makes batches of samples by number."""
    if SOURCES[config.data_format].open is None:
        check(config)
        return resolve_name("sdbench.data.batches.synthetic:SyntheticBatchReader")(config=config)
    samples = open_samples(config)
    # For a URL, `check` may not have known the number of samples.
    check_enough_samples(config, num_samples=len(samples))
    return resolve_name("sdbench.data.batches.batches:make_batches")(samples, config=config)


def open_mixture(config: SourceConfig) -> Mixture:
    """Check the source, and put each of its samples into a bucket.

    The first time every file is read, unless the sizes of its pictures are kept beside it.
    """
    check(config)
    if SOURCES[config.data_format].open is None:
        num_images = config.num_images or NUM_SYNTHETIC_IMAGES
        return resolve_name("sdbench.data.batches.synthetic:mix_synthetic")(config, num_images)
    return resolve_name("sdbench.data.order.mixture:mix")(open_stored(config), config)


def build(config: SourceConfig) -> CheckedLoader:
    """Build this rank's loader.

    Returns:
        A `torch.utils.data.DataLoader` of dictionaries: ``{image: (B, 3, H, W) uint8 or float32,
        input_ids: (B, 77) int64}``, or with precomputed latents ``{latent_mean, latent_logvar:
        (B, C, H / 8, W / 8) float16, text_embedding: (B, 77, D) float16}`` with ``latent`` in place
        of the first two where the data set stores sampled latents. `config.inputs` says which
        tensors there are for captions, with shapes and types, and whether there is ``sizes`` too,
        (B, 6) float32. Stored images are channels_last in memory. All batches are full,
        deterministic under the seed and disjoint across ranks; each epoch has its own order. The
        loader can be stopped and resumed inside an epoch (`state_dict`, `load_state_dict`).

    Raises:
        ConfigError: As `check`.
    """
    if SOURCES[config.data_format].build is not None:
        check(config)
        return call("build", config)
    batches = open_batches(config)
    make_order = resolve_name("sdbench.data.order.epochs:make_order")
    order = make_order(batches.samples, batches.mixture, config=config)
    return resolve_name("sdbench.data.batches.loader:CheckedLoader")(batches, order, config=config)
