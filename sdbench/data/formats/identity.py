"""One identity of everything that decides a result: `identify`, and `describe_changes`.

Also hashes and provenance of data sets for records, and files that two data sets share.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench import __version__
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.escape import as_utf8
from sdbench.base.files import fingerprint, write_json
from sdbench.base.outside import read_json_object, shorten
from sdbench.base.secrets import redact_values
from sdbench.base.units import counted
from sdbench.data.checks import bad_place
from sdbench.data.formats.data_formats import detect_format, list_files
from sdbench.data.formats.empty_caption import EMPTY_CAPTION_NAME, load_empty_caption
from sdbench.data.formats.folder import list_files_and_captions
from sdbench.data.formats.mds_entries import INDEX_NAME
from sdbench.data.formats.mds_index import (
    choose_hashes,
    copied_file,
    locate_mds,
    places_of,
)
from sdbench.data.formats.webdataset_stream import read_sizes
from sdbench.data.places.listing import name_some
from sdbench.data.places.remote import (
    TELLING,
    RemoteObject,
    find_object,
    in_parallel,
    is_url,
    lasting_name,
)
from sdbench.data.places.remote_files import describe_unchecked
from sdbench.data.source import SourceConfig
from sdbench.record.provenance import git_state
from sdbench.settings.data import DataSettings
from sdbench.settings.subject import SubjectSettings

# Names of what `identify` describes, in messages.
DATA, CLASS_PICTURES, HELD_OUT, MODEL = "data", "class pictures", "held-out samples", "model"
# Beside the samples; hidden, because no format reads hidden files as samples.
PROVENANCE_NAME = ".made_by.json"
# Files of a data set whose names are kept with a run; the hashes are of all files.
MAX_NAMED = 1000
# Of a folder with a network, the files that may be read; other weights lie beside them.
ENDINGS_OF_NETWORKS = (".json", ".txt", ".safetensors")


def identify(
    sources: Mapping[str, SourceConfig],
    *,
    files: Mapping[str, str | None] | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return facts by which a resume knows everything again that decides its result.

    The result maps names in words to facts as JSON has them, which `describe_changes` compares:
    of each of the `sources`, by name, that of its data set (`identify_data`), and that of the files
    beside its samples and of those that its settings name; of `files`, by their flags, the content
    of a file, or of those in a folder (a value that is neither is left out); of a `model` what
    `Architecture.identify` returns.
    """
    found: dict[str, Any] = {}
    for name, source in sources.items():
        if (of_data := identify_data(source)) is None:
            continue
        found[name] = of_data
        if belongings := dict(_describe_belongings(source)):
            found[belongings_of(name)] = {"files": belongings}
        if of_data["num_unknown"]:
            print(
                f"warning: a change of {counted(of_data['num_unknown'], 'file')} of the {name} "
                "will not be seen by a resume: their places tell no version",
                file=sys.stderr,
            )
    for flag, place in (files or {}).items():
        if place is not None and os.path.exists(place):
            found[flag] = {"files": _describe_content(Path(place))}
    if model is not None:
        found[MODEL] = {"files": dict(model)}
    return redact_values(found)


