"""`SOURCES`: a row for each data format, which names its functions; and how a format is detected.

Nothing here imports torch: the functions are imported when they are called.
"""

from __future__ import annotations

import os
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.data.checks import ends_as
from sdbench.data.places.command_output import PIPE
from sdbench.data.places.image_names import has_image_name
from sdbench.data.places.listing import describe_files, list_below
from sdbench.data.source import SourceConfig

if TYPE_CHECKING:
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


FORMATS = "sdbench.data.formats"
SOURCES = {
    "synthetic": Source(check="sdbench.data.checks:check_synthetic"),
    "mds": Source(
        check=f"{FORMATS}.mds_index:check",
        open=f"{FORMATS}.mds_shards:open_samples",
        build="sdbench.data.batches.mds:build",
        columns=f"{FORMATS}.mds_index:read_columns",
        files=f"{FORMATS}.mds_index:list_files",
    ),
    "webdataset": Source(
        check=f"{FORMATS}.webdataset:check",
        open=f"{FORMATS}.webdataset:open_samples",
        columns=f"{FORMATS}.webdataset:read_columns",
        files="sdbench.data.places.place_files:list_files",
    ),
    "parquet": Source(
        check=f"{FORMATS}.parquet:check",
        open=f"{FORMATS}.parquet:ParquetSamples",
        columns=f"{FORMATS}.parquet:read_columns",
        files="sdbench.data.places.place_files:list_files",
    ),
    "folder": Source(
        check=f"{FORMATS}.folder:check",
        open=f"{FORMATS}.folder:FolderSamples",
        files=f"{FORMATS}.folder:list_files",
    ),
}


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


def call(function: str, config: SourceConfig) -> Any:
    """Call a function of a format's row; None if it has no such function."""
    name = getattr(SOURCES[config.data_format], function)
    return None if name is None else resolve_name(name)(config)


def read_columns(config: SourceConfig) -> set[str]:
    """Return the names of the columns that all files have; empty for formats without columns."""
    return call("columns", config) or set()


def list_files(config: SourceConfig) -> list[str]:
    """Return names and URLs of the files of a data set; empty for synthetic data."""
    return call("files", config) or []


def open_stored(config: SourceConfig) -> Samples:
    """Open the stored samples of a source that has been checked."""
    return call("open", config)
