"""Samples of parquet files: rows of images with captions, or of latents with encoded captions.

A row group is read as a whole, and its values stay in Arrow's memory until they are asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from sdbench.base.errors import ConfigError, RunError
from sdbench.data.checks import bad_place, wrong_type
from sdbench.data.formats.latent_columns import (
    BITS_ENDING,
    LATENTS,
    check_ends,
    columns_of,
    widen_bits,
)
from sdbench.data.places.place_files import StoredFile, fetch_files, find_streamed, read_whole
from sdbench.data.places.remote import RemoteObject, find_object, in_parallel, is_url
from sdbench.data.places.remote_files import RemoteFile
from sdbench.data.samples import (
    BadSampleError,
    ImageSample,
    LatentSample,
    Samples,
    SampleType,
    clean_caption,
    max_kept,
)
from sdbench.data.source import SourceConfig

# Names of Arrow's types.
BYTES = ("binary", "large_binary", "binary_view", "fixed_size_binary")
TEXTS = ("string", "large_string", "string_view")
# A local file, or a streamed one.
ParquetFile = StoredFile | RemoteObject
Content = TypeVar("Content")


class ParquetSamples(Samples):
    """The rows of one or several parquet files, numbered over all of them."""

    def __init__(self, config: SourceConfig) -> None:
        """Read the files' footers; a `ConfigError` if one is damaged or lacks a column."""
        self._files = _find(config)
        self._footers = _read_footers(self._files, ConfigError)
        self._groups: list[tuple[int, int]] = []
        sizes: list[int] = []
        for number, (path, footer) in enumerate(zip(self._files, self._footers, strict=True)):
            schema = footer.schema.to_arrow_schema()
            if number == 0:
                self.columns = columns_of(schema.names, config)
                self.sample_type = SampleType.of(self.columns)
                self._shapes = self.sample_type.array_shapes(config)
            _check_columns(schema, self.columns, shapes=self._shapes, path=path)
            for group in range(footer.num_row_groups):
                self._groups.append((number, group))
                sizes.append(footer.row_group(group).num_rows)
        super().__init__(sizes)
        # Each row group is a separate request, so the order treats it as a file.
        self.num_blocks_of_files = [1] * len(self.blocks) if config.is_streamed else None
        # Columns of cached row groups by block, least recently used first.
        self._read_groups: dict[int, dict[str, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read_groups": {}}

    def name(self, index: int) -> str:
        """Return file, row group and row of a sample."""
        block, row = self._find(index)
        file, group = self._groups[block]
        return f"{self._files[file]}, row {row} of row group {group}"

    def read(self, index: int) -> ImageSample | LatentSample:
        """Read one row; arrays are views of its row group."""
        block, row = self._find(index)
        columns = self._read_groups.pop(block, None)
        if columns is None:
            while len(self._read_groups) >= max_kept(self.num_lanes):
                del self._read_groups[next(iter(self._read_groups))]
            file = self._files[self._groups[block][0]]
            columns = _read(file, lambda file: self._read_group(block))
        self._read_groups[block] = columns
        name = self.name(index)
        values = {part: column[row] for part, column in columns.items()}
        if self.sample_type is SampleType.IMAGES:
            image, caption = values.get("image"), values["caption"]
            has_image = image is not None and image.is_valid
            data = image.as_buffer().to_pybytes() if has_image else None
            try:
                return ImageSample(name, data, clean_caption(caption.as_py()))
            except UnicodeDecodeError as error:
                raise BadSampleError(f"{name}: its caption is not UTF-8 ({error}).") from error
        arrays: dict[str, np.ndarray] = {}
        dtypes = [np.dtype(np.float16), np.dtype(np.float32)]
        for part, shape in self._shapes.items():
            place = f"{name}, {self.columns[part]}"
            is_bits = self.columns[part].endswith(BITS_ENDING)
            allowed = [np.dtype(np.uint16)] if is_bits else dtypes
            arrays[part] = _to_array(values[part], place, shape=shape, dtypes=allowed)
            # Latents come first and fix the type: 77 x 512 numbers of 4 bytes are as long as 77 x
            # 1024 of 2, so bytes of a text embedding are float16 only beside float16 latents.
            if part in LATENTS and arrays[part].dtype.itemsize > 2:
                dtypes = dtypes[1:]
        return LatentSample(name, widen_bits(arrays, self.columns, name=name))

    def _read_group(self, block: int) -> dict[str, Any]:
        """Map each part of a sample to its column of a row group, an Arrow array."""
        import pyarrow.parquet

        number, group = self._groups[block]
        path = self._files[number]
        with _damage_named(path, RunError):
            # Opened anew each time: processes must not share an open file. Pages without a checksum
            # are read unchecked.
            file = pyarrow.parquet.ParquetFile(
                _open(path),
                metadata=self._footers[number],
                memory_map=True,
                page_checksum_verification=True,
            )
            wanted = self.columns
            if not self.needs_images:
                wanted = {"caption": wanted["caption"]}
            names = list(wanted.values())
            table = file.read_row_group(group, columns=names, use_threads=False)
            return {
                part: _unwrap(table.column(column).combine_chunks())
                for part, column in wanted.items()
            }


def _to_array(
    value: Any, place: str, *, shape: tuple[int | None, ...], dtypes: Sequence[np.dtype]
) -> np.ndarray:
    """Return the array of an Arrow scalar: bytes of one of these types, or lists of numbers."""
    import pyarrow.compute
    from pyarrow import types

    if not value.is_valid:
        raise BadSampleError(f"{place}: no value.")
    is_open = None in shape
    num_values = None if is_open else math.prod(shape)
    if _is_one_of(value.type, BYTES):
        buffer = value.as_buffer()
        by_length = {num_values * dtype.itemsize: dtype for dtype in dtypes}
        if buffer.size not in by_length:
            wanted = " or ".join(f"{length} as {dtype}" for length, dtype in by_length.items())
            raise BadSampleError(f"{place}: {buffer.size} bytes; {shape} is {wanted}.")
        return np.frombuffer(buffer, by_length[buffer.size]).reshape(shape)
    values, found = value.values, [len(value.values)]
    while not types.is_primitive(values.type):
        lengths = pyarrow.compute.unique(pyarrow.compute.list_value_length(values)).to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            raise BadSampleError(f"{place}: its lists are not all of one length.")
        found += lengths
        values = values.flatten()
    if is_open:
        return values.to_numpy(zero_copy_only=False).reshape(found)
    if found != [num_values] and _long_sides(found) != _long_sides(shape):
        raise BadSampleError(f"{place}: numbers of the shape {tuple(found)}, not {shape}.")
    return values.to_numpy(zero_copy_only=False).reshape(shape)


def _long_sides(shape: Sequence[int]) -> list[int]:
    """Return a shape without its sides of 1: a batch of one picture is a picture."""
    return [side for side in shape if side != 1]


def _unwrap(column: Any) -> Any:
    """Return the stored values: the bytes of Hugging Face's struct, the lists of Ray's tensors.

    A category of pandas is stored as an Arrow dictionary.
    """
    import pyarrow

    if pyarrow.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        return _unwrap(column.field("bytes"))
    if pyarrow.types.is_dictionary(column.type):
        return column.dictionary_decode()
    return column.storage if isinstance(column, pyarrow.ExtensionArray) else column


def _is_one_of(kind: Any, names: Sequence[str]) -> bool:
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _holds_floats(kind: Any) -> bool:
    from pyarrow import types

    while types.is_nested(kind) and hasattr(kind, "value_type"):
        kind = kind.value_type
    return types.is_floating(kind)


def _check_columns(
    schema: Any,
    columns: Mapping[str, str],
    *,
    shapes: Mapping[str, tuple[int | None, ...]],
    path: ParquetFile,
) -> None:
    """Check that a file has each column once, of a type that samples can be read from."""
    import pyarrow

    if any(schema.names.count(column) != 1 for column in columns.values()):
        raise bad_place(
            f"The parquet file {path} does not have each needed column exactly once",
            value=f"columns {', '.join(sorted(schema.names))}",
            allowed=", ".join(columns.values()),
        )
    for part, column in columns.items():
        field = schema.field(column)
        kind, shape = _unwrap(pyarrow.nulls(0, field.type)).type, _declared_shape(field)
        found = str(field.type)
        if part == "image":
            is_right, allowed = _is_one_of(kind, BYTES), "binary, or a struct with the field bytes"
        elif part == "caption":
            is_right, allowed = _is_one_of(kind, TEXTS), "text"
        elif shape is not None:
            is_right = _long_sides(shape) == _long_sides(shapes[part])
            found, allowed = f"tensors of the shape {shape}", f"the shape {shapes[part]}"
        else:
            is_bytes = _is_one_of(kind, BYTES) and None not in shapes[part]
            is_right = is_bytes or _holds_floats(kind)
            allowed = "lists of floating point numbers"
            if None not in shapes[part]:
                allowed = f"binary, or {allowed}"
        if not is_right:
            raise wrong_type(column, place=str(path), part=part, kind=found, allowed=allowed)


def _declared_shape(field: Any) -> tuple[int, ...] | None:
    """Return the shape that a column of Ray's or of Arrow's tensors declares, or None."""
    shape = getattr(field.type, "shape", None)
    if shape is None and field.metadata:  # of a type that is not registered here
        try:
            shape = json.loads(field.metadata.get(b"ARROW:extension:metadata", b"null"))
        except ValueError:
            return None
        if isinstance(shape, dict):
            shape = shape.get("shape")
    return tuple(shape) if isinstance(shape, list | tuple) else None


def _open(file: ParquetFile) -> Any:
    """Return a path for pyarrow, or a file object that reads a URL in parts."""
    return file.path if isinstance(file, StoredFile) else RemoteFile(file)


def _read(file: ParquetFile, read: Callable[[ParquetFile], Content]) -> Content:
    return read_whole(file, read) if isinstance(file, StoredFile) else read(file)


def _read_footers(files: Sequence[ParquetFile], kind: type) -> list[Any]:
    """Read the footers of files, several at a time; damage raises an error of this kind."""
    import pyarrow.parquet

    def read_footer(file: ParquetFile) -> Any:
        with _damage_named(file, kind):
            return pyarrow.parquet.read_metadata(_open(file))

    return in_parallel(lambda file: _read(file, read_footer), files)


@contextmanager
def _damage_named(path: ParquetFile, kind: type) -> Iterator[None]:
    """Turn pyarrow's errors, and that of a missing file, into ours, naming the file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        what = f"{path} is damaged or missing ({' '.join(str(error).split())})"
        if kind is RunError:
            raise RunError(f"{what}.") from error
        raise bad_place(
            what, value=path.source or str(path), allowed="whole parquet files"
        ) from error


def check(config: SourceConfig) -> int | None:
    """Check footers, and first and last rows of latents; return the samples, None for a URL."""
    if config.is_streamed:
        find_streamed(config)  # refuses what cannot be streamed
    if is_url(config.remote or config.local):
        return None
    samples = ParquetSamples(config)
    if config.wants_latents:
        check_ends(samples, config)
    return len(samples)


def _find(config: SourceConfig) -> Sequence[ParquetFile]:
    if not config.is_streamed:
        return fetch_files(config)
    return in_parallel(find_object, find_streamed(config))


def read_columns(config: SourceConfig) -> set[str]:
    """Return the names of the columns that all files have."""
    footers = _read_footers(_find(config), RunError)
    return set.intersection(*(set(footer.schema.to_arrow_schema().names) for footer in footers))