def belongings_of(name: str) -> str:
    """Return the name of the files that belong to a data set of this name."""
    return f"what belongs to the {name}"


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return how two results of `identify` differ, by name; what only one has is not compared."""
    changes = {name: describe_change(before[name], now[name]) for name in now if name in before}
    return {name: f"{name}: {change}" for name, change in changes.items() if change is not None}


def _describe_belongings(source: SourceConfig) -> Iterator[tuple[str, Any]]:
    """Yield name and facts of each file beside the samples, and of those that settings name."""
    for place in places_of(source) if source.wants_latents else ():
        prefix = "" if source.streams is None else f"{place}/"
        provenance = Path(place, PROVENANCE_NAME)
        is_there = not is_url(place) and provenance.is_file()
        yield f"{prefix}{PROVENANCE_NAME}", fingerprint(provenance) if is_there else None
        try:
            content = load_empty_caption(place)
            known = [len(content), f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"]
        except (OSError, RunError):
            known = None  # a run that needs it is refused before
        yield f"{prefix}{EMPTY_CAPTION_NAME}", known
    if source.class_prompts is not None:
        yield "--class_prompts", fingerprint(Path(source.class_prompts))
    if source.is_streamed and source.data_format == "webdataset":
        tars = list_files(source)
        sizes = read_sizes(tars, place=source.tar_sizes)
        named = dict(zip(map(lasting_name, tars), sizes, strict=True))
        yield "--tar_sizes", named if len(named) <= MAX_NAMED else digest(sizes)


def _describe_content(place: Path) -> dict[str, Any]:
    """Return the content of a file, or of the files in a folder with a network."""
    files = [place]
    if place.is_dir():
        files = [one for one in sorted(place.iterdir()) if one.suffix in ENDINGS_OF_NETWORKS]
    return {file.name: fingerprint(file) for file in files}


def describe_data(settings: DataSettings) -> dict[str, Any] | None:
    """Describe stored data for a record, including a subject's class images.

    ``sha256`` is of the names of the files and their sizes on a disk; ``made_by`` lists the
    provenance of each data set. ``unchecked_copies`` (see `describe_unchecked`) is present if this
    process has used older copies of files that may have changed since. None for synthetic data.
    """
    if settings.data_format == "synthetic":
        return None
    sources = _sources_of(settings)
    files = _describe_files(sources, asks_stores=False)
    description = {
        **_sum_up(files),
        "made_by": [
            read_provenance(Path(place)) for source in sources for place in places_of(source)
        ],
    }
    unchecked = describe_unchecked(place for file in files for place in file.places)
    return description if unchecked is None else {**description, "unchecked_copies": unchecked}


def describe_data_or_warn(settings: DataSettings) -> dict[str, Any] | None:
    """Return `describe_data`, or warn and return None if it fails: the run itself has succeeded."""
    try:
        return describe_data(settings)
    except (ConfigError, OSError, RunError) as error:
        print(f"warning: the record has no hash of the data set: {error}", file=sys.stderr)
        return None


def identify_data(source: SourceConfig) -> dict[str, Any] | None:
    """Return facts by which a resumed run recognises its data.

    ``names`` is a hash of the file names, relative to the deepest folder that all files share;
    ``names_and_sizes`` covers the sizes too, also of files at URLs whose server tells them. For MDS
    both hash each index.json, which lists the names, sizes and any hashes of the shards. A copy of
    a data set elsewhere thus has the same hashes. ``num_bytes`` is None if a size is unknown.
    ``states`` is a hash of the sizes and of the modification times of local files, which `cp -p`,
    `rsync -a` and tar keep, or of the versions of files at URLs; of MDS, of shards without a hash
    that is checked. ``num_unknown`` counts the files whose version is not told. Up to `MAX_NAMED`
    files are named: ``files`` has size, and time or version, of each. None for synthetic data.
    """
    if source.data_format == "synthetic":
        return None
    files = _describe_files([source], asks_stores=True)
    facts = _sum_up(files)
    states = [state for file in files for state in file.states]
    named = [*itertools.islice((one for file in files for one in file.named()), MAX_NAMED + 1)]
    return {
        "names": digest([file.fact.get("name", file.fact.get("index")) for file in files]),
        "names_and_sizes": facts.pop("sha256"),
        "states": digest(states),
        "num_unknown": sum(
            is_url(place) and version is None
            for file in files
            for place, (_, version) in zip(file.places, file.states, strict=True)
        ),
        **facts,
        **({"files": dict(named)} if len(named) <= MAX_NAMED else {}),
    }


def _sum_up(files: Sequence[_File]) -> dict[str, Any]:
    facts = [file.fact for file in files]
    sizes = [fact["num_bytes"] for fact in facts]
    return {
        "sha256": digest(facts),
        "num_files": sum(fact.get("num_files", 1) for fact in facts),
        "num_bytes": None if None in sizes else sum(sizes),
    }


def digest(value: Any) -> str:
    """Return a hash of a value as JSON has it."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def describe_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return how two results of `identify` differ for one name, or None."""
    if before == now:
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
    """Say how the ``files`` of two facts differ; empty where they are not known."""
    if not before or not now:
        return ""
    names = [name for name in now if name in before and before[name] != now[name]]
    kinds = {
        "added": sorted(now.keys() - before.keys()),
        "taken away": sorted(before.keys() - now.keys()),
        "written again": [f"{name} ({_compare(before[name], now[name])})" for name in names],
    }
    return ", ".join(
        f"{counted(len(names), 'file was', 'files were')} {kind}: {name_some(names)}"
        for kind, names in kinds.items()
        if names
    )


