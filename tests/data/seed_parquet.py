"""Parquet as the programs of seeds 000 and 002 write it, made without the code under test.

They write a picture's latent as `latent_dist.sample() * 0.18215`, so it goes into the U-Net as it
is.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

NUM_ROWS, TEXT_WIDTH = 6, 32  # the width of `tiny`
SCALING_FACTOR = 0.18215


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
