"""train.py through its front door, on the smallest model: stops, faults, evaluations, results."""

from __future__ import annotations

import importlib
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train
from sdbench import data
from sdbench.cli import main as sdbench
from sdbench.engines import load_engine
from sdbench.record.history import read_history
from sdbench.record.store import load_record
from sdbench.state.checkpoint_files import Checkpoint
from sdbench.training.train_job import learning_rate_factor
from tests.data.datasets import make_png, write_folder
from tests.forked import codes_of, exit_codes, forked_ranks, log_of
from tests.refusals import printed_refusal
from tests.score_networks import write_clip, write_fid_network
from tests.train.written import (
    read_events,
    read_losses,
    read_steps,
    read_tensors,
    saved_steps,
    trained,
)
from tests.waiting import wait_for

DATA = ("--model_name", "nano", "--engine", "torch", "--batch_size", "4")
TINY = (*DATA, "--use_synth_data")


def test_killed_then_stopped_then_finished(tmp_path):
    """kill -9, SIGTERM and a good end: every step is trained once and none is missing."""
    folder = tmp_path / "runs" / "long"
    argv = [*TINY, "--run_name", "long", "--resume", "auto", "--log_every_batches", "1"]
    argv += ["--save_every_batches", "2", "--num_workers", "1", "--max_duration", "1000000ba"]

    load_engine("torch")  # here, and not once in each process

    def start_and_signal(number: int, *, num_steps: int) -> int:
        with forked_ranks(lambda: train.main(argv), tmp_path, num_ranks=1) as (process,):
            wait_for(lambda: max(saved_steps(folder), default=0) >= num_steps, what="the save")
            os.killpg(process.pid, number)  # as a scheduler does: the loader's worker, too
            (code,) = exit_codes([process])
            return code

    assert start_and_signal(signal.SIGKILL, num_steps=2) == -signal.SIGKILL
    assert start_and_signal(signal.SIGTERM, num_steps=6) == 130
    assert load_record(folder)["status"] == "interrupted"
    last = max(saved_steps(folder))
    reason = load_record(folder)["reason"]
    assert reason.endswith(f"; step {last} is saved, and the same command goes on from it")
    assert len(read_steps(folder)) == last  # SIGTERM saved the step that it ended behind
    argv[-1] = f"{last + 3}ba"
    assert train.main(argv) == 0
    assert [int(row["step"]) for row in read_steps(folder)] == list(range(1, last + 4))
    first, killed, stopped = read_events(folder, "begin")
    assert first["step"] == 0 and killed["step"] >= 2 and stopped["step"] == last
    # SIGTERM has cost no step; starting again has taken its time.
    assert (stopped["num_lost_steps"], stopped["lost_s"]) == (0, 0)
    assert killed["down_s"] > 0 and stopped["down_s"] > 0
    summary = load_record(folder)["summary"]
    assert (summary["first_step"], summary["num_restarts"]) == (last, 2)
    assert summary["num_lost_steps"] == killed["num_lost_steps"]
    assert summary["lost_s"] == killed["lost_s"]
    assert summary["down_s"] == killed["down_s"] + stopped["down_s"]
    kept_s = sum(4 / float(row["images_per_second"]) for row in read_steps(folder))
    assert summary["total_train_s"] == pytest.approx(kept_s + killed["lost_s"])
    assert sdbench(["report", str(folder)]) == 0
    assert "stood still for" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_samples_that_do_not_fill_a_batch_are_told(tmp_path, capsys):
    write_folder(tmp_path / "data", num_samples=9)
    note = "An epoch is 2 steps of 4: 1 of 9 samples do not fill a batch and are left out of it"
    for duration, is_told in (("1ep", True), ("1ba", False)):
        argv = [*DATA, "--remote", str(tmp_path / "data"), "--max_duration", duration]
        assert train.main([*argv, "--run_name", duration]) == 0
        assert (f"{note}, others in each epoch.\n" in capsys.readouterr().out) == is_told


