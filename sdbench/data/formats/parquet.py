"""What does a row of parquet hold: an image with its caption, or an encoded one?

Rows are decoded a row group at a time, without a Python object for each row.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sdbench.base.errors import ConfigError, RunError
from sdbench.data.formats.checks import (
    PLACE_FLAGS,
    check_enough_samples,
    check_no_captions_dropped,
    check_tokenizer_folder,
)
from sdbench.data.latent_columns import array_shapes, check_array, find_latent_columns
from sdbench.data.remote import cache_folder, fetch_all, is_url, list_urls
from sdbench.data.samples import BadSampleError, ImageSample, LatentSample, clean_caption
from sdbench.data.source import SourceConfig

# Spellings: ours and LAION's, Hugging Face's (a struct with the field bytes), others'.
IMAGE_COLUMNS = ("jpg", "image", "image_bytes", "image.bytes", "png", "webp")
CAPTION_COLUMNS = ("caption", "text", "TEXT")

# Decoded row groups that a process keeps: the one being read, and the next one.
MAX_OPEN_GROUPS = 2
MAX_OPEN_FILES = 8
# Rows that may be bad before a data set is taken for another model's.
NUM_FIRST_SAMPLES = 8


class ParquetSamples:
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
            schema = metadata.schema.to_arrow_schema()
            if number == 0:
                self.columns = _find_columns(schema.names, path=path, config=config)
            if not set(self.columns.values()) <= set(schema.names):
                _raise_columns(path, schema.names, wanted=", ".join(self.columns.values()))
            if not self._holds_latents:
                _check_types(schema, self.columns, path=path)
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                self.blocks.append(metadata.row_group(group).num_rows)
        self._starts = list(itertools.accumulate(self.blocks, initial=0))
        self._shapes = array_shapes(self.columns, config=config) if self._holds_latents else {}
        self._decoded: OrderedDict[int, Mapping[str, Any]] = OrderedDict()
        self._opened: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        # What has been opened and decoded belongs to this process.
        return {**self.__dict__, "_opened": OrderedDict(), "_decoded": OrderedDict()}

    def read(self, index: int) -> ImageSample | LatentSample:
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
        self._decoded.move_to_end(block)
        if self._holds_latents:
            arrays = {
                key: columns[key].read(row, name=f"{name}, {column}")
                for key, column in self.columns.items()
            }
            return LatentSample(name, arrays)
        image, caption = columns["image"][row], columns["caption"][row]
        return ImageSample(
            name,
            image.as_buffer().to_pybytes() if image.is_valid else None,
            clean_caption(caption.as_py() or ""),
        )

    def _take_arrays(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        arrays: dict[str, Any] = {}
        # Of the latents, whose shape is known; they come first.
        latents_dtype = None
        for key, column in columns.items():
            shape = self._shapes[key]
            if _is_bytes(column.type):
                arrays[key] = _Bytes(column, shape=shape, latents_dtype=latents_dtype)
            else:
                arrays[key] = _Lists(column, shape=shape)
            latents_dtype = latents_dtype or arrays[key].dtype
        return arrays

    def _open_here(self, number: int) -> Any:
        """The file, opened by this process, as forked workers must not share one."""
        key = (os.getpid(), number)
        if key not in self._opened:
            self._opened[key] = _open(self._files[number])
        self._opened.move_to_end(key)
        if len(self._opened) > MAX_OPEN_FILES:
            self._opened.popitem(last=False)
        return self._opened[key]

    def _decode(self, block: int) -> Mapping[str, Any]:
        file, group = self._groups[block]
        path = self._files[file]
        with _explain_damage(path, RunError):
            table = self._open_here(file).read_row_group(
                group, columns=list(self.columns.values()), use_threads=False
            )
            columns = {
                key: _unwrap(table.column(column).combine_chunks())
                for key, column in self.columns.items()
            }
        if self._holds_latents:
            columns = self._take_arrays(columns)
        self._decoded[block] = columns
        if len(self._decoded) > MAX_OPEN_GROUPS:
            self._decoded.popitem(last=False)
        return columns


class _Bytes:
    """Arrays that one column of a row group holds as raw bytes."""

    def __init__(
        self, column: Any, *, shape: tuple[int, ...], latents_dtype: np.dtype | None
    ) -> None:
        """Find the bytes of all rows, without copying them.

        Args:
            column: Of one chunk, binary.
            shape: Of one row's array.
            latents_dtype: Type of the numbers of the latents beside it, None for the latents.
        """
        self._shape = shape
        self._num_values = math.prod(shape)
        self._is_null = column.is_null().to_numpy(zero_copy_only=False)
        self._data = column.buffers()[-1]
        self._bounds = _byte_bounds(column)
        self.dtype = self._tell_dtype(latents_dtype)

    def _tell_dtype(self, latents_dtype: np.dtype | None) -> np.dtype | None:
        """Float16, or float32 as seed 002 stores it, because its writer has no float16.

        77 x 512 numbers of 4 bytes are as long as 77 x 1024 of 2: beside latents of more than 2
        bytes a number, such a length is taken for neither.
        """
        lengths = set(np.diff(self._bounds)[~self._is_null].tolist())
        if 4 * self._num_values in lengths:
            return np.dtype(np.float32)
        beside_half = latents_dtype is None or latents_dtype.itemsize == 2
        if 2 * self._num_values in lengths and beside_half:
            return np.dtype(np.float16)
        return None

    def read(self, row: int, *, name: str) -> np.ndarray:
        """One row's array, a view.

        Args:
            row: In the row group.
            name: For the message.

        Raises:
            BadSampleError: The row is empty or has another number of bytes.
        """
        if self._is_null[row]:
            raise BadSampleError(f"{name}: no value.")
        begin, end = self._bounds[row : row + 2]
        if self.dtype is None or end - begin != self._num_values * self.dtype.itemsize:
            dtype = self.dtype or np.dtype(np.float32)
            raise BadSampleError(
                f"{name}: {end - begin} bytes; {self._shape} is "
                f"{self._num_values * dtype.itemsize} as {dtype}."
            )
        array = np.frombuffer(self._data, self.dtype, self._num_values, int(begin))
        return array.reshape(self._shape)


def _byte_bounds(column: Any) -> np.ndarray:
    """Where each row of a binary column begins in its buffer, and where the last one ends."""
    import pyarrow

    rows = np.arange(column.offset, column.offset + len(column) + 1)
    if pyarrow.types.is_fixed_size_binary(column.type):
        return rows * column.type.byte_width
    width = np.int64 if pyarrow.types.is_large_binary(column.type) else np.int32
    return np.frombuffer(column.buffers()[1], width)[rows]


class _Lists:
    """Arrays that one column of a row group holds as lists of numbers, nested or flat."""

    def __init__(self, column: Any, *, shape: tuple[int, ...]) -> None:
        """Take the numbers of all rows out of the column, without copying them.

        Args:
            column: Of one chunk.
            shape: Of one row's array.
        """
        self._shape = shape
        self._is_null = column.is_null().to_numpy(zero_copy_only=False)
        self._numbers, self._bounds = _flatten(column)
        self.dtype = self._numbers.dtype if self._numbers.dtype.kind == "f" else None

    def read(self, row: int, *, name: str) -> np.ndarray:
        """As `_Bytes.read`."""
        if self._is_null[row]:
            raise BadSampleError(f"{name}: no value.")
        num_values = math.prod(self._shape)
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


def _is_bytes(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def _check_types(schema: Any, columns: Mapping[str, str], *, path: Path) -> None:
    """Check that images are bytes and captions are texts.

    Raises:
        ConfigError: A column is of another type.
    """
    import pyarrow

    image, caption = (schema.field(columns[name]).type for name in ("image", "caption"))
    if pyarrow.types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image = image.field("bytes").type
    is_text = pyarrow.types.is_string(caption) or pyarrow.types.is_large_string(caption)
    for name, kind, is_right in (("image", image, _is_bytes(image)), ("caption", caption, is_text)):
        if not is_right:
            raise ConfigError(
                f"The column {columns[name]} of {path} holds no {name}s",
                value=str(kind),
                allowed="binary (or a struct with the field bytes) for images, text for captions",
                flag=PLACE_FLAGS,
            )


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
        local: Folder for the copies, or None for one of the user's cache.

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
    samples = open_samples(config)
    check_enough_samples(config, num_samples=len(samples))
    if config.latents != "online":
        check_first_samples(samples, config=config)
    return len(samples)


def check_first_samples(samples: ParquetSamples, *, config: SourceConfig) -> None:
    """Check that one of the first rows, and of the last ones, has the shapes that are wanted.

    Raises:
        ConfigError: None has.
    """
    shapes = array_shapes(samples.columns, config=config)
    num_rows = min(NUM_FIRST_SAMPLES, len(samples))
    _check_some(samples, range(num_rows), shapes=shapes, config=config)
    last = range(len(samples) - num_rows, len(samples))
    _check_some(samples, last, shapes=shapes, config=config)


def _check_some(
    samples: ParquetSamples,
    indices: range,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    config: SourceConfig,
) -> None:
    for index in indices:
        try:
            sample = samples.read(index)
            for name, shape in shapes.items():
                check_array(f"{sample.name}, {name}", sample.arrays[name], shape=shape)
            return
        except BadSampleError as error:
            reason = str(error)
    raise ConfigError(
        f"No sample at one end of the data is of this model and resolution ({reason.rstrip('.')})",
        value=f"{config.image_size} px, embeddings of width {config.text_embedding_dim}",
        allowed="latents made by the VAE and text encoder of the model that is trained",
        flag="--model_name or --image_size",
    )


def open_samples(config: SourceConfig) -> ParquetSamples:
    """Open the files that `config` names.

    Raises:
        ConfigError: As `find_files` and `ParquetSamples`.
    """
    files = find_files(config.remote or config.local, local=config.local if config.remote else None)
    return ParquetSamples(files, config=config)
