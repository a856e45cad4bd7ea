"""Identity of stored data sets: hashes, provenance, and files that two data sets share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench import __version__, data
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.escape import as_utf8
from sdbench.base.files import write_json
from sdbench.base.outside import read_json_object
from sdbench.base.secrets import redact
from sdbench.base.units import counted
from sdbench.data.command_output import PIPE
from sdbench.data.formats.checks import bad_place
from sdbench.data.formats.folder import list_files_and_captions
from sdbench.data.formats.listing import name_some
from sdbench.data.formats.mds_index import MdsPlace, locate_mds, parse_streams
from sdbench.data.remote import is_url
from sdbench.data.remote_files import describe_unchecked
from sdbench.data.source import SourceConfig
from sdbench.record.provenance import git_state
from sdbench.settings.data import DataSettings

# Hidden, because no format reads hidden files as samples.
PROVENANCE_NAME = ".made_by.json"
# Files of a data set whose names are kept with a run; the hashes are of all files.
MAX_NAMED = 1000


def describe_data(settings: Any) -> dict[str, Any] | None:
    """Describe stored data for a record, including a subject's class images.

    ``sha256`` is ``names_and_sizes`` of `identify_data`; ``made_by`` lists the provenance of each
    data set. ``unchecked_copies`` (see `describe_unchecked`) is present if this process has used
    older copies of files that may have changed since. None for synthetic data.
    """
    if settings.data_format == "synthetic":
        return None
    sources = sources_of(settings)
    files = _describe_files(sources)
    description = {
        **_identify(files),
        "made_by": [
            read_provenance(Path(place)) for source in sources for place in places_of(source)
        ],
    }
    unchecked = describe_unchecked(file.url for file in files)
    return description if unchecked is None else {**description, "unchecked_copies": unchecked}


def describe_data_or_warn(settings: Any) -> dict[str, Any] | None:
    """Return `describe_data`, or warn and return None if it fails: the run itself has succeeded."""
    try:
        return describe_data(settings)
    except (ConfigError, OSError, RunError) as error:
        print(f"warning: the record has no hash of the data set: {error}", file=sys.stderr)
        return None


def identify_data(sources: Sequence[SourceConfig]) -> dict[str, Any] | None:
    """Return facts by which a resumed run recognises its data.

    ``names`` is a hash of the file names, relative to the deepest folder that all files share;
    ``names_and_sizes`` covers the sizes too. For MDS both hash each index.json, which lists the
    names, sizes and any hashes of the shards. A copy of a data set elsewhere thus has the same
    hashes. ``num_bytes`` is None if a size is unknown (a file at a URL, a missing image). ``times``
    is a hash of the modification times of local files (of MDS, of shards without a hash), which `cp
    -p`, `rsync -a` and tar keep. Up to `MAX_NAMED` files, but no shards of
    MDS, are named: ``files`` has size and times of each. None for synthetic data.
    """
    if all(source.data_format == "synthetic" for source in sources):
        return None
    files = _describe_files(sources)
    facts = _identify(files)
    names = [file.fact.get("name", file.fact.get("index")) for file in files]
    named = {}
    if len(files) <= MAX_NAMED and all("name" in file.fact for file in files):
        stamps = ([file.fact["num_bytes"], *file.times_ns] for file in files)
        named["files"] = dict(zip(map(as_utf8, names), stamps, strict=True))
    return {
        "names": _hash(names),
        "names_and_sizes": facts.pop("sha256"),
        "times": _hash([time for file in files for time in file.times_ns]),
        **facts,
        **named,
    }


def _identify(files: Sequence[_File]) -> dict[str, Any]:
    facts = [file.fact for file in files]
    sizes = [fact["num_bytes"] for fact in facts]
    return {
        "sha256": _hash(facts),
        "num_files": sum(fact.get("num_files", 1) for fact in facts),
        "num_bytes": None if None in sizes else sum(sizes),
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def describe_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return how two results of `identify_data` differ, or None."""
    if all(before[name] == now[name] for name in ("names_and_sizes", "times")):
        return None
    if change := _name_changes(before.get("files", {}), now.get("files", {})):
        return change
    if before["names_and_sizes"] == now["names_and_sizes"]:
        return "files of the data set have been written again, under the same names and sizes"
    then, here = (
        f"{counted(one['num_files'], 'file')}, {one['num_bytes']} bytes" for one in (before, now)
    )
    if then == here:
        return f"names or sizes of files of the data set are others ({here})"
    return f"the data set has {here}, and had {then}"


