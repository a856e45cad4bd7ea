"""Is parquet read as the programs of seeds 000 and 002 write it, and trained on?

They write a picture's latent as `latent_dist.sample() * 0.18215`, so it goes into the U-Net as it
is, and the last hidden states of its caption, both in float32. Their columns have three spellings.
"""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import benchmark
from sdbench import data
from sdbench.data.source import SourceConfig
from sdbench.record.store import load_record

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
    return pyarrow.array([value.tobytes() for value in values], pyarrow.binary())


def as_fixed_size_bytes(values: np.ndarray) -> pyarrow.Array:
    kind = pyarrow.binary(values[0].nbytes)
    return pyarrow.array([value.tobytes() for value in values], kind)


def as_nested_lists(values: np.ndarray) -> pyarrow.Array:
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
    latent, text = SPELLINGS[spelling]
    columns = {latent.format(image_size): make_latents(image_size), text: make_texts()}
    return write(path, columns, layout=layout)


def train(place: Path, *arguments: str) -> list[float]:
    """Losses of two steps of `tiny` by benchmark.py."""
    results = place.parent / f"runs-{place.stem}"
    flags = ["--engine", "torch", "--model_name", "tiny", "--no_measure_peak", "--batch_size", "2"]
    window = ["--warmup_batches", "1", "--measure_batches", "2", "--profile_batches", "0"]
    source = ["--data_format", "parquet", "--remote", str(place), "--num_workers", "0"]
    results_dir = ["--results_dir", str(results)]
    assert benchmark.main([*flags, *window, *source, *arguments, *results_dir]) == 0
    (steps,) = results.glob("*/steps.csv")
    with steps.open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("image_size", [256, 512])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_latents_arrive_as_they_were_written(spelling, layout, image_size, tmp_path):
    options = {"spelling": spelling, "layout": layout, "image_size": image_size}
    place = write_latents(tmp_path / "part.parquet", **options)
    config = SourceConfig(
        data_format="parquet",
        remote=str(place),
        image_size=image_size,
        device_batch_size=NUM_ROWS,
        seed=0,
        shuffle=False,
        latents="precomputed",
        text_embedding_dim=TEXT_WIDTH,
    )
    assert data.check(config) == NUM_ROWS
    (batch,) = data.build(config)
    # The seeds' loaders make float16 of it, too.
    assert np.array_equal(batch["latent"].numpy(), make_latents(image_size).astype(np.float16))
    assert np.array_equal(batch["text_embedding"].numpy(), make_texts().astype(np.float16))


@pytest.mark.parametrize("layout", ["bytes", "Ray's tensors"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_trains_to_the_same_losses(spelling, layout, tmp_path):
    latents = ["--latents", "precomputed", "--image_size", "256"]
    ours = {"latents_256": make_latents(256), "text_embedding": make_texts()}
    expected = train(write(tmp_path / "ours.parquet", ours, layout="nested lists"), *latents)
    assert len(expected) == 3
    assert all(math.isfinite(loss) for loss in expected)
    place = write_latents(tmp_path / "theirs.parquet", spelling=spelling, layout=layout)
    assert train(place, *latents) == expected


def make_jpeg(index: int) -> bytes:
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


def test_pictures_of_the_input_schema_train_and_an_empty_one_is_counted(tmp_path):
    place = write_pictures(tmp_path / "pictures")
    allowed = ["--on_bad_sample", "skip", "--max_bad_fraction", "0.5"]
    # Four batches of two are all of the data set, so the empty picture is met.
    losses = train(place, *allowed, "--measure_batches", "3")
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
    (record,) = (load_record(path) for path in tmp_path.glob("runs-*/*/record.json"))
    assert record["workload"]["num_bad_samples"] == 1
