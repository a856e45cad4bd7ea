"""train.py for the VAE and for the text encoder, and runs that begin with another's weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import train
from sdbench.cli import main as sdbench
from sdbench.record.store import load_record
from sdbench.state.checkpoint import Checkpoint
from tests.data.datasets import write_folder
from tests.refusals import printed_refusal
from tests.runs import finished_run
from tests.train.written import read_events, read_losses, weights_of

MINI = ("--model_name", "mini", "--use_synth_data", "--engine", "torch", "--batch_size", "4")
MINI += ("--precision", "fp32", "--encoder_dtype", "fp32", "--log_every_batches", "1")
VAE, TEXT = ("--train", "vae"), ("--train_text_encoder",)
LORA = (*TEXT, "--lora_rank", "4")


def run(name: str, num_steps: int, *argv: object, code: int = 0) -> Path:
    """Train in this process, in the working folder, and return the folder of the run."""
    line = [*MINI, "--run_name", name, "--max_duration", f"{num_steps}ba", *map(str, argv)]
    assert train.main(line) == code
    return Path("runs", name)


def weights(folder: Path, part: str) -> dict:
    """The exported weights of a part of a run's model."""
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    assert sdbench(["export", str(folder)]) == 0
    return weights_of(model, part)


@pytest.fixture
def plain(tmp_path) -> Path:
    """A run of one step that trains the U-Net alone."""
    argv = (*MINI, "--run_name", "plain", "--max_duration", "1ba", "--use_ema")
    return finished_run(train.main, *argv, results=tmp_path / "plain")


def is_same(one: dict, other: dict) -> bool:
    assert one.keys() == other.keys()
    return all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize(
    ("part", "engine"),
    [
        (VAE, "torch"),
        pytest.param(TEXT, "composer", marks=pytest.mark.slow),
        pytest.param(LORA, "torch", marks=pytest.mark.slow),
    ],
)
def test_resumed_bit_for_bit(tmp_path, part, engine):
    argv = (*part, "--engine", engine, "--use_ema", "--clip_norm", "1")
    whole = run("whole", 4, *argv)
    run("parts", 2, *argv, "--resume", "auto")
    parts = run("parts", 4, *argv, "--resume", "auto")
    assert read_losses(parts) == read_losses(whole) and len(set(read_losses(whole))) == 4


@pytest.mark.parametrize("part", [VAE, LORA])
def test_the_memory_estimate_is_of_what_is_kept(part):
    folder = run("one", 1, *part, "--use_ema")
    saved = Checkpoint.open(folder / "checkpoints" / "step_00000001").tensors()
    estimate_gib = load_record(folder)["memory_estimate_gib"]
    for name, prefixes in (
        ("trained_weights", ("model.",)),
        ("optimizer_state", ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")),
        ("ema", ("ema.",)),
    ):
        num_bytes = sum(one.nbytes for key, one in saved.items() if key.startswith(prefixes))
        assert estimate_gib[name] * 2**30 == pytest.approx(num_bytes)


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another_and_keeps_them(plain, capsys):
    first = run("vae", 1, *VAE, "--lr", "0.01", "--use_ema")
    trained = weights(first, "vae")
    assert not is_same(trained, weights(plain, "vae"))
    argv = ("--init_from", first, "--resume", "auto", *TEXT)
    capsys.readouterr()
    second = run("second", 1, *argv, "--encoder_dtype", "bf16")
    assert "vae (" in capsys.readouterr().out
    assert is_same(weights(second, "vae"), trained)  # nothing was rounded to bf16
    shutil.rmtree(first)
    second = run("second", 2, *argv)  # the checkpoint has all of it
    assert is_same(weights(second, "vae"), trained)
    third = run("third", 1, "--init_from", second / "checkpoints" / "step_00000002", "--lr", "1e-9")
    assert is_same(weights(third, "text_encoder"), weights(second, "text_encoder"))


def test_the_reconstruction_is_validated(tmp_path):
    write_folder(tmp_path / "held-out")
    look = ("--validate_every_batches", 2, "--validation_remote", tmp_path / "held-out")
    folder = run("vae", 4, *VAE, *look, "--num_validation_images", 5)
    found = read_events(folder, "validation")
    assert [event["num_samples"] for event in found] == [5, 5]
    assert found[0]["loss"] != found[1]["loss"] and all(event["loss"] > 0 for event in found)
    assert sdbench(["watch", str(folder)]) == 0
    assert f"{found[1]['loss']:.4f} at step 4" in (folder / "watch.html").read_text()


def test_a_checkpoint_that_is_not_there_is_refused(capsys):
    run("one", 1, "--init_from", "nowhere", code=2)
    assert printed_refusal(capsys.readouterr().err).flag == "--init_from"


@pytest.mark.parametrize(
    "argv", [("--model_name", "tiny"), ("--train", "vae")], ids=["another size", "another part"]
)
def test_weights_of_another_model_are_refused_before_there_is_a_folder(plain, argv, capsys):
    second = run("second", 1, *argv, "--init_from", plain, code=2)
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == (
        "--init_from",
        str(plain / "checkpoints" / "step_00000001"),
    )
    assert not second.exists()
