"""Validation of index.json and of MDS shards: their sizes, hashes and headers; imports no torch.

Streaming itself trusts them all.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sdbench.record.store import describe_fault

INDEX_NAME = "index.json"
# Limit for the JSON about columns in a shard's header, which has some hundred bytes.
MAX_COLUMN_BYTES = 2**20

_COUNT = {"type": "integer", "minimum": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}}


def _object(properties: Mapping[str, Any], *, kind: Any = "object") -> dict[str, Any]:
    """Return the schema of an object that has exactly these properties."""
    return {
        "type": kind,
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


# Streaming 0.13.0, streaming/base/format: the only version of the format, and the fields of
# `MDSReader.from_json` and `FileInfo`. Streaming refuses any other field.
_FILE = {"basename": {"type": "string"}, "bytes": _COUNT, "hashes": {"type": "object"}}
_SHARD = {
    "column_encodings": _TEXTS,
    "column_names": {**_TEXTS, "minItems": 1, "uniqueItems": True},
    "column_sizes": {"type": "array", "items": {"type": ["integer", "null"], "minimum": 1}},
    "compression": {"type": ["string", "null"]},
    "format": {"enum": ["mds"]},
    "hashes": {},
    "raw_data": _object(_FILE),
    "samples": _COUNT,
    "size_limit": {"type": ["integer", "string", "null"], "minimum": 1},
    "version": {"enum": [2]},
    "zip_data": _object(_FILE, kind=["object", "null"]),
}
_INDEX = {
    "type": "object",
    "properties": {
        "version": {"enum": [2]},
        "shards": {"type": "array", "minItems": 1, "items": _object(_SHARD)},
    },
    "required": ["version", "shards"],
}


@functools.lru_cache(maxsize=16)
def parse_index(index: bytes) -> list[dict]:
    """Return the entries of the shards in an index.json; callers must not change them.

    A `ValueError` says why it cannot be trusted.
    """
    import jsonschema  # 70 ms, which not every command needs

    try:
        # Decoded as Streaming does: from bytes, json also accepts UTF-16 and a byte-order mark.
        content = json.loads(index.decode("utf-8"))
        # Draft 4, because later ones take 16.0 for an integer.
        fault = next(jsonschema.Draft4Validator(_INDEX).iter_errors(content), None)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if fault is not None:
        raise ValueError(describe_fault(fault))
    # A shard named twice would be read twice; one named like the index would replace it.
    known = {PurePosixPath(INDEX_NAME)}
    for number, shard in enumerate(content["shards"]):
        if "pkl" in shard["column_encodings"]:
            raise ValueError(
                f"shard {number}: a column holds pickled objects, and reading them may run code"
            )
        if len({len(shard[f"column_{what}"]) for what in ("names", "encodings", "sizes")}) > 1:
            raise ValueError(
                f"shard {number}: column_names, column_encodings and column_sizes differ in length"
            )
        for file in files_of(shard):
            path = PurePosixPath(file["basename"])
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"shard {number}: {path} lies outside the folder of the data set")
            if path in known:
                raise ValueError(f"shard {number}: {path} is named twice")
            known.add(path)
    return content["shards"]


def files_of(shard: Mapping[str, Any]) -> list[dict]:
    """Return the entries of the files of a shard: the shard, and its compressed form if any."""
    return [file for file in (shard["raw_data"], shard["zip_data"]) if file]


def encodings_of(shard: Mapping[str, Any]) -> dict[str, str]:
    """Map the columns of a shard to their encodings."""
    return dict(zip(shard["column_names"], shard["column_encodings"], strict=True))


def check_file(path: Path, *, num_bytes: int, hashes: Mapping[str, str]) -> None:
    """Compare length and hashes (algorithm to digest) of a shard's file with index.json.

    Raises an `OSError` if the file cannot be read, and a `ValueError` if it differs.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != num_bytes:
            raise ValueError(f"it has {found} bytes, {INDEX_NAME} says {num_bytes}")
        if not hashes:
            return
        # Imported here, because it imports torch, which only hashes need.
        from streaming.base.hashing import get_hash, is_hash

        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for algorithm, digest in hashes.items():
                if not is_hash(algorithm):
                    raise ValueError(f"its hash in {INDEX_NAME}, {algorithm}, is not known")
                if get_hash(algorithm, content) != digest:
                    raise ValueError(f"its {algorithm} is not the one in {INDEX_NAME}")


def check_shard(
    path: Path, file: Mapping[str, Any], shard: Mapping[str, Any], *, hashes: Mapping[str, str]
) -> None:
    """Compare a file of a shard with its entry, and its header too if it is not compressed.

    `file` is ``shard["raw_data"]`` or ``shard["zip_data"]``. Raises as `check_file`.
    """
    check_file(path, num_bytes=file["bytes"], hashes=hashes)
    if file is shard["raw_data"]:
        read_bounds(path, shard)


def read_bounds(path: Path, shard: Mapping[str, Any]) -> np.ndarray:
    """Return the first byte of each sample of a shard and the end of the last one, as int64.

    Raises as `check_file`.
    """
    num_samples, column_sizes = shard["samples"], shard["column_sizes"]
    # An MDS shard begins with uint32 numbers: the number of samples, where each one begins and the
    # last one ends. Then it repeats what index.json says of the columns, in JSON.
    num_header_bytes = 4 * (num_samples + 2)
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        count = int.from_bytes(file.read(4), "little")
        if count != num_samples:
            raise ValueError(f"its header says {count} samples, {INDEX_NAME} says {num_samples}")
        if num_header_bytes > num_bytes:
            raise ValueError("its header is cut")
        bounds = np.frombuffer(file.read(num_header_bytes - 4), "<u4").astype(np.int64)
        is_inside = num_header_bytes <= bounds[0] and bounds[-1] <= num_bytes
        if not is_inside or (np.diff(bounds) < 0).any():
            raise ValueError("samples lie outside of it or overlap, by its header")
        columns = file.read(min(int(bounds[0]) - num_header_bytes, MAX_COLUMN_BYTES))
    try:
        found = json.loads(columns)["column_sizes"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return bounds  # Streaming does not read it, and another writer may leave it out
    if found != column_sizes:
        raise ValueError(f"its header says column_sizes {found}, {INDEX_NAME} says {column_sizes}")
    return bounds