def _name_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say how the ``files`` of `identify_data` differ; empty where they are not known."""
    if not before or not now:
        return ""
    kinds = {
        "added": now.keys() - before.keys(),
        "taken away": before.keys() - now.keys(),
        "written again": {name for name in before.keys() & now.keys() if before[name] != now[name]},
    }
    return ", ".join(
        f"{counted(len(names), 'file was', 'files were')} {kind}: {name_some(sorted(names))}"
        for kind, names in kinds.items()
        if names
    )


def sources_of(settings: Any) -> list[SourceConfig]:
    """Return the data sets that settings name: the samples, and class images of a subject."""
    source = SourceConfig.from_settings(
        settings, device_batch_size=1, caption=getattr(settings, "instance_prompt", None)
    )
    class_place = getattr(settings, "class_remote", None)
    if class_place is None:
        return [source]
    return [
        source,
        dataclasses.replace(
            source,
            remote=class_place,
            local=None,
            data_format=data.detect_format(class_place),
            caption=settings.class_prompt,
        ),
    ]


def places_of(source: DataSettings) -> list[str]:
    """Return the places of the data sets that a source, or settings, name."""
    if source.streams is not None:
        return [place for place, _ in parse_streams(source.streams)]
    return [source.remote or source.local or ""]


class _File(NamedTuple):
    """Facts of a file or an MDS index, modification times of local files in ns, and any URL."""

    fact: dict[str, Any]
    times_ns: list[int]
    url: str | None = None


def _describe_files(sources: Sequence[SourceConfig]) -> list[_File]:
    files: list[_File] = []
    for source in sources:
        is_mds = source.data_format == "mds"
        files += map(_describe_mds, locate_mds(source)) if is_mds else _describe_listed(source)
    return files


def _describe_mds(place: MdsPlace) -> _File:
    raw = [shard["raw_data"] for shard in place.shards]
    unhashed = [Path(place.local, file["basename"]) for file in raw if not file.get("hashes")]
    fact = {
        "index": hashlib.sha256(place.index).hexdigest(),
        "num_files": len(raw),
        "num_bytes": sum(file["bytes"] for file in raw),
    }
    is_local = place.remote is None
    return _File(
        fact, [path.stat().st_mtime_ns for path in unhashed if is_local and path.is_file()]
    )


def _describe_listed(source: SourceConfig) -> Iterator[_File]:
    is_folder = source.data_format == "folder"
    files = sorted(list_files_and_captions(source) if is_folder else data.list_files(source))
    parts = [_lasting_name(file).split("/") for file in files]
    # On lists, `commonprefix` compares name by name.
    num_shared = len(os.path.commonprefix([names[:-1] for names in parts]))  # noqa: RUF071
    for file, names in zip(files, parts, strict=True):
        stat = os.stat(file) if not is_url(file) and os.path.isfile(file) else None
        num_bytes = None if stat is None else stat.st_size
        yield _File(
            {"name": "/".join(names[num_shared:]), "num_bytes": num_bytes},
            [] if stat is None else [stat.st_mtime_ns],
            file if is_url(file) else None,
        )


def _lasting_name(file: str) -> str:
    """Return a name that stays the same: a path, or a URL without its signature."""
    if not is_url(file):
        return os.path.abspath(file)
    # Without the prefix, because `redact` cuts a ``pipe:`` command to its program.
    return redact(file.removeprefix(PIPE))


def write_provenance(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write how a data set was made to a hidden file beside its samples; records copy it.

    `facts` are the command and what decides its output. Absolute paths are cut to their last part,
    because the data set and records of runs on it may be published.
    """
    named = {
        name: os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value
        for name, value in facts.items()
    }
    suite = {"suite_version": __version__, "git_commit": git_state()["commit"]}
    write_json(folder / PROVENANCE_NAME, {**named, **suite})


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """Return what `write_provenance` has written, or None if it was not called."""
    path = folder / PROVENANCE_NAME
    # `Path.is_file` raises if a URL or a command is too long for a name.
    if not os.path.isfile(path):
        return None
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise bad_place(
            f"The note of how the data set was made cannot be read ({error})",
            value=str(path),
            allowed="the file as the suite wrote it, or no file",
        ) from None


def find_overlap(trained: SourceConfig, held_out: SourceConfig) -> list[str]:
    """Return the held-out files that are, or seem to be, in the training data.

    Files are the same if they are one file on the disk, also by a link, or have the same name and
    size; their content is not compared. URLs are compared as text. Raises as `data.check`.
    """
    trained_keys = set().union(*map(_keys, data.list_files(trained)))
    return [file for file in data.list_files(held_out) if _keys(file) & trained_keys]


def _keys(file: str) -> set[object]:
    """Return keys of a file; it shares at least one with a copy or link of it."""
    if is_url(file):
        return {file}
    if not os.path.isfile(file):
        return set()
    stat = os.stat(file)
    return {(stat.st_dev, stat.st_ino), (os.path.basename(file), stat.st_size)}
