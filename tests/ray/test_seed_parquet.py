"""The seeds' parquet under Ray: pictures in a bucket, encoded on their way, and Ray's tensors."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sdbench import data
from sdbench.data.source import SourceConfig
from sdbench.record.store import load_record
from tests.data.s3_server import S3Server, running_s3, s3  # noqa: F401
from tests.data.seed_parquet import NUM_ROWS, TEXT_WIDTH, make_latents, make_texts, write_pictures

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
WINDOW = ("--warmup_batches", "1", "--measure_batches", "3", "--profile_batches", "0")
TINY = ("--model_name", "tiny", "--batch_size", "2", "--num_threads", "1", "--no_measure_peak")


def train(folder: Path, *argv: str) -> tuple[list[float], dict]:
    """Losses and record of a run of benchmark.py."""
    command = [sys.executable, str(ROOT / "benchmark.py"), *TINY, *WINDOW, *argv]
    command += ["--results_dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*/record.json")
    with (path.parent / "steps.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)], load_record(path)


def test_pictures_in_a_bucket_are_encoded_on_their_way(s3: S3Server, tmp_path):  # noqa: F811
    folder = write_pictures(tmp_path / "pictures")
    place = s3.upload(folder, f"{tmp_path.name}/pictures")
    online = ("--engine", "ray", "--online_preprocessing", "--num_decoders", "2")
    online += ("--data_format", "parquet")
    bad = ("--on_bad_sample", "skip", "--max_bad_fraction", "0.5")
    from_bucket, record = train(tmp_path / "s3", *online, *bad, "--remote", place)
    from_folder, _ = train(tmp_path / "local", *online, *bad, "--remote", str(folder))
    assert len(from_bucket) == 4
    assert from_bucket == from_folder
    # The empty picture is one of the eight, and all of them are in the four batches.
    assert record["workload"]["num_bad_samples"] == 1
    assert s3.num_requests > 0


def test_what_ray_data_writes_is_read_with_and_without_ray(tmp_path):
    import ray

    latents, texts = make_latents(256), make_texts()
    # Not the cluster that a user may have running here.
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        columns = {"latents_256_bytes": latents, "caption_latents": texts}
        rows = [{name: values[row] for name, values in columns.items()} for row in range(NUM_ROWS)]
        ray.data.from_items(rows).repartition(1).write_parquet(str(tmp_path / "latents"))
    finally:
        ray.shutdown()
    config = SourceConfig(
        data_format="parquet",
        remote=str(tmp_path / "latents"),
        image_size=256,
        device_batch_size=NUM_ROWS,
        seed=0,
        shuffle=False,
        latents="precomputed",
        text_embedding_dim=TEXT_WIDTH,
    )
    # Here Ray has told Arrow of its types of tensors; a process that trains by torch does not.
    (batch,) = data.build(config)
    assert np.array_equal(batch["latent"].numpy(), latents.astype(np.float16))
    assert np.array_equal(batch["text_embedding"].numpy(), texts.astype(np.float16))
    source = ("--latents", "precomputed", "--image_size", "256", "--remote", config.remote)
    losses, _ = train(tmp_path / "runs", "--engine", "torch", "--num_workers", "0", *source)
    assert np.isfinite(losses).all()
