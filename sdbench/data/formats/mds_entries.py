"""Checks of what index.json says of MDS shards, and of their headers; no torch.

Streaming trusts both, whoever wrote them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

INDEX_NAME = "index.json"
# Streaming 0.13.0, streaming/base/format: the only version, the fields that `MDSReader.from_json`
# takes, and those of `FileInfo`. It refuses any other field.
VERSION = 2
SHARD_FIELDS = {
    "column_encodings",
    "column_names",
    "column_sizes",
    "compression",
    "format",
    "hashes",
    "raw_data",
    "samples",
    "size_limit",
    "version",
    "zip_data",
}
FILE_FIELDS = {"basename", "bytes", "hashes"}
# What a header says of the columns is some hundred bytes long.
MAX_COLUMN_BYTES = 2**20


def parse_index(index: bytes) -> list[dict]:
    """The entries of the shards in an index.json.

    Raises:
        ValueError: It is damaged, is not one of MDS shards, or its facts cannot be true.
    """
    try:
        # As Streaming reads it: of bytes json takes UTF-16, too, and a byte-order mark.
        content = json.loads(index.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    shards = content.get("shards") if isinstance(content, dict) else None
    if not isinstance(shards, list) or not shards:
        raise ValueError("it has no shards")
    if content.get("version") != VERSION:
        raise ValueError(f"its version is {content.get('version')!r}, not {VERSION}")
    # A shard that is named twice would be read twice; one of the index's name would replace it.
    known = {INDEX_NAME}
    for number, shard in enumerate(shards):
        try:
            _check_shard(shard, known=known)
        except ValueError as error:
            raise ValueError(f"shard {number}: {error}") from error
    return shards


def _check_shard(shard: Any, *, known: set[str]) -> None:
    """Check an entry.

    Args:
        shard: The entry.
        known: Names of the files of all shards before it; its own are added.

    Raises:
        ValueError: It cannot be true.
    """
    if not isinstance(shard, dict) or shard.get("format") != "mds":
        raise ValueError("it is no MDS shard")
    _check_fields(shard, SHARD_FIELDS)
    if shard["version"] != VERSION:
        raise ValueError(f"its version is {shard['version']!r}, not {VERSION}")
    for field in ("raw_data", "zip_data"):
        if shard[field] is not None or field == "raw_data":
            _check_file(shard[field], known=known)
    if (shard["compression"] is None) != (shard["zip_data"] is None):
        raise ValueError("of compression and zip_data one is null and the other is not")
    _check_number("samples", shard["samples"])
    limit = shard["size_limit"]
    if limit is not None and not isinstance(limit, str):
        _check_number("size_limit", limit)
    _check_columns(shard)


def _check_columns(shard: Mapping[str, Any]) -> None:
    """Check the columns, and that as many samples of them fit into the file.

    Raises:
        ValueError: They are no lists of one length, or do not fit.
    """
    columns = [shard["column_names"], shard["column_encodings"], shard["column_sizes"]]
    if not all(isinstance(values, list) for values in columns):
        raise ValueError("its columns are no lists")
    names, encodings, sizes = columns
    if not all(isinstance(text, str) for text in [*names, *encodings]):
        raise ValueError("the name or the encoding of a column is no text")
    if "pkl" in encodings:
        raise ValueError("a column of it holds pickled objects: to read them may run their code")
    if not names or len({*names}) != len(names):
        raise ValueError("it has no columns, or two of one name")
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError(
            f"it has {len(names)} column_names, {len(encodings)} column_encodings and "
            f"{len(sizes)} column_sizes"
        )
    for size in sizes:
        if size is not None:
            _check_number("a column size", size)
    # A sample has 4 bytes for the length of each value without a fixed one, and for where it
    # begins; the count and the end of the last sample have 4 each.
    num_bytes_each = 4 + sum(4 if size is None else size for size in sizes)
    least = 8 + shard["samples"] * num_bytes_each
    if shard["raw_data"]["bytes"] < least:
        raise ValueError(
            f"{shard['samples']} samples take {least} bytes or more, and the shard has "
            f"{shard['raw_data']['bytes']}"
        )


def _check_file(file: Any, *, known: set[str]) -> None:
    if not isinstance(file, dict):
        raise ValueError("one of its files is no object")
    _check_fields(file, FILE_FIELDS)
    _check_number("bytes", file["bytes"])
    if not isinstance(file["hashes"], dict):
        raise ValueError("the hashes of a file are no object")
    name = file["basename"]
    _check_name(name)
    if str(PurePosixPath(name)) in known:
        raise ValueError(f"{name} is named twice")
    known.add(str(PurePosixPath(name)))


def _check_name(name: Any) -> None:
    """Check that the name of a shard's file leads to a place inside the data set's folder.

    Raises:
        ValueError: It is no text, or leads elsewhere.
    """
    if not isinstance(name, str) or not PurePosixPath(name).name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file")
    os.fsencode(name)  # raises a ValueError for half of a character
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} lies outside the folder of the data set")


def _check_fields(found: Mapping[str, Any], wanted: set[str]) -> None:
    if missing := sorted(wanted - found.keys()):
        raise ValueError(f"{', '.join(missing)} missing")
    if unknown := sorted(map(str, found.keys() - wanted)):
        raise ValueError(f"unknown: {', '.join(unknown)}")


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}, not a whole number above 0")


def read_bounds(path: Path, *, num_samples: int, column_sizes: Sequence[int | None]) -> np.ndarray:
    """Where the samples of a shard begin and end, from its header.

    Args:
        path: The shard, not compressed.
        num_samples: As index.json has it.
        column_sizes: As index.json has them.

    Returns:
        (num_samples + 1,) int64: the first byte of each sample, and the end of the last one.

    Raises:
        OSError: The file cannot be read.
        ValueError: The header contradicts index.json or the file's length.
    """
    # MDS: the number of samples, where each one begins and the last one ends, as uint32, and what
    # index.json says of the columns, in JSON.
    num_bytes_of_bounds = 4 * (num_samples + 2)
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        header = file.read(num_bytes_of_bounds)
        count = int.from_bytes(header[:4], "little")
        if count != num_samples:
            raise ValueError(f"its header says {count} samples, {INDEX_NAME} says {num_samples}")
        if len(header) < num_bytes_of_bounds:
            raise ValueError("its header is cut")
        bounds = np.frombuffer(header, "<u4")[1:].astype(np.int64)
        is_inside = num_bytes_of_bounds <= bounds[0] and bounds[-1] <= num_bytes
        if not is_inside or (np.diff(bounds) < 0).any():
            raise ValueError("by its header samples lie outside of it, or overlap")
        columns = file.read(min(int(bounds[0]) - num_bytes_of_bounds, MAX_COLUMN_BYTES))
    try:
        found = json.loads(columns)["column_sizes"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return bounds  # Streaming does not read it, and another writer may leave it out
    if found != list(column_sizes):
        raise ValueError(
            f"its header says column_sizes {found}, {INDEX_NAME} says {list(column_sizes)}"
        )
    return bounds
