"""Samples of MDS shards, read by number; a shard is checked against index.json when it is opened.

Streaming's own reader opens the file anew for each sample and copies what it reads several times.
Here a shard stays open, and arrays are views of what was read. (Mapping the files would save one
more copy, but the page faults of the first epoch cost far more than that copy does.)
"""

from __future__ import annotations

import io
import itertools
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from streaming import Stream
from streaming.base.format.mds.encodings import mds_decode
from streaming.base.format.mds.reader import MDSReader

from sdbench.base.errors import RunError
from sdbench.data.checks import tell_unpacking
from sdbench.data.formats.compat import CheckedStream, open_shards
from sdbench.data.formats.latent_columns import LATENTS, columns_of, widen_bits
from sdbench.data.formats.mds_entries import check_file, read_bounds
from sdbench.data.formats.mds_index import (
    BYTES,
    LEAVE_OUT,
    choose_hashes,
    find_present,
    is_packed,
    keep_index,
    locate_mds,
)
from sdbench.data.formats.rgb import to_rgb
from sdbench.data.places.place_files import StoredFile, read_whole
from sdbench.data.places.remote import errors_named
from sdbench.data.samples import (
    BadSampleError,
    ImageSample,
    LatentSample,
    MissingLatentError,
    Samples,
    SampleType,
    clean_caption,
    decoding,
)
from sdbench.data.source import SourceConfig

# Shards that a process keeps open, well below the usual limit of 1,024 files.
MAX_OPEN_SHARDS = 128

# A shard of 64 MiB takes a minute at 10 Mbit/s.
DOWNLOAD_TIMEOUT_S = 60.0
NUM_DOWNLOAD_RETRIES = 2


