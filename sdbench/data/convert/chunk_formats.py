"""Writers of one chunk of samples, one for each data format."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.base.errors import RunError
from sdbench.data.formats.image_files import image_extension
from sdbench.data.formats.mds_entries import INDEX_NAME
from sdbench.data.formats.tar_members import ARRAY_ENDING
from sdbench.data.places.listing import SIZES_NAME

# Two of Streaming's algorithms: one that any tool knows, and one that costs little to check.
MDS_HASHES = ["sha1", "xxh64"]

# MDS stores offsets in a shard as uint32.
MAX_SHARD_BYTES = 2**32 - 1

# A reader that shuffles takes a row group at a time: 64 samples of VAE moments and a text embedding
# for 512 px are 14 MB.
ROWS_PER_GROUP = 64

# Room for the number of a row in a file name, so that names sort as rows do.
NUM_ROW_DIGITS = 6
MAX_ROWS_PER_CHUNK = 10**NUM_ROW_DIGITS

# Values of a sample by column.
Row = Mapping[str, Any]
Rows = Iterable[Row]
# Column to its MDS encoding, e.g. ``bytes`` or ``ndarray:float16:8,64,64``.
Columns = Mapping[str, str]


class Chunk(NamedTuple):
    """The note of a finished chunk; `details` are what `ChunkFormat.write` returned.

    `sizes` are width and height of the picture of each row, where rows tell them.
    """

    rows: int
    bytes: int
    bad: list[str]
    details: Any
    sizes: Sequence[Sequence[int]] = ()


class ChunkFormat(NamedTuple):
    """How one data format stores a chunk.

    Attributes:
        name: File or folder of a chunk, with ``{}`` for its number.
        write: Takes the path to make, the rows and their columns; returns details for `finish`.
            Its output for no rows is discarded.
        finish: Takes the folder of all chunks and, by name and in order, those that have rows.
    """

    name: str
    write: Callable[[Path, Rows, Columns], Any]
    finish: Callable[[Path, dict[str, Chunk]], None] = lambda folder, chunks: None


def _write_mds(path: Path, rows: Rows, columns: Columns) -> dict | None:
    from streaming import MDSWriter

    # The writer names its shards itself, so it gets a folder of its own.
    folder = path.with_name(f"{path.name}.folder")
    remove(folder)
    try:
        # Not as a context manager: that would write a shard on the way out of an error.
        writer = MDSWriter(
            out=str(folder), columns=dict(columns), hashes=MDS_HASHES, size_limit=MAX_SHARD_BYTES
        )
        for row in rows:
            writer.write(row)
        writer.finish()
        if len(writer.shards) > 1:
            raise RunError(
                "A shard is larger than the 4 GiB that MDS can address: take fewer samples per "
                "shard."
            )
        if not writer.shards:
            return None
        shard = writer.shards[0]
        (folder / shard["raw_data"]["basename"]).rename(path)
        shard["raw_data"]["basename"] = path.name
        return shard
    finally:
        remove(folder)


def _finish_mds(folder: Path, chunks: dict[str, Chunk]) -> None:
    index = {"version": 2, "shards": [chunk.details for chunk in chunks.values()]}
    (folder / INDEX_NAME).write_bytes(to_json(index))


def to_json(content: object) -> bytes:
    """Return JSON with every value as it is; `base.files.write_json` removes likely secrets."""
    return json.dumps(content, sort_keys=True).encode()


def _write_parquet(path: Path, rows: Rows, columns: Columns) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([_parquet_field(*column) for column in sorted(columns.items())])
    # Images and latents do not get smaller by compression or by a dictionary. The checksums find
    # damage that neither the format nor a decoder would notice.
    with pyarrow.parquet.ParquetWriter(
        path, schema, compression="none", use_dictionary=False, write_page_checksum=True
    ) as writer:
        remaining = iter(rows)
        while group := list(itertools.islice(remaining, ROWS_PER_GROUP)):
            stored = [
                {name: _for_parquet(row[name], *item) for name, *item in columns.items()}
                for row in group
            ]
            writer.write_table(pyarrow.Table.from_pylist(stored, schema=schema))


def _parquet_field(name: str, encoding: str) -> Any:
    """Return the parquet column for an MDS encoding.

    Arrays are bytes, their shape is metadata; those of no fixed shape (C, H, W) are lists of lists.
    """
    import numpy as np
    import pyarrow

    kind, *rest = encoding.split(":")
    if kind == "ndarray":
        if len(rest) == 1:
            kind = pyarrow.from_numpy_dtype(np.dtype(rest[0]))
            return pyarrow.field(name, pyarrow.list_(pyarrow.list_(pyarrow.list_(kind))))
        dtype, shape = rest
        num_bytes = np.dtype(dtype).itemsize * int(np.prod([int(n) for n in shape.split(",")]))
        return pyarrow.field(
            name, pyarrow.binary(num_bytes), metadata={"dtype": dtype, "shape": shape}
        )
    types = {"bytes": pyarrow.binary(), "str": pyarrow.string(), "int": pyarrow.int64()}
    return pyarrow.field(name, types[kind])


def _for_parquet(value: Any, encoding: str) -> Any:
    if not encoding.startswith("ndarray"):
        return value
    return value.tobytes() if encoding.count(":") == 2 else [list(plane) for plane in value]


def _write_tar(path: Path, rows: Rows, columns: Columns) -> None:
    import webdataset

    # A constant time, so that the same samples make the same file.
    with webdataset.TarWriter(str(path), encoder=False, mtime=0) as writer:
        for number, row in enumerate(rows):
            files = _image_files(row) if "jpg" in columns else _array_files(row)
            writer.write({"__key__": _row_name(path.stem, number), **files})


def _finish_tars(folder: Path, chunks: dict[str, Chunk]) -> None:
    """Write the number of samples of each tar, which streaming needs."""
    sizes = {name: chunk.rows for name, chunk in chunks.items()}
    (folder / SIZES_NAME).write_bytes(to_json(sizes))


def _write_folder(path: Path, rows: Rows, columns: Columns) -> None:
    path.mkdir()
    for number, row in enumerate(rows):
        name = _row_name(path.name, number)
        for extension, content in _image_files(row).items():
            if extension != "json":
                (path / f"{name}.{extension}").write_bytes(content)


def _row_name(chunk: str, row: int) -> str:
    return f"{chunk}{row:0{NUM_ROW_DIGITS}d}"


def _image_files(row: Row) -> dict[str, bytes]:
    size = {"width": row["width"], "height": row["height"]}
    return {
        image_extension(row["jpg"]): row["jpg"],
        "txt": row["caption"].encode(),
        "json": json.dumps(size).encode(),
    }


def _array_files(row: Row) -> dict[str, bytes]:
    import numpy as np

    files = {}
    for column, value in row.items():
        if column == "caption":
            files["txt"] = value.encode()
        else:
            content = io.BytesIO()
            np.save(content, value)
            files[f"{column}{ARRAY_ENDING}"] = content.getvalue()
    return files


FORMATS = {
    "mds": ChunkFormat(name="shard.{}.mds", write=_write_mds, finish=_finish_mds),
    "webdataset": ChunkFormat(name="{}.tar", write=_write_tar, finish=_finish_tars),
    "parquet": ChunkFormat(name="part-{}.parquet", write=_write_parquet),
    "folder": ChunkFormat(name="{}", write=_write_folder),
}


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
