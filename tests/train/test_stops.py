"""train.py and SIGTERM: how long it waits for a step, what it leaves, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import train
from sdbench.engines import load_engine
from sdbench.engines.train_state import TrainState
from sdbench.measure import watch
from sdbench.measure.watch import StepWatch
from sdbench.record.history import read_history
from sdbench.record.store import load_record
from sdbench.training.train_hooks import TrainHooks
from tests.data.datasets import write_folder
from tests.forked import codes_of
from tests.score_networks import write_fid_network
from tests.train.at_losses import before_each_loss
from tests.train.written import read_events, read_steps, saved_steps

RUN = Path("runs/run")
LINE = ("--model_name", "nano", "--use_synth_data", "--batch_size", "2", "--run_name", "run")
LINE += ("--resume", "auto", "--max_duration", "9ba")
SAMPLES = ("--sample_every_batches", "3", "--sample_steps", "2", "--sample_prompts", "prompts.txt")
VALIDATION = ("--validate_every_batches", "3", "--validation_remote", "held-out")
SCORES = ("--score_every_batches", "3", "--num_score_images", "4", "--fid_network", "fid.pt")
SCORES += ("--validation_remote", "held-out", "--sample_steps", "2")


def run(*argv):
    return train.main([*LINE, *map(str, argv)])


def be_slow(monkeypatch, *, step_s, signal_in, others_s=0.0):
    """Send SIGTERM at the beginning of a step, and let it take so long."""

    def act(number: int) -> None:
        if number == signal_in:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(step_s if number == signal_in else others_s)

    before_each_loss(monkeypatch, act)


def kept() -> tuple[list[int], list[int]]:
    """The steps with a checkpoint, and those in steps.csv."""
    return saved_steps(RUN), [int(row["step"]) for row in read_steps(RUN)]


@pytest.mark.slow
def test_a_step_that_takes_long_is_waited_for_and_saved(monkeypatch):
    monkeypatch.setattr(watch, "LEAST_PATIENCE_S", 0.0)
    be_slow(monkeypatch, step_s=1.5, signal_in=3, others_s=0.7)
    assert run("--engine", "torch") == 130
    assert kept() == ([3], [1, 2, 3])


@pytest.mark.slow
def test_steps_that_are_lost_with_one_that_is_broken_off_are_told(monkeypatch):
    """In its update, where no state is whole."""
    update_begins = TrainState.update_begins

    def begin_and_hang(state):
        update_begins(state)
        if state.num_steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60.0)

    monkeypatch.setattr(TrainState, "update_begins", begin_and_hang)
    argv = ("--engine", "torch", "--save_every_batches", 2, "--stop_grace_s", 0.5)
    assert run(*argv) == 130
    assert kept() == ([2], [1, 2, 3])
    reason = load_record(RUN)["reason"]
    assert "SIGTERM" in reason and "steps 3 to 3" in reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "evaluation"),
    [
        *(("torch", evaluation) for evaluation in (VALIDATION, SAMPLES, SCORES)),
        ("composer", VALIDATION),
    ],
)
def test_an_evaluation_is_left_at_once_and_the_step_before_it_saved(
    monkeypatch, engine, evaluation
):
    write_folder(Path("held-out"))
    Path("prompts.txt").write_text("a red circle")
    write_fid_network(Path("fid.pt"))
    check_stop, num_checks = StepWatch.check_stop, 0

    def signal_and_check(self):
        nonlocal num_checks
        num_checks += 1
        if num_checks == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        check_stop(self)

    monkeypatch.setattr(StepWatch, "check_stop", signal_and_check)
    argv = ("--engine", engine, "--device_train_microbatch_size", 2, *evaluation)
    assert run(*argv) == 130
    assert num_checks == 2
    assert kept() == ([3], [1, 2, 3])
    assert [event["event"] for event in read_history(RUN)] == ["begin", "save"]


@pytest.mark.slow
def test_a_kill_between_two_log_lines_loses_no_row_of_a_saved_step(tmp_path, monkeypatch):
    """And what it has lost is counted, though no row told of it."""
    load_engine("torch")
    argv = ("--engine", "torch", "--save_every_batches", 4, "--log_every_batches", 10)

    def program():
        step_ended = TrainHooks.step_ended

        def die(hooks, state):
            step_ended(hooks, state)
            if state.num_steps == 7:
                hooks.checkpoints.finish()
                os.kill(os.getpid(), signal.SIGKILL)

        TrainHooks.step_ended = die
        return run(*argv)

    assert codes_of(program, tmp_path, num_ranks=1) == [-signal.SIGKILL]
    assert kept() == ([4], [1, 2, 3, 4])
    assert run(*argv) == 0
    assert kept()[1] == list(range(1, 10))
    assert [event["num_lost_steps"] for event in read_events(RUN, "begin")] == [0, 3]
    assert load_record(RUN)["summary"]["num_lost_steps"] == 3


@pytest.mark.slow
def test_a_run_that_failed_before_its_first_step_may_begin_anew_under_its_name(capsys):
    write_folder(Path("data"))
    picture = Path("data/000.png")
    content = picture.read_bytes()
    picture.write_bytes(b"no picture")
    line = ("--model_name", "nano", "--engine", "torch", "--remote", "data", "--no_shuffle")
    line += ("--batch_size", "2", "--run_name", "run", "--max_duration", "1ba")
    assert train.main([*line]) == 1
    picture.write_bytes(content)
    capsys.readouterr()
    assert train.main([*line]) == 0
    assert f"{RUN} has a run that took no step: it begins anew." in capsys.readouterr().out
    assert load_record(RUN)["summary"]["num_restarts"] == 0
    assert train.main([*line]) == 2  # now it has a step
