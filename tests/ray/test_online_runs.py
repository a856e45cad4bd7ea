"""train.py --online_preprocessing: the losses of a run on latents that were made beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdbench.encoding import precompute
from sdbench.measuring.ray_feed import read_stages
from sdbench.record.store import load_record
from tests.data import datasets
from tests.ray.conftest import run_alone
from tests.schemas import validate
from tests.train.in_turn import train_in_turn
from tests.train.written import read_losses

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]

NUM_STEPS = 7  # step 6 ends an epoch of 49 samples
ENCODED = ("--image_size", "64", "--encoder_dtype", "fp32")
TRAINING = ("--batch_size", "8", "--no_shuffle", "--precision", "fp32", "--num_threads", "1")
ONLINE = ("--engine", "ray", "--online_preprocessing", "--online_encoder_batch_size", "4")


def make_argv(results: Path, name: str, *argv: str) -> list[str]:
    """The arguments of train.py."""
    options = [*ENCODED, *TRAINING, "--results_dir", str(results), "--run_name", name, *argv]
    return [*options, "--max_duration", f"{NUM_STEPS}ba", "--log_every_batches", "1"]


def test_two_ranks_have_the_losses_of_a_run_on_latents(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "make_png", datasets.make_ramp_png)
    pictures, latents = tmp_path / "pictures", tmp_path / "latents"
    # The family with most beside the latents; test_online_loader.py has others, and a resume.
    model = ("--model_name", "tiny-sdxl")
    datasets.write_parquet(pictures)
    # Made in batches of those that the encoders of `ONLINE` see.
    argv = [*model, *ENCODED, "--remote", str(pictures), "--folder", str(latents)]
    argv += ["--out_format", "parquet", "--results_dir", str(tmp_path / "precompute")]
    argv += ["--device_batch_size", "4"]
    assert precompute.main(argv) == 0
    on_latents = ("--engine", "torch", "--latents", "precomputed", "--remote", str(latents))
    reference = make_argv(tmp_path, "reference", *model, *on_latents)
    train_in_turn("torch", tmp_path, reference)
    online = (*model, *ONLINE, "--num_ray_workers", "2")
    online += ("--remote", str(pictures))
    run_alone("train.py", *make_argv(tmp_path, "online", *online))
    losses = read_losses(tmp_path / "online")
    assert losses == read_losses(tmp_path / "reference")
    assert len(set(losses)) == NUM_STEPS
    record = load_record(tmp_path / "online" / "record.json")
    validate(record)
    assert record["workload"]["num_failed_blocks"] == 0
    assert record["config"]["online_preprocessing"]
    assert record["ranks"]["world_size"] == 2
    # The model of a step has no encoders, and its figure is that of the U-Net alone.
    reference = load_record(tmp_path / "reference" / "record.json")
    for figure in ("num_parameters", "flops_per_image"):
        assert record["workload"][figure] == reference["workload"][figure]
    told = (tmp_path / "online" / "ray_data.txt").read_text()
    assert read_stages(told).keys() == {"DecodeStage", "EncodeStage"}
