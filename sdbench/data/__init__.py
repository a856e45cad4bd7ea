"""Sources of samples: their checks, readers and loaders, by data format.

One row of `SOURCES` per data format. Nothing here imports torch: the table names functions, which
are imported when they are called.
"""

from __future__ import annotations

import os
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.data.command_output import PIPE
from sdbench.data.formats.checks import (
    PLACE_FLAGS,
    check_enough_samples,
    check_flags,
    check_tokenizer_folder,
    ends_as,
)
from sdbench.data.formats.listing import describe_files, list_below
from sdbench.data.image_files import has_image_name
from sdbench.data.source import NUM_SYNTHETIC_IMAGES, SourceConfig

if TYPE_CHECKING:
    from sdbench.data.buckets import Mixture
    from sdbench.data.pipeline.batches import BatchReader
    from sdbench.data.pipeline.loader import CheckedLoader
    from sdbench.data.samples import Samples


class Source(NamedTuple):
    """The functions of one data format, each as ``module:function`` and taking a `SourceConfig`.

    Attributes:
        check: Returns the number of samples, or None where it is not known yet; raises
            `ConfigError`; imports no torch, builds nothing.
        open: Returns the stored samples as `Samples`. None where nothing is stored.
        build: Returns a `CheckedLoader`. None: the common loader, which reads samples by number.
        columns: Returns the names of the columns that all files have. None for formats without
            columns, which hold no latents.
        files: Returns the names and URLs of the files that identify the data set: data sets that
            share a file share its samples. None where nothing is stored.
    """

    check: str
    open: str | None = None
    build: str | None = None
    columns: str | None = None
    files: str | None = None


_FORMATS = "sdbench.data.formats"
SOURCES = {
    "synthetic": Source(check=f"{_FORMATS}.checks:check_synthetic"),
    "mds": Source(
        check=f"{_FORMATS}.mds_index:check",
        open=f"{_FORMATS}.mds_shards:open_samples",
        build=f"{_FORMATS}.mds:build",
        columns=f"{_FORMATS}.mds_index:read_columns",
        files=f"{_FORMATS}.mds_index:list_files",
    ),
    "webdataset": Source(
        check=f"{_FORMATS}.webdataset:check",
        open=f"{_FORMATS}.webdataset:open_samples",
        columns=f"{_FORMATS}.webdataset:read_columns",
        files=f"{_FORMATS}.files:list_files",
    ),
    "parquet": Source(
        check=f"{_FORMATS}.parquet:check",
        open=f"{_FORMATS}.parquet:ParquetSamples",
        columns=f"{_FORMATS}.parquet:read_columns",
        files=f"{_FORMATS}.files:list_files",
    ),
    "folder": Source(
        check=f"{_FORMATS}.folder:check",
        open=f"{_FORMATS}.folder:FolderSamples",
        files=f"{_FORMATS}.folder:list_files",
    ),
}


def check_ahead(settings: Any) -> None:
    """Refuse `DataSettings` that contradict each other, without a look at the place of the data."""
    _check_places(settings)
    if settings.data_format != "auto":
        check_flags(settings, has_columns=SOURCES[settings.data_format].columns is not None)


def _check_places(settings: Any) -> None:
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


