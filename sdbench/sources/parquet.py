"""What does a row of parquet hold: an image with its caption, or an encoded one?

Rows are decoded a row group at a time, without a Python object for each row.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sdbench.errors import ConfigError, RunError
from sdbench.sources.checks import (
    PLACE_FLAGS,
    check_enough_samples,
    check_no_captions_dropped,
    check_tokenizer_folder,
)
from sdbench.sources.config import SourceConfig
from sdbench.sources.latent_columns import array_shapes, find_latent_columns
from sdbench.sources.records import BadSampleError, ImageRecord, LatentRecord
from sdbench.sources.remote import cache_folder, fetch_all, is_url, list_urls

# Spellings: ours and LAION's, Hugging Face's (a struct with the field bytes), others'.
IMAGE_COLUMNS = ("jpg", "image", "image_bytes", "image.bytes", "png", "webp")
CAPTION_COLUMNS = ("caption", "text", "TEXT")

# Decoded row groups that a process keeps: the one being read, and the next one.
MAX_OPEN_GROUPS = 2


class ParquetRecords:
    """The rows of one or several parquet files, by number over all of them."""

    num_dropped = 0

    def __init__(self, files: list[Path], *, config: SourceConfig) -> None:
        """Read the files' footers.

        Args:
            files: In order.
            config: Image size, kind of latents and width of the text encoder.

        Raises:
            ConfigError: A file is damaged, or lacks a column.
        """
        self._holds_latents = config.latents == "precomputed"
        self._files = files
        self._groups: list[tuple[int, int]] = []
        self.blocks: list[int] = []
        for number, path in enumerate(files):
            with _explain_damage(path, ConfigError):
                metadata = _open(path).metadata
            names = metadata.schema.to_arrow_schema().names
            found = _find_columns(names, path=path, config=config)
            if number == 0:
                self.columns = found
            elif found != self.columns:
                _raise_columns(path, names, wanted=", ".join(self.columns.values()))
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                self.blocks.append(metadata.row_group(group).num_rows)
        self._starts = list(itertools.accumulate(self.blocks, initial=0))
        self._shapes = array_shapes(self.columns, config=config) if self._holds_latents else {}
        self._decoded: OrderedDict[int, Mapping[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, index: int) -> ImageRecord | LatentRecord:
        """Read one row; arrays are views of its decoded row group.

        Raises:
            BadSampleError: A value is missing, or of the wrong length.
            RunError: The file is damaged.
        """
        block = bisect.bisect_right(self._starts, index) - 1
        row = index - self._starts[block]
        file, group = self._groups[block]
        name = f"{self._files[file]}, row {row} of row group {group}"
        columns = self._decoded.get(block) or self._decode(block)
        if self._holds_latents:
            arrays = {
                key: columns[key].read(row, name=f"{name}, {column}")
                for key, column in self.columns.items()
            }
            return LatentRecord(name, arrays)
        image, caption = columns["image"][row], columns["caption"][row]
        return ImageRecord(
            name,
            image.as_buffer().to_pybytes() if image.is_valid else None,
            (caption.as_py() or "").strip() or None,
        )

    def _decode(self, block: int) -> Mapping[str, Any]:
        file, group = self._groups[block]
        path = self._files[file]
        with _explain_damage(path, RunError):
            table = _open(path).read_row_group(
                group, columns=list(self.columns.values()), use_threads=False
            )
            columns = {
                key: _unwrap(table.column(column).combine_chunks())
                for key, column in self.columns.items()
            }
        if self._holds_latents:
            columns = {
                key: _Arrays(column, shape=self._shapes[key]) for key, column in columns.items()
            }
        self._decoded[block] = columns
        if len(self._decoded) > MAX_OPEN_GROUPS:
            self._decoded.popitem(last=False)
        return columns


class _Arrays:
    """The arrays in one column of a row group: raw bytes, or lists of numbers, nested or flat."""

    def __init__(self, column: Any, *, shape: tuple[int, ...]) -> None:
        """Take the numbers of all rows out of the column, without copying them.

        Args:
            column: Of one chunk, of any type.
            shape: Of one row's array.
        """
        import pyarrow

        self._column = column
        self._shape = shape
        self._is_bytes = pyarrow.types.is_binary(column.type) or (
            pyarrow.types.is_large_binary(column.type)
            or pyarrow.types.is_fixed_size_binary(column.type)
        )
        if not self._is_bytes:
            self._numbers, self._bounds = _flatten(column)

    def read(self, row: int, *, name: str) -> np.ndarray:
        """One row's array.

        Args:
            row: In the row group.
            name: For the message.

        Raises:
            BadSampleError: The row is empty or has another number of values.
        """
        num_values = math.prod(self._shape)
        value = self._column[row]
        if not value.is_valid:
            raise BadSampleError(f"{name}: no value.")
        if self._is_bytes:
            data = value.as_buffer()
            # Seed 002 stores float32, because its writer has no float16.
            dtype = {2 * num_values: np.float16, 4 * num_values: np.float32}.get(data.size)
            if dtype is None:
                raise BadSampleError(
                    f"{name}: {data.size} bytes; {self._shape} is {2 * num_values} as float16 or "
                    f"{4 * num_values} as float32."
                )
            return np.frombuffer(data, dtype).reshape(self._shape)
        begin, end = self._bounds[row : row + 2]
        if end - begin != num_values:
            raise BadSampleError(f"{name}: {end - begin} values; {self._shape} is {num_values}.")
        return self._numbers[begin:end].reshape(self._shape)


def _flatten(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of a column of lists, of any depth, and where each row's begin and end."""
    import pyarrow

    bounds = np.arange(len(column) + 1)
    while not pyarrow.types.is_primitive(column.type):
        if pyarrow.types.is_fixed_size_list(column.type):
            # Its flatten() leaves out empty rows, their values are still there.
            inner = np.arange(len(column) + 1) * column.type.list_size
            column = column.values.slice(
                column.offset * column.type.list_size, len(column) * column.type.list_size
            )
        elif pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
            inner = column.offsets.to_numpy()
            column = column.values
        else:
            raise ConfigError(
                "A column holds no arrays",
                value=str(column.type),
                allowed="binary, or lists of floating point numbers",
                flag=PLACE_FLAGS,
            )
        bounds = inner[bounds]
    return column.to_numpy(zero_copy_only=False), bounds


