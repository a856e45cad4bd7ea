"""The same 49 samples in every format, written without the code under test.

Sample i is a picture of 60 x 40 pixels, all of the value 5 i, with the caption "picture i"; as
latents it has the mean i / 8, the log-variance -i / 8 and the embedding i / 16.
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from sdbench import data
from sdbench.base.conditions import Condition, ModelInputs
from sdbench.data.source import SourceConfig

NUM_SAMPLES = 49
IMAGE_SIZE = 32
LATENT_SHAPE = (4, IMAGE_SIZE // 8, IMAGE_SIZE // 8)
EMBEDDING_SHAPE = (77, 8)


def encode(image: Image.Image, *, file_format: str = "PNG") -> bytes:
    """A picture as a file."""
    buffer = io.BytesIO()
    image.save(buffer, file_format)
    return buffer.getvalue()


def make_png(index: int) -> bytes:
    """The picture of a sample, as a file."""
    return encode(Image.fromarray(np.full((40, 60, 3), 5 * index, dtype=np.uint8)))


def make_ramp(index: int) -> np.ndarray:
    """A picture of 60 x 40 pixels in which a crop or a flip is seen: number, column and row."""
    rows, columns = np.indices((40, 60))
    return np.stack([np.full_like(rows, index), 4 * columns, 6 * rows], axis=2).astype(np.uint8)


def make_ramp_png(index: int) -> bytes:
    """The same as a file; put in the place of `make_png`."""
    return encode(Image.fromarray(make_ramp(index)))


def make_caption(index: int) -> str:
    """The caption of a sample."""
    return f"picture {index}"


def make_arrays(index: int) -> dict[str, np.ndarray]:
    """A sample as moments, as a latent, and its embedded caption."""
    moments = np.stack([np.full(LATENT_SHAPE, index / 8), np.full(LATENT_SHAPE, -index / 8)])
    return {
        "moments": moments.reshape(8, *LATENT_SHAPE[1:]).astype(np.float16),
        "latent": np.full(LATENT_SHAPE, index / 8, dtype=np.float16),
        "text_embedding": np.full(EMBEDDING_SHAPE, index / 16, dtype=np.float16),
    }


def indices(batches: Iterable[dict]) -> list[int]:
    """Which samples a list of batches has, in order."""
    scales = {"image": 1 / 5, "latent": 8, "latent_mean": 8}
    found = []
    for batch in batches:
        (name,) = scales.keys() & batch.keys()
        found += [round(float(value.float().mean()) * scales[name]) for value in batch[name]]
    return found


def make_source(kind: str, place: Path | str | None, **changes) -> SourceConfig:
    """A small source of a kind of data, as `WRITERS` names them, at this place."""
    options = {
        "data_format": kind.split()[0],
        "latents": "precomputed" if kind.endswith("latents") else "online",
        "remote": None if place is None else str(place),
        "image_size": IMAGE_SIZE,
        "inputs": ModelInputs(conditions=(Condition(shape=EMBEDDING_SHAPE),)),
        "device_batch_size": 4,
        "seed": 3,
    }
    return SourceConfig(**{**options, **changes})


def read_epoch(config: SourceConfig) -> list[int]:
    """Which samples the first epoch of a source has, in order."""
    return indices(data.build(config))


def write_mds(
    folder: Path, *, hashes: tuple[str, ...] = ("xxh64",), compression: str | None = None
) -> None:
    """Four shards of at most 16 samples each; padding behind a PNG's end is not read."""
    columns = {"jpg": "bytes", "caption": "str"}
    rows = ((make_png(index) + b"\0" * 64_000, make_caption(index)) for index in range(NUM_SAMPLES))
    options = {"size_limit": 2**20, "hashes": list(hashes), "compression": compression}
    write_shards(folder, columns, rows, **options)
    assert len(list(folder.glob("*.mds*"))) == 4


def write_mds_latents(folder: Path) -> None:
    """VAE moments and embeddings in our own columns."""
    columns = {
        f"latent_moments_{IMAGE_SIZE}": "ndarray:float16:8,4,4",
        "text_embedding": "ndarray:float16:77,8",
        "caption": "str",
    }
    rows = (
        (arrays["moments"], arrays["text_embedding"], make_caption(index))
        for index, arrays in enumerate(map(make_arrays, range(NUM_SAMPLES)))
    )
    write_shards(folder, columns, rows, size_limit=2**15, hashes=["sha1"])


