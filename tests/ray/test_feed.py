"""data.py --engine ray: Ray Data feeds trainers that sleep, and the record says how fast."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

import data as script
from sdbench.record.store import load_record
from sdbench.report.feed_table import format_feed
from sdbench.tasks.ray_feed import read_stages
from sdbench.tasks.training import RAY_DATA_NAME
from tests.data import datasets
from tests.refusals import printed_refusal
from tests.schemas import validate

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
TINY = ("--engine", "ray", "--model_name", "tiny", "--image_size", "64")
NUM_STEPS, STEP_S = 20, 0.1


def run(tmp_path: Path, *argv: str, expects: int = 0) -> str:
    """Run data.py, and return what it printed."""
    results = ("--results_dir", str(tmp_path / "runs"))
    command = [sys.executable, str(ROOT / "data.py"), *argv, *results]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == expects, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_two_trainers_are_fed_by_as_many_actors_as_were_asked_for(tmp_path):
    datasets.write_parquet(tmp_path / "pictures")
    output = run(
        tmp_path,
        *(*TINY, "--remote", str(tmp_path / "pictures"), "--batch_size", "4"),
        *("--num_ray_workers", "2", "--num_decoders", "2", "--num_encoders", "1"),
        *("--num_batches", str(NUM_STEPS), "--emulate_step_seconds", str(STEP_S)),
    )
    (path,) = (tmp_path / "runs").glob("*/record.json")
    record = load_record(path)
    validate(record)
    summary, stages = record["summary"], record["summary"]["ray"]
    assert summary["num_images"] == 4 * NUM_STEPS
    assert summary["num_measured_steps"] == NUM_STEPS
    assert (stages["num_trainers"], stages["num_decoders"], stages["num_encoders"]) == (2, 2, 1)
    assert stages["num_failed_blocks"] == 0
    # What is not sleep is waiting.
    assert summary["window_s"] >= NUM_STEPS * STEP_S
    assert summary["images_per_second"] == pytest.approx(4 * NUM_STEPS / summary["window_s"])
    waited = 1 - NUM_STEPS * STEP_S / summary["window_s"]
    assert summary["data_wait_percent"] == pytest.approx(100 * waited, abs=3)
    # Steps of 4 images in a tenth of a second take 40 a second.
    assert stages["target_images_per_second"] == pytest.approx(40)
    for worker in ("decoder", "encoder"):
        rate = stages[f"images_per_second_per_{worker}"]
        assert stages[f"num_{worker}s_for_target"] == math.ceil(40 / rate)
    assert summary["ms_per_image"]["decode"] > 0
    assert read_stages((path.parent / RAY_DATA_NAME).read_text()).keys() == {
        "OrderStage",
        "DecodeStage",
        "EncodeStage",
    }
    assert format_feed(record) in output


def test_a_batch_that_the_trainers_cannot_share_is_refused(tmp_path):
    output = run(
        tmp_path,
        *(*TINY, "--use_synth_data", "--batch_size", "3", "--num_ray_workers", "2"),
        expects=2,
    )
    (line,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert printed_refusal(line).flag == "--batch_size or --num_ray_workers"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (("--num_workers", "2"), "--num_workers or --engine"),
        (("--latents", "precomputed"), "--latents or --engine"),
        (("--model_name", "sd2-base", "--image_size", "100"), "--image_size"),
    ],
)
def test_what_ray_data_does_not_do_is_refused_in_a_rank(argv, flag, capsys, monkeypatch):
    for name in ("RANK", "SDBENCH_RAY_RESTARTS"):
        monkeypatch.setenv(name, "0")
    dtype = ("--encoder_dtype", "fp32")  # or Ray would be asked for its GPUs
    assert script.main([*TINY, "--use_synth_data", *dtype, *argv]) == 2
    assert printed_refusal(capsys.readouterr().err).flag == flag


def test_another_launcher_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert script.main([*TINY, "--use_synth_data"]) == 2
    assert printed_refusal(capsys.readouterr().err).flag == "RANK (in the environment)"


@pytest.mark.parametrize("flag", ["--num_decoders=2", "--num_ray_workers=2", "--model_name=tiny"])
def test_without_ray_its_flags_are_refused(flag, capsys):
    assert script.main(["--use_synth_data", flag]) == 2
    assert printed_refusal(capsys.readouterr().err).value in (2, "tiny")