@pytest.mark.slow
def test_a_full_disk_of_one_rank_stops_all_of_them_behind_one_step(tmp_path):
    load_engine("torch")  # here, and not once in each rank
    importlib.import_module("sdbench.training.evaluations")

    def program() -> int:
        if os.environ["RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        argv = ["--max_duration", "1000ba", "--save_every_batches", "2", "--sharding", "full"]
        return train.main([*TINY, *argv, "--run_name", "full", "--on_failed_save", "stop"])

    assert codes_of(program, tmp_path) == [1, 1]
    reason = load_record(tmp_path / "runs" / "full")["reason"]
    assert "step 2 was not saved (--on_failed_save): rank 1: " in reason
    for rank in range(2):
        assert reason.partition(": ")[2] in log_of(tmp_path, rank).read_text()


@pytest.mark.slow
def test_evaluations_leave_the_training_as_it_was(tmp_path, monkeypatch):
    """Validation, pictures, scores and checkpoints draw no random number of the training.

    The held-out samples are opened once for the four validation losses and once for the scores.
    """
    open_samples, opened = data.open_samples, []
    monkeypatch.setattr(
        data, "open_samples", lambda config: opened.append(config.remote) or open_samples(config)
    )
    write_folder(tmp_path / "held-out")
    evaluations = ("--validate_every_batches", 2, "--validation_remote", tmp_path / "held-out")
    evaluations += ("--num_validation_images", 5, "--sample_every_batches", 3, "--sample_steps", 2)
    evaluations += ("--sample_prompts", "a red circle|a blue square", "--save_every_batches", 2)
    evaluations += ("--score_every_batches", 3, "--num_score_images", 2)
    evaluations += ("--fid_network", write_fid_network(tmp_path / "fid.pt"))
    evaluations += ("--clip_network", write_clip(tmp_path / "clip"))
    recipe = (*TINY, "--use_ema", "--log_every_batches", 1)
    plain = trained("plain", 4, *recipe)
    watched = trained("watched", 4, *recipe, *evaluations)
    assert read_losses(watched) == read_losses(plain)

    validations = read_events(watched, "validation")
    assert [event["step"] for event in validations] == [2, 4]
    assert all(event["num_samples"] == 5 for event in validations)
    assert opened == [str(tmp_path / "held-out")] * 2
    assert all(len(event["by_timestep"]) == 8 for event in validations)
    drawn = [(event["step"], event["num_pictures"]) for event in read_events(watched, "samples")]
    assert drawn == [(3, 2), (4, 2)]
    assert [event["step"] for event in read_events(watched, "save")] == [2, 4]
    scores = read_events(watched, "scores")
    assert [(event["step"], event["num_pictures"]) for event in scores] == [(3, 2), (4, 2)]
    other_s = load_record(watched)["summary"]["other_s"]
    assert {"validation", "samples", "scores", "save"} == set(other_s)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "composer"])
def test_a_run_ends_at_its_target_and_stays_ended(engine, tmp_path, capsys):
    write_folder(tmp_path / "data")
    write_folder(tmp_path / "held-out", num_samples=4)
    look = ("--validate_every_batches", 2, "--validation_remote", tmp_path / "held-out")
    argv = ("--remote", tmp_path / "data", *look, "--engine", engine, "--resume", "auto")
    argv = (*DATA, *argv, "--changed_inputs", "accept", "--target_loss")
    # Without a target the losses of the validations after the steps 2, 4 and 5 are these.
    folder = trained("whole", 5, *argv, 1e-9)
    losses = [event["loss"] for event in read_events(folder, "validation")]
    assert losses == sorted(losses, reverse=True) and len(losses) == 3
    summary = load_record(folder)["summary"]
    assert summary["samples_to_target"] is None
    assert "The validation loss 1e-09 was not reached" in capsys.readouterr().out
    target = (losses[0] + losses[1]) / 2
    folder = trained("short", 5, *argv, target)
    for _ in range(2):  # the second call finds nothing left to train
        record = load_record(folder)
        assert (record["status"], record["summary"]["samples_to_target"]) == ("ok", 16)
        assert record["workload"]["num_steps"] == max(saved_steps(folder)) == 4
        assert len(read_steps(folder)) == 4
        trained("short", 5, *argv, target)
    assert "4 steps and had reached its --target_loss after 16" in capsys.readouterr().out
    assert len(read_steps(trained("short", 5, *argv, losses[2] / 2))) == 5


@pytest.mark.slow
def test_of_many_pictures_64_are_in_the_grid_and_all_in_files():
    num_pictures = 65
    lines = [f"p{number},prompt {number}" for number in range(num_pictures + 1)]
    Path("many.csv").write_text("\n".join(["uid,caption", *lines]))
    look = ("--sample_every_batches", 1, "--sample_steps", 1, "--sample_guidance", 1)
    look += ("--sample_prompts", "many.csv", "--num_sample_images", num_pictures)
    folder = trained("many", 1, *TINY, "--batch_size", 16, *look) / "samples"
    names = {path.name for path in (folder / "step_00000001").iterdir()}
    assert names == {f"p{number}.png" for number in range(num_pictures)}
    grid = Image.open(folder / "step_00000001.png")
    # A margin of 4 around captions 112 px wide and pictures of 64 px with 16 for the caption.
    assert grid.size == (8 * 116 + 4, 8 * 84 + 4)
    last = Image.open(folder / "step_00000001" / "p63.png")
    assert grid.crop((816, 592, 816 + 64, 592 + 64)).tobytes() == last.tobytes()