def write_shards(
    folder: Path, columns: dict[str, str], rows: Iterable[Iterable], **options
) -> Path:
    """MDS of rows of values, by Streaming's own writer."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for row in rows:
            writer.write(dict(zip(columns, row, strict=True)))
    return folder


# What `write_tars` writes: the samples of each tar.
TAR_SIZES = {"00000.tar": 5, "00001.tar": 30, "00002.tar": 14}


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], *, mode: str = "w") -> Path:
    """A tar of these files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_tars(folder: Path) -> None:
    """Three tars."""
    numbers = iter(range(NUM_SAMPLES))
    for name, size in TAR_SIZES.items():
        members = []
        for index in itertools.islice(numbers, size):
            width = json.dumps({"original_width": 10 * index}).encode()
            members.append((f"{index:06d}.png", make_png(index)))
            members.append((f"{index:06d}.txt", make_caption(index).encode()))
            members.append((f"{index:06d}.json", width))
        write_tar(folder / name, members)


def write_tars_of_latents(folder: Path) -> None:
    """The same three tars with moments and embeddings as files of numpy's, and captions."""
    numbers = iter(range(NUM_SAMPLES))
    for name, size in TAR_SIZES.items():
        members = []
        for index in itertools.islice(numbers, size):
            arrays = make_arrays(index)
            members += array_members(
                f"{index:06d}",
                {
                    f"latent_moments_{IMAGE_SIZE}": arrays["moments"],
                    "text_embedding": arrays["text_embedding"],
                },
            )
            members.append((f"{index:06d}.txt", make_caption(index).encode()))
        write_tar(folder / name, members)


def array_members(key: str, arrays: dict[str, np.ndarray]) -> list[tuple[str, bytes]]:
    """Arrays as WebDataset names and stores them."""
    members = []
    for name, values in arrays.items():
        content = io.BytesIO()
        np.save(content, values)
        members.append((f"{key}.{name}.npy", content.getvalue()))
    return members


def write_table(path: Path, columns: dict, *, row_group_size: int) -> Path:
    """A parquet file of columns by name, or of a table of Arrow's."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    # A table is not made again: Ray's types, once imported, cannot be copied.
    table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def write_parquet(folder: Path) -> None:
    """Two files, LAION's columns, row groups of 8."""
    for number, numbers in enumerate((range(30), range(30, NUM_SAMPLES))):
        columns = {
            "hash": list(numbers),
            "jpg": [make_png(index) for index in numbers],
            "caption": [make_caption(index) for index in numbers],
            "width": [60.0 for _ in numbers],
        }
        write_table(folder / f"{number}.parquet", columns, row_group_size=8)


def write_parquet_latents(folder: Path) -> None:
    """One file as Anyscale's first guide has it: sampled latents and captions as float32 bytes."""
    names = {f"latents_{IMAGE_SIZE}_bytes": "latent", "caption_latents": "text_embedding"}
    columns = {
        column: [make_arrays(index)[name].astype("f4").tobytes() for index in range(NUM_SAMPLES)]
        for column, name in names.items()
    }
    write_table(folder / "part.parquet", columns, row_group_size=16)


def write_folder(
    folder: Path, *, num_samples: int = NUM_SAMPLES, has_captions: bool = True
) -> None:
    """Pictures, each with a caption in a .txt beside it unless told otherwise."""
    folder.mkdir(parents=True)
    for index in range(num_samples):
        (folder / f"{index:03d}.png").write_bytes(make_png(index))
        if has_captions:
            (folder / f"{index:03d}.txt").write_text(make_caption(index))


WRITERS = {
    "mds": write_mds,
    "mds latents": write_mds_latents,
    "webdataset": write_tars,
    "webdataset latents": write_tars_of_latents,
    "parquet": write_parquet,
    "parquet latents": write_parquet_latents,
    "folder": write_folder,
}


def flip_a_bit(path: Path, *, position: int = -10, bit: int = 0) -> None:
    """Damage a file; ten bytes before the end of a shard is padding, where no decoder looks."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def edit_index(folder: Path, edit: Callable[[list[dict]], object]) -> None:
    """Change the entries of the shards in an index.json."""
    index = json.loads((folder / "index.json").read_text())
    edit(index["shards"])
    (folder / "index.json").write_text(json.dumps(index))


def read_mds(folder: Path) -> list[dict]:
    """The samples of MDS data, by Streaming's own reader."""
    from streaming.base.format.mds.reader import MDSReader

    shards = json.loads((folder / "index.json").read_text())["shards"]
    readers = [MDSReader.from_json(str(folder), None, dict(shard)) for shard in shards]
    return [reader[index] for reader in readers for index in range(len(reader))]


def copies(cache: Path) -> list[Path]:
    """The copies in a folder, which may not be there, without the locks beside them."""
    return [path for path in cache.glob("*") if path.suffix != ".lock"]


def read_files(folder: Path) -> dict[str, bytes]:
    """The content of each file below a folder, by its path there."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
