"""The files of a data place, and reading of files that may be copies.

Remote and gzipped tars and parquet files are copied to this machine. A copy that is found damaged
is deleted and made again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.secrets import redact
from sdbench.data.checks import ENDINGS, bad_place, ends_as, tell_unpacking
from sdbench.data.places.command_output import PIPE
from sdbench.data.places.listing import choose_files, describe_files, list_below
from sdbench.data.places.remote import S3, WEB, cache_folder, is_url, list_urls, shown
from sdbench.data.places.remote_files import fetch, fetch_all, must_be_copied
from sdbench.data.source import SourceConfig

Content = TypeVar("Content")

# To read a copy, which other loader processes may find damaged and delete at the same time.
MAX_ATTEMPTS = 10


@dataclass(frozen=True)
class StoredFile(os.PathLike):
    """A local file, and the place it was copied from, if any, which messages name."""

    path: Path
    source: str | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path) if self.source is None else shown(self.source)


def state_of(stat: os.stat_result) -> tuple[int, ...]:
    """Return numbers that differ if another file, or another version, has the same name."""
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def read_whole(
    file: StoredFile,
    read: Callable[[StoredFile], Content],
    *,
    copy_again: Callable[[StoredFile], None] | None = None,
) -> Content:
    """Read a file; a copy that is found damaged is deleted, and made again once.

    No damaged copy outlives the run that finds it, whether the copy or its source is at fault.
    `read` must raise `ConfigError` or `RunError` for a damaged file. Other processes may read and
    delete the copy at the same time; `copy_again` (None: `fetch`) restores a missing one.
    """
    damage: ConfigError | RunError | None = None
    for _ in range(MAX_ATTEMPTS):
        try:
            state = state_of(os.stat(file))
            return read(file)
        except FileNotFoundError as error:
            if file.source is None:
                raise RunError(f"{file} cannot be read any more: {error}.") from error
        except (ConfigError, RunError) as error:
            if file.source is None:
                raise
            with contextlib.suppress(FileNotFoundError):
                # Another process may have made a new copy of that name.
                if state_of(os.stat(file)) == state:
                    os.unlink(file)
            if damage is not None:
                raise
            damage = error
            # Printed from loader processes too, whose errors may not reach the user.
            print(redact(f"{error} Its copy is thrown away, and made again."), file=sys.stderr)
        if copy_again is not None:
            copy_again(file)
        elif fetch(file.source, cache=file.path.parent) != file.path:
            raise RunError(f"{file} has been changed since it was copied.")
    raise damage or RunError(f"{file} cannot be read: its copy keeps disappearing.")


def list_files(config: SourceConfig, *, is_told: bool = False) -> list[str]:
    """Return the names and URLs of the files that `config` names, as `find_files`."""
    place = config.remote or config.local
    return find_files(place, data_format=config.data_format, is_told=is_told)


def find_files(place: str, *, data_format: str, is_told: bool = False) -> list[str]:
    """Return the names and URLs of the files of a format that a place stands for.

    A place is a file, a folder with its sub-folders, a URL of either, or a brace pattern of these.
    Files that are left out are printed if `is_told`.

    Raises:
        ConfigError: A file does not exist, is found twice (also as packed and unpacked), or is in a
            remote folder that cannot be listed.
        RunError: A store does not answer.
    """
    from braceexpand import UnbalancedBracesError, braceexpand

    suffix = ENDINGS[data_format][0]
    kind = suffix.removeprefix(".")
    allowed = f"a {kind} file, a folder of them, or a quoted pattern like 'data/{{00..15}}{suffix}'"
    try:
        names = list(braceexpand(place))
    except UnbalancedBracesError as error:
        raise bad_place("The braces are not closed", value=place, allowed=allowed) from error
    files: list[str] = []
    for name in names:
        # Web servers cannot list a folder, and a signed URL ends with its signature.
        if not is_url(name) and Path(name).is_dir():
            name = str(Path(name))  # as the names below it begin, without "./" and "//"
            listing = list_below(Path(name))
            below = [str(path) for path in (*listing.files, *listing.dangling)]
        elif is_url(name) and not name.startswith((PIPE, *WEB)) and not ends_as(name, data_format):
            below = list_urls(name)
        else:
            files.append(name)
            continue
        files += choose_files(below, folder=name, data_format=data_format, is_told=is_told)
    missing = [name for name in files if not is_url(name) and not Path(name).is_file()]
    if missing:
        raise bad_place(f"No such {kind} file", value=missing[0], allowed=allowed)
    if not files:
        raise bad_place(
            f"The folder holds no {kind} file, but {describe_files(below)}",
            value=place,
            allowed=allowed,
        )
    _check_different(files, endings=ENDINGS[data_format])
    return files


def _check_different(files: list[str], *, endings: Sequence[str]) -> None:
    """Refuse a file that is there twice: its samples would come twice."""
    seen: dict[object, str] = {}
    for file in files:
        ends = (end for end in endings if file.lower().endswith(end))
        identities: list[object] = [file[: -len(end)] for end in ends] or [file]
        if not is_url(file):
            stat = os.stat(file)
            identities.append((stat.st_dev, stat.st_ino))
        others = [seen[one] for one in identities if one in seen]
        if others:
            raise bad_place(
                "A file occurs twice: by name, by a link, or packed and unpacked",
                value=file if file in others else f"{others[0]}, {file}",
                allowed="each file once",
            )
        seen.update(dict.fromkeys(identities, file))


def fetch_files(config: SourceConfig) -> list[StoredFile]:
    """Return the files that `config` names as local files; remote and packed ones are copied."""
    place = config.remote or config.local
    names = list_files(config, is_told=config.rank == 0)
    sources = [name for name in names if must_be_copied(name)]
    copies: dict[str, Path] = {}
    if sources:  # else no folder for copies is needed
        cache = cache_folder(place, config.local if config.remote else None)
        if config.rank == 0 and not all(map(is_url, sources)):
            tell_unpacking(place, cache)
        copies = fetch_all(sources, cache=cache, config=config)
    return [
        StoredFile(copies.get(name, Path(name)), source=name if name in copies else None)
        for name in names
    ]


def find_streamed(config: SourceConfig) -> list[str]:
    """Return the URLs and commands that `config` names, to be streamed."""
    names = list_files(config, is_told=config.rank == 0)
    # Reading parquet needs seeking, which a command's output does not allow.
    known = (S3, *WEB, *([PIPE] if config.data_format == "webdataset" else []))
    for name in names:
        if not name.startswith(known):
            raise ConfigError(
                f"This file of the format {config.data_format} cannot be streamed",
                value=name,
                allowed=f"one at {', '.join(known)}; --remote_files copy reads all others",
                flag="--remote_files",
            )
    return names