def _unwrap(column: Any) -> Any:
    """The stored values: the bytes of Hugging Face's struct, the lists of Ray's tensors."""
    import pyarrow

    if pyarrow.types.is_struct(column.type):
        return column.field("bytes")
    return column.storage if isinstance(column, pyarrow.ExtensionArray) else column


def _open(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, memory_map=True)


@contextmanager
def _explain_damage(path: Path, kind: type) -> Iterator[None]:
    """Turn pyarrow's errors, and those of a file that has gone, into ours, naming the file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        what = f"The parquet file {path} is damaged or missing ({reason})"
        if kind is RunError:
            raise RunError(f"{what}.") from error
        raise ConfigError(
            what, value=str(path), allowed="whole parquet files", flag=PLACE_FLAGS
        ) from error


def _find_columns(names: list[str], *, path: Path, config: SourceConfig) -> dict[str, str]:
    if config.latents == "precomputed":
        return find_latent_columns(names, image_size=config.image_size)
    image = next((name for name in IMAGE_COLUMNS if name in names), None)
    caption = next((name for name in CAPTION_COLUMNS if name in names), None)
    if image is None or caption is None:
        wanted = f"{' | '.join(IMAGE_COLUMNS)}, and {' | '.join(CAPTION_COLUMNS)}"
        _raise_columns(path, names, wanted=f"{wanted}; for latents --latents precomputed")
    return {"image": image, "caption": caption}


def _raise_columns(path: Path, names: list[str], *, wanted: str) -> None:
    raise ConfigError(
        f"The parquet file {path} lacks a column",
        value=f"columns {', '.join(sorted(names))}",
        allowed=wanted,
        flag=PLACE_FLAGS,
    )


def find_files(place: str, *, local: str | None) -> list[Path]:
    """The parquet files at a place, copied here where that is a URL.

    Args:
        place: A file, a folder, either in braces or behind a URL.
        local: Folder for the copies, or None for one of the system's temporary directory.

    Raises:
        ConfigError: There is none, or one is missing.
    """
    from braceexpand import braceexpand

    files = []
    for name in braceexpand(place):
        if is_url(name):
            urls = [name] if name.endswith(".parquet") else list_urls(name, suffix=".parquet")
            files += fetch_all(urls, cache=cache_folder(place, local))
        elif Path(name).is_dir():
            files += sorted(Path(name).glob("*.parquet"))
        else:
            files.append(Path(name))
    missing = [str(path) for path in files if not path.is_file()]
    if missing or not files:
        raise ConfigError(
            "No such parquet file" if missing else "The folder holds no parquet file",
            value=missing[0] if missing else place,
            allowed="a file, a folder of files, or a quoted pattern like 'data/{00..15}.parquet'",
            flag=PLACE_FLAGS,
        )
    return files


def check(config: SourceConfig) -> int | None:
    """Check parquet files by their footers.

    Returns:
        The number of samples, or None for a URL.
    """
    if config.latents == "online":
        check_tokenizer_folder(config.tokenizer_folder)
    else:
        check_no_captions_dropped(config)
    if is_url(config.remote or config.local):
        return None
    records = open_records(config)
    check_enough_samples(config, num_samples=len(records))
    return len(records)


def open_records(config: SourceConfig) -> ParquetRecords:
    """Open the files that `config` names.

    Raises:
        ConfigError: As `find_files` and `ParquetRecords`, or the encoded captions are of another
            text encoder.
    """
    files = find_files(config.remote or config.local, local=config.local if config.remote else None)
    return ParquetRecords(files, config=config)