def _compare(before: Any, now: Any) -> str:
    """Say what a file was and is; of the settings in it those that differ."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return f"{_say(before)} before, {_say(now)} now"
    names = sorted(name for name in before | now if before.get(name) != now.get(name))
    return name_some([f"{name} {_compare(before.get(name), now.get(name))}" for name in names])


def _say(fact: Any) -> str:
    """A fact about a file in words: its size with its time or version, or a value."""
    if not isinstance(fact, list):
        return "none" if fact is None else shorten(str(fact))
    num_bytes, version = fact
    size = "of unknown size" if num_bytes is None else f"{num_bytes} bytes"
    if isinstance(version, int):
        time = datetime.datetime.fromtimestamp(version / 1e9, datetime.UTC)
        return f"{size} of {time.isoformat(sep=' ').removesuffix('+00:00')}"
    return size if version is None else f"{size}, {version}"


def _sources_of(settings: DataSettings) -> list[SourceConfig]:
    """Return the data sets that settings name: the samples, and class images of a subject."""
    source = SourceConfig.from_settings(settings, device_batch_size=1)
    if not isinstance(settings, SubjectSettings):
        return [source]
    source = dataclasses.replace(source, caption=settings.instance_prompt)
    if settings.class_remote is None:
        return [source]
    of_class = dataclasses.replace(
        source,
        remote=settings.class_remote,
        local=None,
        data_format=detect_format(settings.class_remote),
        caption=settings.class_prompt,
    )
    return [source, of_class]


class _File(NamedTuple):
    """A file of a data set; or an index of MDS, with the shards that it has no checked hash of.

    Attributes:
        name: For messages.
        fact: Name and size of the file; hash of the index, and what it says of the shards.
        places: Path or URL of the file, or those of the shards.
        states: Of each place its size, and its modification time in ns or the version of a store.
    """

    name: str
    fact: dict[str, Any]
    places: list[str]
    states: list[list[Any]]

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield names, for messages, and states."""
        if "index" not in self.fact:
            yield self.name, self.states[0]
            return
        yield self.name, [None, f"sha256 {self.fact['index'][:16]}"]
        folder = self.name.removesuffix(INDEX_NAME)
        for place, state in zip(self.places, self.states, strict=True):
            yield folder + os.path.basename(place), state


def _describe_files(sources: Iterable[SourceConfig], *, asks_stores: bool) -> list[_File]:
    """Describe the files of data sets; stores are asked for the sizes and versions of theirs."""
    found: list[tuple[str, dict[str, Any], list[str]]] = []
    for source in sources:
        is_mds = source.data_format == "mds"
        found += _list_mds(source) if is_mds else _list_files(source)
    places = [place for _, _, places in found for place in places]
    urls = [place for place in places if is_url(place) and place.startswith(TELLING)]
    told = dict(zip(urls, in_parallel(find_object, urls), strict=True)) if asks_stores else {}
    files = []
    for name, fact, places in found:
        states = [_state_of(place, told) for place in places]
        if "index" not in fact:
            fact["num_bytes"] = states[0][0]
        files.append(_File(name, fact, places, states))
    return files


def _state_of(place: str, told: Mapping[str, RemoteObject]) -> list[Any]:
    """Return the size of a file, and its modification time in ns or version; None: not known."""
    if is_url(place):
        found = told.get(place)
        return [None, None] if found is None else [found.num_bytes, found.version or None]
    if not os.path.isfile(place):
        return [None, None]
    stat = os.stat(place)
    return [stat.st_size, stat.st_mtime_ns]


def _list_mds(source: SourceConfig) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    places = locate_mds(source)
    for number, place in enumerate(places, start=1):
        raw = [shard["raw_data"] for shard in place.shards]
        files = raw if place.remote is None else map(copied_file, place.shards)
        unhashed = [
            os.path.join(place.source, file["basename"])
            for file, entry in zip(files, raw, strict=True)
            if not choose_hashes(entry["hashes"], wanted=source.validate_hash)
        ]
        fact = {
            "index": hashlib.sha256(place.index).hexdigest(),
            "num_files": len(raw),
            "num_bytes": sum(file["bytes"] for file in raw),
        }
        folder = "" if len(places) == 1 else f"stream {number}: "
        yield f"{folder}{INDEX_NAME}", fact, unhashed


def _list_files(source: SourceConfig) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    is_folder = source.data_format == "folder"
    files = sorted(list_files_and_captions(source) if is_folder else list_files(source))
    parts = [lasting_name(file).split("/") for file in files]
    # On lists, `commonprefix` compares name by name.
    num_shared = len(os.path.commonprefix([names[:-1] for names in parts]))  # noqa: RUF071
    for file, names in zip(files, parts, strict=True):
        name = "/".join(names[num_shared:])
        yield as_utf8(name), {"name": name}, [file]


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
    trained_keys = set().union(*map(_keys, list_files(trained)))
    return [file for file in list_files(held_out) if _keys(file) & trained_keys]


def _keys(file: str) -> set[object]:
    """Return keys of a file; it shares at least one with a copy or link of it."""
    if is_url(file):
        return {file}
    if not os.path.isfile(file):
        return set()
    stat = os.stat(file)
    return {(stat.st_dev, stat.st_ino), (os.path.basename(file), stat.st_size)}
