"""Hashes that tell a stored data set from others, and from what it was, without reading samples."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench import data
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.secrets import redact
from sdbench.data.command_output import PIPE
from sdbench.data.formats.folder import list_files_and_captions
from sdbench.data.formats.mds_index import locate_mds, parse_streams
from sdbench.data.made_by import read_how_made
from sdbench.data.remote import is_url
from sdbench.data.source import SourceConfig


def describe_data(settings: Any) -> dict[str, Any] | None:
    """What a record says of the stored data, that of a subject's class included.

    The hash is over the names below the folder that all files share, with sizes; of MDS over each
    index.json, which has the names, sizes and, where they were made, hashes of the shards. So a
    copy of a data set in another place has its hash, and a change that keeps names and sizes is
    not seen. The size of a file behind a URL is not asked for; a picture that is missing has none.

    Args:
        settings: Of benchmark.py, train.py or data.py, with a data format and an image size.

    Returns:
        ``sha256``, ``num_files``, ``num_bytes`` (None where a size is not known) and ``made_by``,
        what is known of how each of the data sets was made; None for synthetic data.

    Raises:
        ConfigError: There is no such data set.
        RunError: A place that is elsewhere cannot be reached.
    """
    if settings.data_format == "synthetic":
        return None
    sources = sources_of(settings)
    facts, _ = _describe_files(sources)
    return {
        "sha256": _hash(facts),
        **_count(facts),
        "made_by": [read_how_made(Path(place)) for source in sources for place in _places(source)],
    }


def describe_data_or_warn(settings: Any) -> dict[str, Any] | None:
    """As `describe_data`; what cannot be listed behind a run that went well is a warning."""
    try:
        return describe_data(settings)
    except (ConfigError, OSError, RunError) as error:
        print(f"warning: the record has no hash of the data set: {error}", file=sys.stderr)
        return None


def identify_data(sources: Sequence[SourceConfig]) -> dict[str, Any] | None:
    """What says whether work goes on with the data that it began with.

    Beside the names and sizes of `describe_data` it has the times at which files on this machine
    were written, of MDS those of shards without a hash in their index. `cp -p`, `rsync -a` and tar
    keep them.

    Returns:
        ``names``, ``names_and_sizes`` and ``times``, hashes; ``num_files``, ``num_bytes`` (None
        where a size is not known). None where nothing is stored. Of MDS ``names`` has the whole
        index.

    Raises:
        ConfigError: There is no such data set.
        RunError: A place that is elsewhere cannot be reached.
    """
    if all(source.data_format == "synthetic" for source in sources):
        return None
    facts, times_ns = _describe_files(sources)
    return {
        "names": _hash([fact.get("name", fact.get("index")) for fact in facts]),
        "names_and_sizes": _hash(facts),
        "times": _hash(times_ns),
        **_count(facts),
    }


def describe_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """How data differ that `identify_data` has described twice; None where they do not."""
    if before == now:
        return None
    if before["names_and_sizes"] == now["names_and_sizes"]:
        return "files of the data set have been written again, under the same names and sizes"
    counts = [f"{one['num_files']} files, {one['num_bytes']} bytes" for one in (before, now)]
    if counts[0] == counts[1]:
        return f"names or sizes of files of the data set are others ({counts[0]})"
    return f"the data set has {counts[1]}, and had {counts[0]}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sources_of(settings: Any) -> list[SourceConfig]:
    """The data sets that settings name: that of the samples, and of a subject's class."""
    source = SourceConfig.from_settings(
        settings, device_batch_size=1, caption=getattr(settings, "instance_prompt", None)
    )
    class_place = getattr(settings, "class_remote", None)
    if class_place is None:
        return [source]
    data_format = data.resolve_format(
        data_format="auto", use_synth_data=False, remote=class_place, local=None
    )
    return [
        source,
        dataclasses.replace(
            source,
            remote=class_place,
            local=None,
            data_format=data_format,
            caption=settings.class_prompt,
        ),
    ]


def _places(source: SourceConfig) -> list[str]:
    """The places of the data sets as the user gave them."""
    if source.streams is not None:
        return [place for place, _ in parse_streams(source.streams)]
    return [source.remote or source.local or ""]


def _describe_files(sources: Sequence[SourceConfig]) -> tuple[list[dict[str, Any]], list[int]]:
    """Names and sizes, or the index of MDS, and when files on this machine were written, in ns."""
    facts: list[dict[str, Any]] = []
    times_ns: list[int] = []
    for source in sources:
        describe = _describe_mds if source.data_format == "mds" else _describe_listed
        of_source, of_files = describe(source)
        facts += of_source
        times_ns += of_files
    return facts, times_ns


def _describe_mds(source: SourceConfig) -> tuple[list[dict[str, Any]], list[int]]:
    places = locate_mds(source)
    facts = [
        {
            "index": hashlib.sha256(place.index).hexdigest(),
            "num_files": len(place.shards),
            "num_bytes": sum(shard["raw_data"]["bytes"] for shard in place.shards),
        }
        for place in places
    ]
    unhashed = [
        Path(place.local, shard["raw_data"]["basename"])
        for place in places
        if place.remote is None
        for shard in place.shards
        if not shard["raw_data"].get("hashes")
    ]
    return facts, [path.stat().st_mtime_ns for path in unhashed if path.is_file()]


def _describe_listed(source: SourceConfig) -> tuple[list[dict[str, Any]], list[int]]:
    is_folder = source.data_format == "folder"
    files = sorted(list_files_and_captions(source) if is_folder else data.list_files(source))
    parts = [_lasting_name(file).split("/") for file in files]
    folders = [names[:-1] for names in parts]
    # What the first and the last have in common, all between them have, too.
    ends = zip(min(folders), max(folders), strict=False)
    num_shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    stats = [os.stat(file) if _is_here(file) else None for file in files]
    facts = [
        {
            "name": "/".join(names[num_shared:]),
            "num_bytes": None if stat is None else stat.st_size,
        }
        for names, stat in zip(parts, stats, strict=True)
    ]
    return facts, [stat.st_mtime_ns for stat in stats if stat is not None]


def _count(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sizes = [fact["num_bytes"] for fact in facts]
    return {
        "num_files": sum(fact.get("num_files", 1) for fact in facts),
        "num_bytes": None if None in sizes else sum(sizes),
    }


def _lasting_name(file: str) -> str:
    """What a file is called each time: its path, or its URL without a signature, which changes."""
    if not is_url(file):
        return os.path.abspath(file)
    # Of what is known to be a command `redact` leaves the program alone.
    return redact(file.removeprefix(PIPE))


def _is_here(file: str) -> bool:
    return not is_url(file) and os.path.isfile(file)
