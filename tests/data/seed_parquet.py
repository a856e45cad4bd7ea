"""Parquet as the programs of seeds 000 and 002 write it, made without the code under test.

They write a picture's latent as `latent_dist.sample() * 0.18215`, so it goes into the U-Net as it
is, and the last hidden states of its caption, both in float32. Their columns have three spellings.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

NUM_ROWS, TEXT_WIDTH = 6, 32  # the width of `tiny`
SCALING_FACTOR = 0.18215
SPELLINGS = {
    "seed 000": ("image_latents_{}", "caption_latents"),
    "seed 002's text": ("image_latents_{}", "caption_embeddings"),
    "seed 002's program": ("latents_{}_bytes", "caption_latents"),
}


def make_latents(image_size: int) -> np.ndarray:
    """Samples as their encoder gives them, (N, 4, S/8, S/8) float32, times the scaling factor."""
    generator = np.random.default_rng(7)
    side = image_size // 8
    mean, deviation, noise = generator.standard_normal((3, NUM_ROWS, 4, side, side))
    return ((5 * mean + 0.1 * np.abs(deviation) * noise) * SCALING_FACTOR).astype(np.float32)


def make_texts() -> np.ndarray:
    """Encoded captions, (N, 77, D) float32."""
    generator = np.random.default_rng(8)
    return generator.standard_normal((NUM_ROWS, 77, TEXT_WIDTH)).astype(np.float32)


def as_bytes(values: np.ndarray) -> pyarrow.Array:
    """Each value as float32 bytes."""
    return pyarrow.array([value.tobytes() for value in values], pyarrow.binary())


def as_fixed_size_bytes(values: np.ndarray) -> pyarrow.Array:
    """The same in a type that knows their number."""
    kind = pyarrow.binary(values[0].nbytes)
    return pyarrow.array([value.tobytes() for value in values], kind)


def as_nested_lists(values: np.ndarray) -> pyarrow.Array:
    """Each value as lists of lists of float32."""
    kind = pyarrow.float32()
    for _ in values.shape[1:]:
        kind = pyarrow.list_(kind)
    return pyarrow.array(values.tolist(), kind)


def as_flat_lists(values: np.ndarray) -> pyarrow.Array:
    """What Ray's tensors (second version) are in the file, beside the metadata of `write`."""
    kind = pyarrow.large_list(pyarrow.float32())
    return pyarrow.array(values.reshape(len(values), -1).tolist(), kind)


LAYOUTS = {
    "bytes": as_bytes,
    "bytes of fixed size": as_fixed_size_bytes,
    "nested lists": as_nested_lists,
    "Ray's tensors": as_flat_lists,
}


def write(path: Path, columns: dict[str, np.ndarray], *, layout: str) -> Path:
    """One file, as `Dataset.write_parquet` leaves it; further columns are in it."""
    fields, arrays = [pyarrow.field("hash", pyarrow.int64())], [pyarrow.array(range(NUM_ROWS))]
    for name, values in columns.items():
        array = LAYOUTS[layout](values)
        metadata = None
        if layout == "Ray's tensors":
            shape = json.dumps(values.shape[1:])
            metadata = {
                "ARROW:extension:name": "ray.data.arrow_tensor_v2",
                "ARROW:extension:metadata": shape,
            }
        fields.append(pyarrow.field(name, array.type, metadata=metadata))
        arrays.append(array)
    table = pyarrow.Table.from_arrays(arrays, schema=pyarrow.schema(fields))
    pyarrow.parquet.write_table(table, path, row_group_size=4)
    return path


def write_latents(path: Path, *, spelling: str, layout: str, image_size: int = 256) -> Path:
    """One file of latents and captions in a spelling and a layout."""
    latent, text = SPELLINGS[spelling]
    columns = {latent.format(image_size): make_latents(image_size), text: make_texts()}
    return write(path, columns, layout=layout)


def make_jpeg(index: int) -> bytes:
    """A picture of one colour, as a file."""
    buffer = io.BytesIO()
    Image.new("RGB", (80 + index, 70), (20 * index, 90, 10)).save(buffer, "JPEG")
    return buffer.getvalue()


def write_pictures(folder: Path) -> Path:
    """Two files of LAION's columns; in the second, width and height are whole numbers.

    The seeds force a schema because of that: files differ in the types of columns beside the
    pictures. The last picture of the first file is empty, as of a download that failed.
    """
    folder.mkdir()
    jpegs = [make_jpeg(index) for index in range(8)]
    for number, kind in enumerate((pyarrow.float64(), pyarrow.int64())):
        rows = range(4 * number, 4 * number + 4)
        columns = {
            "similarity": pyarrow.array([0.3] * 4),
            "hash": pyarrow.array([-(2**62) + row for row in rows], pyarrow.int64()),
            "punsafe": pyarrow.array([0.01] * 4),
            "url": pyarrow.array([f"https://example.org/{row}.jpg" for row in rows]),
            "caption": pyarrow.array([f"picture {row}" for row in rows], pyarrow.string()),
            "height": pyarrow.array([70] * 4, kind),
            "width": pyarrow.array([80 + row for row in rows], kind),
            "jpg": pyarrow.array([b"" if row == 3 else jpegs[row] for row in rows]),
            "error_msg": pyarrow.array([None] * 4, pyarrow.string()),
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{number}.parquet")
    return folder