@pytest.mark.slow
def test_prompts_are_drawn_in_the_shapes_of_their_turn(tmp_path, capsys):
    look = ("--sample_every_batches", 1, "--sample_steps", 1, "--sample_prompts", "a|b|c")
    look = (*TINY, *look, "--sample_shapes")
    assert not trained("bad", 1, *look, "64x64,64x100", code=2).exists()
    error = printed_refusal(capsys.readouterr().err)
    assert error.flag == "--sample_shapes" and "the height of 64x100" in error.what
    folder = trained("shapes", 1, *look, "128x64,64x192")
    seen = np.asarray(Image.open(folder / "samples" / "step_00000001.png"))
    # Cells for 128 x 192 px, of which each picture leaves the rest white.
    assert seen.shape == (2 * 212 + 4, 2 * 132 + 4, 3)
    for left, top, width, height in ((4, 4, 128, 64), (136, 4, 64, 192), (4, 216, 128, 64)):
        cell = seen[top : top + 192, left : left + 128]
        assert cell[:height, :width].mean() < 250
        assert (cell[height + 16 :] == 255).all() and (cell[:height, width:] == 255).all()


@pytest.mark.slow
def test_data_with_other_samples_are_refused_on_resume(tmp_path):
    write_folder(tmp_path / "data")
    argv = (*DATA, "--remote", "data", "--resume", "auto")
    folder = trained("one", 1, *argv)
    notes = load_record(folder)["notes"]
    assert any("--save_every_batches" in note for note in notes)  # it has one checkpoint
    for name in ("000.png", "000.txt"):
        (tmp_path / "data" / name).unlink()
    accept = ("--changed_inputs", "accept")  # or it would end sooner
    trained("one", 2, *argv, *accept, "--save_every_batches", 1, code=2)
    record = load_record(folder)
    assert not any("--save_every_batches" in note for note in record["notes"])
    assert record["status"] == "failed"
    assert "got 48; allowed: the 49 samples" in record["reason"]
    assert len(read_steps(folder)) == 1


@pytest.mark.slow
def test_a_bad_held_out_picture_is_found_before_the_first_step(tmp_path, capfd):
    write_folder(tmp_path / "held-out", num_samples=5)
    (tmp_path / "held-out" / "003.png").write_bytes(make_png(3)[:60])
    argv = (*TINY, "--validate_every_batches", 2, "--validation_remote", tmp_path / "held-out")
    folder = trained("one", 3, *argv, code=1)
    assert f"{tmp_path}/held-out/003.png: the image cannot" in load_record(folder)["reason"]
    assert saved_steps(folder) == []
    assert [event["event"] for event in read_history(folder)] in ([], ["begin"])
    capfd.readouterr()
    folder = trained("other", 3, *argv, "--on_bad_sample", "skip")
    told = f"Left out of evaluations: {tmp_path}/held-out/003.png: the image cannot"
    assert capfd.readouterr().err.count(told) == 1
    assert [event["num_samples"] for event in read_events(folder, "validation")] == [4, 4]


@pytest.mark.slow
def test_held_out_samples_that_are_trained_on_are_told_of(tmp_path, capsys):
    write_folder(tmp_path / "data" / "held-out")
    argv = (*DATA, "--remote", tmp_path / "data", "--validate_every_batches", 1)
    argv += ("--num_validation_images", 1, "--resume", "auto", "--validation_remote")
    folder = trained("one", 1, *argv, tmp_path / "data" / "held-out")
    first = str(tmp_path / "data" / "held-out" / "000.png")
    (note,) = [note for note in load_record(folder)["notes"] if first in note]
    assert "49 files" in note and note in capsys.readouterr().out
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    trained("one", 1, *argv, tmp_path / "linked", code=2)
    assert printed_refusal(capsys.readouterr().err).flag == "--validation_remote"


@pytest.mark.slow
def test_a_decay_of_the_average_is_that_of_a_step():
    interval = 2
    argv = (*TINY, "--save_every_batches", 1, "--lr", 0.01)
    argv += ("--use_ema", "--ema_decay", 0.8, "--ema_interval_batches", interval)
    folder = trained("one", 2, *argv) / "checkpoints"
    first, second = (read_tensors(Checkpoint.open(folder / f"step_{step:08d}")) for step in (1, 2))
    for name in [name for name in second if name.startswith("model.")]:
        expected = 0.8**interval * first[name] + (1 - 0.8**interval) * second[name]
        average = second[name.replace("model.", "ema.", 1)]
        assert torch.allclose(average, expected, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(average, second[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.88284271, 0.6, 0.31715729, 0.2]),
    ],
)
def test_learning_rates(schedule, expected):
    factors = [
        learning_rate_factor(step, schedule=schedule, num_warmup_steps=4, num_steps=9, end=0.2)
        for step in range(9)
    ]
    assert factors == pytest.approx(expected)
