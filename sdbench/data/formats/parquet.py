"""Samples of parquet files: rows of images with captions, or of latents with text embeddings.

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
from sdbench.data.latent_columns import check_array, find_latent_columns
from sdbench.data.remote import cache_folder, fetch_all, is_url, list_urls
from sdbench.data.samples import (
    BadSampleError,
    ImageSample,
    LatentSample,
    SampleType,
    clean_caption,
)
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
            _check_types(schema, self.columns, path=path)
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                self.blocks.append(metadata.row_group(group).num_rows)
        self._starts = list(itertools.accumulate(self.blocks, initial=0))
        self.sample_type = SampleType(tuple(self.columns))
        self._shapes = self.sample_type.array_shapes(config)
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
        if self.sample_type is not SampleType.IMAGES:
            return LatentSample(name, {part: columns[part].read(row, name) for part in columns})
        image, caption = columns["image"][row], columns["caption"][row]
        return ImageSample(
            name,
            image.as_buffer().to_pybytes() if image.is_valid else None,
            clean_caption(caption.as_py() or ""),
        )

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
        """Read a row group; of latents each column becomes an `_ArrayColumn`."""
        file, group = self._groups[block]
        path = self._files[file]
        with _explain_damage(path, RunError):
            table = self._open_here(file).read_row_group(
                group, columns=list(self.columns.values()), use_threads=False
            )
            columns: dict[str, Any] = {
                part: _unwrap(table.column(column).combine_chunks())
                for part, column in self.columns.items()
            }
        latents_dtype = None
        for part, shape in self._shapes.items():
            columns[part] = _ArrayColumn(
                self.columns[part], columns[part], shape=shape, latents_dtype=latents_dtype
            )
            latents_dtype = latents_dtype or columns[part].dtype
        self._decoded[block] = columns
        if len(self._decoded) > MAX_OPEN_GROUPS:
            self._decoded.popitem(last=False)
        return columns


class _ArrayColumn:
    """The arrays that a column of a row group holds, as bytes or as lists, nested or flat."""

    def __init__(
        self, name: str, values: Any, *, shape: tuple[int, ...], latents_dtype: np.dtype | None
    ) -> None:
        """Find out the type of the numbers.

        Bytes are float16, or float32 as seed 002 stores it, because its writer has no float16. But
        77 x 512 numbers of 4 bytes are as long as 77 x 1024 of 2: beside latents of more than 2
        bytes a number, text embeddings of such a length are taken for neither.

        Args:
            name: Of the column.
            values: Of one chunk.
            shape: Of one row's array.
            latents_dtype: Type of the numbers of the latents beside it; None for the latents.
        """
        self._name = name
        self._shape = shape
        self._is_null = values.is_null().to_numpy(zero_copy_only=False)
        self._numbers, self._bounds = _flatten(values)
        self.dtype = self._numbers.dtype
        self._unit = "values"
        if self.dtype == np.uint8:
            self._unit = "bytes"
            self.dtype = self._tell_dtype(latents_dtype)

    def _tell_dtype(self, latents_dtype: np.dtype | None) -> np.dtype | None:
        num_values = math.prod(self._shape)
        lengths = set(np.diff(self._bounds).tolist())
        if 4 * num_values in lengths:
            return np.dtype(np.float32)
        beside_half = latents_dtype is None or latents_dtype.itemsize == 2
        return np.dtype(np.float16) if 2 * num_values in lengths and beside_half else None

    def read(self, row: int, sample: str) -> np.ndarray:
        """One row's array, a view.

        Args:
            row: In the row group.
            sample: Its name, for the message.

        Raises:
            BadSampleError: The row is empty or has another number of values.
        """
        if self._is_null[row]:
            raise BadSampleError(f"{sample}, {self._name}: no value.")
        begin, end = self._bounds[row : row + 2]
        dtype = self.dtype or np.dtype(np.float32)
        num_wanted = math.prod(self._shape) * dtype.itemsize // self._numbers.itemsize
        if self.dtype is None or end - begin != num_wanted:
            raise BadSampleError(
                f"{sample}, {self._name}: {end - begin} {self._unit}; {self._shape} is "
                f"{num_wanted} as {dtype}."
            )
        return self._numbers[begin:end].view(dtype).reshape(self._shape)


def _flatten(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """All values of a column of bytes or lists, not copied, and where each row's begin and end."""
    import pyarrow

    bounds = np.arange(len(column) + 1)
    if _is_bytes(column.type):
        values = np.frombuffer(column.buffers()[-1], np.uint8)
        if pyarrow.types.is_fixed_size_binary(column.type):
            return values, (column.offset + bounds) * column.type.byte_width
        column = column.cast(pyarrow.large_binary())  # copies the offsets alone
        return values, np.frombuffer(column.buffers()[1], np.int64)[column.offset + bounds]
    while not pyarrow.types.is_primitive(column.type):
        if pyarrow.types.is_fixed_size_list(column.type):
            # Its flatten() leaves out empty rows, their values are still there.
            size = column.type.list_size
            inner = np.arange(len(column) + 1) * size
            column = column.values.slice(column.offset * size, len(column) * size)
        else:
            inner = column.offsets.to_numpy()
            column = column.values
        bounds = inner[bounds]
    return column.to_numpy(zero_copy_only=False), bounds


def _is_bytes(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def _check_types(schema: Any, columns: Mapping[str, str], *, path: Path) -> None:
    """Check that each column is of a type that its part of a sample can be read from.

    Raises:
        ConfigError: One is of another type.
    """
    from pyarrow import types

    for part, column in columns.items():
        kind = schema.field(column).type
        if part == "image":
            kind = _bytes_of_struct(kind)
            is_right, allowed = _is_bytes(kind), "binary, or a struct with the field bytes"
        elif part == "caption":
            is_right, allowed = types.is_string(kind) or types.is_large_string(kind), "text"
        else:
            is_right = _is_bytes(kind) or types.is_floating(_innermost(kind))
            allowed = "binary, or lists of floating point numbers"
        if not is_right:
            raise ConfigError(
                f"The column {column} of {path} is of a type that no {part} is read from",
                value=str(kind),
                allowed=allowed,
                flag=PLACE_FLAGS,
            )


def _bytes_of_struct(kind: Any) -> Any:
    """The type of the bytes in Hugging Face's struct; any other type as it is."""
    from pyarrow import types

    has_bytes = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    return kind.field("bytes").type if has_bytes else kind


def _innermost(kind: Any) -> Any:
    """The type of the numbers in lists of any depth, or in Ray's tensors."""
    import pyarrow

    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    while hasattr(kind, "value_type") and not pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    return kind


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
    if config.wants_latents:
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
    if config.wants_latents:
        check_no_captions_dropped(config)
    else:
        check_tokenizer_folder(config.tokenizer_folder)
    if is_url(config.remote or config.local):
        return None
    samples = open_samples(config)
    check_enough_samples(config, num_samples=len(samples))
    if config.wants_latents:
        num_rows = min(NUM_FIRST_SAMPLES, len(samples))
        _check_some(samples, range(num_rows), config=config)
        _check_some(samples, range(len(samples) - num_rows, len(samples)), config=config)
    return len(samples)


def _check_some(samples: ParquetSamples, indices: range, *, config: SourceConfig) -> None:
    """Check that one of the rows has arrays of the type and shapes that are wanted.

    Raises:
        ConfigError: None has.
    """
    for index in indices:
        try:
            sample = samples.read(index)
            for name, shape in samples.sample_type.array_shapes(config).items():
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