class MdsSamples(Samples):
    """The samples of one or several MDS data sets, numbered over all of them."""

    def __init__(
        self,
        shards: Sequence[tuple[Stream, MDSReader]],
        *,
        config: SourceConfig,
        prepare: Callable[[int], None] | None = None,
        present: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Set up; no shard is opened yet.

        `prepare` makes a shard present in the local folder, by number (None: Streaming's own
        download); `present` has for each shard the positions of the samples to read (None: all).
        """
        sizes = [len(shard) for _, shard in shards]
        super().__init__(sizes if present is None else list(map(len, present)))
        self.num_dropped = sum(sizes) - sum(self.blocks)
        self._present = present
        self._shards = shards
        self._prepare = prepare or self._download
        self._validate_hash = config.validate_hash
        self._open: OrderedDict[int, _ShardFile] = OrderedDict()
        # Data sets that are streamed together may name their columns differently.
        self._columns = [columns_of(shard.column_names, config) for _, shard in shards]
        self.columns = self._columns[0]
        self.sample_type = SampleType.of(self.columns)
        shapes = self.sample_type.array_shapes(config)
        self._shapes = {self.columns[name]: shape for name, shape in shapes.items()}

    def name(self, index: int) -> str:
        """Return the shard of a sample, and its number there."""
        shard_id, position = self._find(index)
        return f"{self._file(shard_id)}, sample {position}"

    def read(self, index: int) -> ImageSample | LatentSample:
        """Read one sample; its shard is copied first if it is not here yet."""
        shard_id, position = self._find(index)
        shard = self._open.get(shard_id) or self._open_shard(shard_id)
        columns = self._columns[shard_id]
        name = f"{shard.file}, sample {position}"
        with decoding(name, "it"):
            values = shard.read(position, columns)
        for key, value in values.items():
            if value is None:
                kind = MissingLatentError if key in LATENTS else BadSampleError
                raise kind(f"{name}, {columns[key]}: no value.")
        if self.sample_type is SampleType.IMAGES:
            return ImageSample(name, values["image"], clean_caption(values["caption"]))
        return LatentSample(name, widen_bits(values, columns, name=name))

    def _find(self, index: int) -> tuple[int, int]:
        shard_id, position = super()._find(index)
        if self._present is not None:
            position = int(self._present[shard_id][position])
        return shard_id, position

    def _file(self, shard_id: int) -> StoredFile:
        """Return the local file of a shard, and the source if it is a copy."""
        stream, shard = self._shards[shard_id]
        source = None
        if stream.remote not in (None, stream.local):
            source = os.path.join(stream.remote, (shard.zip_data or shard.raw_data).basename)
        return StoredFile(Path(stream.local, shard.raw_data.basename), source=source)

    def _open_shard(self, shard_id: int) -> _ShardFile:
        file, (_, shard) = self._file(shard_id), self._shards[shard_id]
        hashes = choose_hashes(shard.raw_data.hashes, wanted=self._validate_hash)
        if not file.path.is_file():
            self._fetch(shard_id)
        self._open[shard_id] = opened = read_whole(
            file,
            lambda file: _ShardFile(file, shard, hashes=hashes, shapes=self._shapes),
            copy_again=lambda file: self._fetch(shard_id),
        )
        if len(self._open) > MAX_OPEN_SHARDS:
            self._open.popitem(last=False)
        return opened

    def _fetch(self, shard_id: int) -> None:
        path, (stream, _) = self._file(shard_id).path, self._shards[shard_id]
        with errors_named(f"Shard {path.name} cannot be had from {stream.remote or stream.local}"):
            # Another process or Streaming's own thread may be copying it, and may fail without
            # raising here, on a busy machine twice. The last attempt downloads it directly.
            for prepare in (self._prepare, self._prepare, self._download):
                prepare(shard_id)
                if path.is_file():
                    return
            raise FileNotFoundError("it is missing")

    def _download(self, shard_id: int) -> None:
        stream, shard = self._shards[shard_id]
        stream.prepare_shard(shard)


class _ShardFile:
    """One shard file, open for reading."""

    def __init__(
        self,
        file: StoredFile,
        shard: MDSReader,
        *,
        hashes: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Open the file, check it against index.json, and parse the encodings of its columns."""
        self.file = file
        self._file = file.path.open("rb", buffering=0)
        try:
            check_file(file.path, num_bytes=shard.raw_data.bytes, hashes=hashes)
            entry = {"samples": len(shard), "column_sizes": shard.column_sizes}
            self._bounds = read_bounds(file.path, entry).tolist()
        except ValueError as error:
            raise RunError(f"Shard {file} is damaged: {error}.") from error
        encodings = dict(zip(shard.column_names, shard.column_encodings, strict=True))
        self._decoders = {
            name: make_decoder(encoding, shape=shapes.get(name))
            for name, encoding in encodings.items()
        }
        self._sizes = shard.column_sizes
        self._num_unsized = self._sizes.count(None)

    def read(self, position: int, columns: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of a sample's columns, by part; arrays may be views of its bytes."""
        begin, end = self._bounds[position : position + 2]
        data = np.empty(end - begin, np.uint8)
        if os.preadv(self._file.fileno(), [data], begin) != end - begin:
            raise RunError(f"Shard {self.file} has been cut while it was read.")
        # A sample begins with the sizes, as uint32, of the columns without a fixed one.
        unsized = iter(struct.unpack_from(f"<{self._num_unsized}I", data))
        sizes = [next(unsized) if size is None else size for size in self._sizes]
        ends = itertools.accumulate(sizes, initial=4 * self._num_unsized)
        places = dict(zip(self._decoders, itertools.pairwise(ends), strict=True))
        return {
            part: self._decoders[column](data[slice(*places[column])])
            for part, column in columns.items()
        }


Decoder = Callable[[np.ndarray], Any]

# Modes of PIL that a PNG file stores unchanged.
PNG_MODES = ("1", "L", "LA", "I", "I;16", "RGB", "RGBA")


def _make_png(data: np.ndarray) -> bytes:
    """Make a PNG file of a picture in Streaming's encoding ``pil``, which stores no palette."""
    width, height, num_letters = struct.unpack_from("<3I", data)
    num_bytes = len(data) - 12 - num_letters
    # A pixel takes at least a bit. Checked first, because PIL would allocate all pixels.
    if not 0 < width * height <= 8 * num_bytes:
        raise ValueError(f"{width} x {height} pixels in {num_bytes} bytes")
    picture = mds_decode("pil", data.tobytes())
    if picture.mode in ("P", "PA"):
        raise ValueError(f"a picture of the mode {picture.mode} was stored without its palette")
    file = io.BytesIO()
    kept = picture if picture.mode in PNG_MODES else to_rgb(picture)
    kept.save(file, "PNG", compress_level=1)
    return file.getvalue()


def make_decoder(encoding: str, *, shape: tuple[int, ...] | None) -> Decoder:
    """Return the function that decodes the bytes of a column.

    An array (one with a `shape`) that is stored as ``bytes`` holds float16, as MosaicML diffusion
    stores it; it is None if it has no bytes.
    """
    if encoding == BYTES and shape is not None:
        return lambda data: data.view(np.float16).reshape(shape) if len(data) else None
    if encoding in ("jpeg", "png"):
        # Kept as files: Streaming would open them with any decoder of PIL.
        return lambda data: data.tobytes()
    if encoding == "pil":
        return _make_png
    name, *rest = encoding.split(":")
    if name == "ndarray" and len(rest) == 2:
        dtype, shape = np.dtype(rest[0]), tuple(int(side) for side in rest[1].split(","))
        return lambda data: data.view(dtype).reshape(shape)
    return lambda data: mds_decode(encoding, data.tobytes())


def open_samples(config: SourceConfig) -> MdsSamples:
    """Open the data sets that `config` names, without Streaming's order and prefetching."""
    shards = [(stream, shard) for stream in make_streams(config) for shard in open_shards(stream)]
    present = None
    if config.missing_latents == LEAVE_OUT:
        (place,) = locate_mds(config)
        column, *_ = columns_of(place.columns, config).values()
        present = find_present(place, column)
    return MdsSamples(shards, config=config, present=present)


def make_streams(config: SourceConfig) -> list[Stream]:
    """Return Streaming's description of each data set, with its index in the local folder."""
    streams = []
    for place in locate_mds(config):
        keep_index(place)
        if config.rank == 0 and any(is_packed(shard, place.local) for shard in place.shards):
            tell_unpacking(place.source, place.local)
        weight = {} if place.proportion is None else {"proportion": place.proportion}
        stream = CheckedStream(
            remote=place.remote,
            local=place.local,
            # A shard that is read in place cannot be downloaded again: trying delays the error.
            download_retry=1 if place.remote is None else NUM_DOWNLOAD_RETRIES,
            download_timeout=DOWNLOAD_TIMEOUT_S,
            # Removes compressed copies after decompression, never files in the user's own folder.
            keep_zip=False,
            **weight,
        )
        streams.append(stream)
    return streams
