"""Is parquet read as the programs of seeds 000 and 002 write it, and trained on?"""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

import benchmark
from sdbench import data
from sdbench.data.source import SourceConfig
from sdbench.record.store import load_record
from tests.data.seed_parquet import (
    LAYOUTS,
    NUM_ROWS,
    SPELLINGS,
    TEXT_WIDTH,
    make_latents,
    make_texts,
    write,
    write_latents,
    write_pictures,
)
from tests.marks import quick_and_slow


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


LATENTS = ("--latents", "precomputed", "--image_size", "256")


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """Losses of training on the same in this suite's own columns."""
    place = tmp_path_factory.mktemp("ours") / "ours.parquet"
    ours = {"latents_256": make_latents(256), "text_embedding": make_texts()}
    losses = train(write(place, ours, layout="nested lists"), *LATENTS)
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    return losses


@pytest.mark.parametrize(
    ("spelling", "layout"),
    quick_and_slow(
        itertools.product(SPELLINGS, ("bytes", "Ray's tensors")),
        quick=[("seed 002's program", "Ray's tensors")],
    ),
)
def test_every_spelling_trains_to_the_same_losses(spelling, layout, expected, tmp_path):
    place = write_latents(tmp_path / "theirs.parquet", spelling=spelling, layout=layout)
    assert train(place, *LATENTS) == expected


def test_pictures_of_the_input_schema_train_and_an_empty_one_is_counted(tmp_path):
    place = write_pictures(tmp_path / "pictures")
    allowed = ["--on_bad_sample", "skip", "--max_bad_fraction", "0.5"]
    # Four batches of two are all of the data set, so the empty picture is met.
    losses = train(place, *allowed, "--measure_batches", "3")
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
    (record,) = (load_record(path) for path in tmp_path.glob("runs-*/*/record.json"))
    assert record["workload"]["num_bad_samples"] == 1
