"""The tars or parquet files that a place means, copied here where they are elsewhere or packed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sdbench.base.errors import ConfigError
from sdbench.data.command_output import PIPE
from sdbench.data.formats.checks import PLACE_FLAGS, endings, ends_as
from sdbench.data.formats.copies import StoredFile
from sdbench.data.formats.listing import (
    choose_files,
    describe_files,
    list_below,
    tell_left_out,
    tell_other_splits,
)
from sdbench.data.remote import (
    S3,
    WEB,
    cache_folder,
    fetch_all,
    is_url,
    list_urls,
    must_be_copied,
)
from sdbench.data.source import SourceConfig

# How the files of a format end.
SUFFIXES = {"webdataset": ".tar", "parquet": ".parquet"}


def list_files(config: SourceConfig) -> list[str]:
    """Return the names and URLs of the files that `config` names, as `find_files`."""
    return find_files(config.remote or config.local, suffix=SUFFIXES[config.data_format])


def find_files(place: str, *, suffix: str, is_told: bool = False) -> list[str]:
    """Return the names and URLs of the files that a place stands for.

    Args:
        place: A file, a folder with the folders below it, a URL of either, or any of them in
            braces.
        suffix: The kind of files that a folder is read for, as `ends_as` takes it.
        is_told: Whether to print what is left out.

    Raises:
        ConfigError: A file does not exist or is there twice, packed and unpacked too, or a URL's
            folder cannot be listed.
        RunError: A store does not answer.
    """
    from braceexpand import UnbalancedBracesError, braceexpand

    kind = suffix.removeprefix(".")
    allowed = f"a {kind} file, a folder of them, or a quoted pattern like 'data/{{00..15}}{suffix}'"
    try:
        names = list(braceexpand(place))
    except UnbalancedBracesError as error:
        raise ConfigError(
            "The braces are not closed", value=place, allowed=allowed, flag=PLACE_FLAGS
        ) from error
    files: list[str] = []
    for name in names:
        # Web servers cannot list a folder, and a signed URL ends with its signature.
        if not is_url(name) and Path(name).is_dir():
            name = str(Path(name))  # as the names below it begin, without "./" and "//"
            listing = list_below(Path(name))
            below = [str(path) for path in (*listing.files, *listing.dangling)]
        elif is_url(name) and not name.startswith((PIPE, *WEB)) and not ends_as(name, suffix):
            below = list_urls(name)
        else:
            files.append(name)
            continue
        found = choose_files(below, folder=name, suffix=suffix)
        _check_once(found.files, suffix=suffix)
        files += found.files
        if is_told:
            tell_other_splits(name, found.other_splits)
            tell_left_out(name, found.left, taken=f"{len(found.files)} {kind} files")
    missing = [name for name in files if not is_url(name) and not Path(name).is_file()]
    if missing or not files:
        what = f"No such {kind} file"
        if not missing:
            what = f"The folder holds no {kind} file"
            if not is_url(place) and Path(place).is_dir():
                what += f", but {describe_files(below)}"
        raise ConfigError(
            what,
            value=missing[0] if missing else place,
            allowed=allowed,
            flag=PLACE_FLAGS,
        )
    _check_different(files)
    return files


def _check_different(files: list[str]) -> None:
    """Refuse a file that is named twice, also by a link: its samples would come twice."""
    seen: dict[object, str] = {}
    for file in files:
        state = None if is_url(file) else os.stat(file)
        other = seen.setdefault(file if state is None else (state.st_dev, state.st_ino), file)
        if other is not file:
            raise ConfigError(
                "A file is there twice, under one name or by a link",
                value=other if other == file else f"{other}, {file}",
                allowed="each file once",
                flag=PLACE_FLAGS,
            )


def _check_once(files: list[str], *, suffix: str) -> None:
    """Refuse a file that a folder holds under two endings, as packed and unpacked."""
    by_stem: dict[str, str] = {}
    for file in files:
        name = file.lower()
        ending = next(ending for ending in endings(suffix) if name.endswith(ending))
        stem = file[: -len(ending)]
        if stem in by_stem:
            raise ConfigError(
                "The folder holds a file under two endings",
                value=f"{by_stem[stem]}, {file}",
                allowed="one of them, or the files by name",
                flag=PLACE_FLAGS,
            )
        by_stem[stem] = file


def fetch_files(config: SourceConfig) -> list[StoredFile]:
    """Return the files that `config` names on this machine; remote and packed ones are copied."""
    place = config.remote or config.local
    names = find_files(place, suffix=SUFFIXES[config.data_format], is_told=config.rank == 0)
    sources = [name for name in names if must_be_copied(name)]
    if not sources:  # nor is a folder for copies needed
        return [StoredFile(Path(name)) for name in names]
    cache = cache_folder(place, config.local if config.remote else None)
    if config.rank == 0 and not all(map(is_url, sources)):
        print(f"The packed files of {place} are unpacked to {cache}.", file=sys.stderr)
    copies = fetch_all(sources, cache=cache, config=config)
    return [
        StoredFile(copies[name], source=name) if name in copies else StoredFile(Path(name))
        for name in names
    ]


def find_streamed(config: SourceConfig) -> list[str]:
    """Return the URLs and commands that `config` names, to be read as they come."""
    suffix = SUFFIXES[config.data_format]
    if config.remote and config.local:
        raise ConfigError(
            "Streamed files are not copied, and a folder for copies was given",
            value=config.local,
            allowed="none, or --remote_files copy",
            flag="--local",
        )
    names = find_files(config.remote or config.local, suffix=suffix, is_told=config.rank == 0)
    # A row group is read from the end of a file back; a command's output has to be read on.
    known = (S3, *WEB, *([PIPE] if suffix == ".tar" else []))
    for name in names:
        if not name.startswith(known):
            raise ConfigError(
                f"This {suffix.removeprefix('.')} file cannot be streamed",
                value=name,
                allowed=f"one at {', '.join(known)}; --remote_files copy reads all others",
                flag="--remote_files",
            )
    return names