def resolve_format(settings: Any) -> str:
    """Choose the data format, a name of `SOURCES`, that settings of `DataSettings` ask for.

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


def detect_format(place: str) -> str:
    """Detect the data format of a place, a name of `SOURCES`, from names alone.

    Falls back to ``mds`` where names do not tell, e.g. for the URL of a folder.

    Raises:
        ConfigError: A folder holds files of several formats.
    """
    # A signed web address ends with its signature.
    path = place.partition("?")[0] if place.startswith(("http://", "https://")) else place
    if place.startswith(PIPE) or ends_as(path, "webdataset"):
        return "webdataset"
    if ends_as(path, "parquet"):
        return "parquet"
    folder = Path(place)
    if not os.path.isdir(place) or os.path.isfile(folder / "index.json"):
        return "mds"
    names = [str(path) for path in list_below(folder).files]
    tars = {_stem(name) for name in names if ends_as(name, "webdataset")}
    found = {
        "webdataset": bool(tars),
        # img2dataset writes a parquet table of each tar's content beside it, under the same name.
        "parquet": any(ends_as(name, "parquet") and _stem(name) not in tars for name in names),
        "folder": any(has_image_name(name, read_avif=True) for name in names),
    }
    formats = [name for name, is_there in found.items() if is_there]
    if len(formats) > 1:
        raise ConfigError(
            "The folder holds files of several formats of data",
            value=f"{place} with {describe_files(names)}",
            allowed=f"{' or '.join(formats)}, or the files or a folder of one format as the place",
            flag="--data_format",
        )
    # The check of MDS names what it finds, so it reports folders of MDS folders, shards without an
    # index, and empty folders.
    has_mds = any(next(folder.glob(pattern), None) for pattern in ("*/index.json", "*.mds"))
    if has_mds or not any(folder.iterdir()):
        return "mds"
    return formats[0] if formats else "folder"


def _stem(path: str) -> tuple[str, str]:
    folder, name = os.path.split(path)
    return folder, name.partition(".")[0]


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
    num_samples = _call("check", config)
    if config.drops_encoded_captions:
        resolve_name("sdbench.data.empty_caption:read_empty_caption")(config)
    if num_samples is not None:
        check_enough_samples(config, num_samples=num_samples)
    return num_samples


def _call(function: str, config: SourceConfig) -> Any:
    """Call a function of a format's row; None if it has no such function."""
    name = getattr(SOURCES[config.data_format], function)
    return None if name is None else resolve_name(name)(config)


def read_columns(config: SourceConfig) -> set[str]:
    """Return the names of the columns that all files have; empty for formats without columns."""
    return _call("columns", config) or set()


def list_files(config: SourceConfig) -> list[str]:
    """Return names and URLs of the files of a data set; empty for synthetic data."""
    return _call("files", config) or []


def describe_data(settings: Any) -> dict[str, Any] | None:
    """Describe a stored data set for a record: `sdbench.data.identity.describe_data`."""
    return resolve_name("sdbench.data.identity:describe_data")(settings)


def open_stored(config: SourceConfig) -> Samples:
    """Open the stored samples of a source that has been checked."""
    return _call("open", config)


def open_samples(config: SourceConfig) -> Samples:
    """Check the source and open its stored samples, to read them by number in stored order."""
    check(config)
    return open_stored(config)


def open_batches(config: SourceConfig) -> BatchReader:
    """Check the source and open a reader that makes batches of samples by number."""
    if SOURCES[config.data_format].open is None:
        check(config)
        return resolve_name(f"{_FORMATS}.synthetic:SyntheticBatchReader")(config=config)
    samples = open_samples(config)
    # For a URL, `check` may not have known the number of samples.
    check_enough_samples(config, num_samples=len(samples))
    return resolve_name("sdbench.data.pipeline.batches:make_batches")(samples, config=config)


def open_mixture(config: SourceConfig) -> Mixture:
    """Check the source, and put each of its samples into a bucket.

    The first time every file is read, unless the sizes of its pictures are kept beside it.
    """
    check(config)
    if SOURCES[config.data_format].open is None:
        num_images = config.num_images or NUM_SYNTHETIC_IMAGES
        return resolve_name(f"{_FORMATS}.synthetic:mix_synthetic")(config, num_images)
    return resolve_name("sdbench.data.mixture:mix")(open_stored(config), config)


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
        return _call("build", config)
    batches = open_batches(config)
    make_order = resolve_name("sdbench.data.pipeline.order:make_order")
    order = make_order(batches.samples, batches.mixture, config=config)
    return resolve_name("sdbench.data.pipeline.loader:CheckedLoader")(batches, order, config=config)
