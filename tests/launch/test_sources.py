"""Does the Composer launcher train on two ranks from every kind of data?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data import datasets

KINDS = ("synthetic", "synthetic latents", *datasets.WRITERS)


@pytest.fixture
def sized_for_tiny(monkeypatch):
    """The data sets as the model `tiny` takes them: 64 pixels, embeddings of width 32."""
    monkeypatch.setattr(datasets, "IMAGE_SIZE", 64)
    monkeypatch.setattr(datasets, "LATENT_SHAPE", (4, 8, 8))
    monkeypatch.setattr(datasets, "EMBEDDING_SHAPE", (77, 32))


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("mds latents", "torch"),  # the quickest; the others with -m slow
        *(pytest.param(kind, "composer", marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_two_ranks_train(kind, engine, sized_for_tiny, tmp_path, repository):
    place = ["--use_synth_data"]
    if kind in datasets.WRITERS:
        datasets.WRITERS[kind](tmp_path / "data")
        place = ["--remote", str(tmp_path / "data")]
    if kind.endswith("latents"):
        place += ["--latents", "precomputed"]
    launcher = Path(sys.executable).with_name("composer")
    command = [launcher, "-n", "2", "benchmark.py", "--model_name", "tiny", *place]
    command += ["--engine", engine]
    steps = ["--warmup_batches", "1", "--measure_batches", "13", "--batch_size", "4"]
    steps += ["--max_duration", "14ba"]
    completed = subprocess.run(
        [*command, *steps, "--results_dir", str(tmp_path / "runs")],
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (path,) = (tmp_path / "runs").glob("*/record.json")
    record = json.loads(path.read_text())
    assert record["status"] == "ok"
    assert record["config"]["data_format"] == kind.split()[0]
    assert record["ranks"]["world_size"] == 2
    # 14 steps of 4 are more than one epoch of 12 such batches.
    assert record["workload"]["num_images"] == 56
    assert record["workload"]["num_bad_samples"] == 0
