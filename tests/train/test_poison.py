"""A loss, a gradient, a weight or an average of a training run becomes NaN, once.

Whatever the run does then, it keeps a checkpoint with finite values, and a resume goes on from it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import train
from sdbench.record.store import load_record
from sdbench.state.checkpoint import Checkpoint
from sdbench.tasks.train import job as train_job
from sdbench.tasks.train.hooks import TrainHooks
from tests.data.datasets import write_folder
from tests.state.states import make_checkpoints, make_state, names, save
from tests.train.in_turn import train_in_turn
from tests.train.written import read_events, read_steps, read_tensors

pytestmark = pytest.mark.usefixtures("launched")

NUM_STEPS, SAVE_EVERY = 8, 2
RUN = Path("runs/run")
LINE = f"""--remote data --model_name tiny --batch_size 4 --device_train_microbatch_size 2 --use_ema
    --save_every_batches {SAVE_EVERY} --log_every_batches 1 --run_name run --resume auto
    --max_duration {NUM_STEPS}ba"""
WHERE = {"at a save step": 4, "between": 3, "at the last step": NUM_STEPS}


class Poison:
    """Makes one number of a run NaN in a step, as a fault of the machine may."""

    def __init__(self, monkeypatch, what, step):
        self.what = what
        self.steps_left = step
        build, step_ended = train_job.build, TrainHooks.step_ended

        def build_poisoned(*args, **options):
            job = build(*args, **options)
            weight = next(iter(job.trained_weights().values()))
            weight.register_hook(self.of_gradient)
            return dataclasses.replace(job, loss=lambda output: self.of_loss(job.loss(output)))

        def end_poisoned(hooks, state):
            self.steps_left -= 1
            if self.steps_left == 0 and what in ("weight", "average"):
                of_state = {"weight": hooks._job.trained_weights, "average": lambda: state.averages}
                poison(next(iter(of_state[what]().values())))
            step_ended(hooks, state)

        monkeypatch.setattr(train_job, "build", build_poisoned)
        monkeypatch.setattr(TrainHooks, "step_ended", end_poisoned)

    def of_loss(self, loss):
        is_bad = self.steps_left == 1 and self.what == "loss"
        return loss * math.nan if is_bad else loss

    def of_gradient(self, gradient):
        is_bad = self.steps_left == 1 and self.what == "gradient"
        return poison(gradient.clone()) if is_bad else gradient


def poison(tensor):
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        tensor[(0,) * tensor.dim()] = math.nan
    return tensor


def run(action, *argv):
    if not Path("data").exists():
        write_folder(Path("data"))
    line = [*LINE.split(), "--on_bad_loss", action, *map(str, argv)]
    return train.main(line)


def saved():
    """Whether each checkpoint of the run is finite, by its step."""
    found = {}
    for folder in sorted(Path("runs/run/checkpoints").glob("step_*")):
        checkpoint = Checkpoint.open(folder)
        tensors = read_tensors(checkpoint).values()
        found[checkpoint.step] = all(bool(one.isfinite().all()) for one in tensors)
    return found


def losses(name="run"):
    return {int(row["step"]): float(row["loss"]) for row in read_steps(Path("runs", name))}


QUICK = [
    ("gradient", "at a save step", "back", 1),
    ("average", "at the last step", "stop", 1),
]
# Each fault with each place and each action.
CASES = [
    ("loss", "at a save step", "stop", 2),
    ("loss", "between", "skip", 1),
    ("loss", "at the last step", "back", 2),
    ("gradient", "between", "stop", 2),
    ("gradient", "at the last step", "skip", 1),
    ("weight", "at a save step", "skip", 2),
    ("weight", "between", "back", 1),
    ("weight", "at the last step", "stop", 2),
    ("average", "at a save step", "back", 1),
    ("average", "between", "skip", 2),
]


@pytest.mark.parametrize(
    ("engine", "case"),
    [
        *(("torch", case) for case in QUICK),
        *(pytest.param("torch", case, marks=pytest.mark.slow) for case in CASES),
        *(
            pytest.param(engine, case, marks=pytest.mark.slow)
            for engine in ("composer", "ray")
            for case in QUICK
        ),
    ],
)
def test_what_is_not_finite_costs_no_good_checkpoint(monkeypatch, engine, case):
    """Poison a run, and go on with it when the fault is gone."""
    what, where, action, keep = case
    step, argv = WHERE[where], ("--keep", keep, "--engine", engine)
    with monkeypatch.context() as patch:
        Poison(patch, what, step)
        exit_code = run(action, *argv)
    can_skip = action == "skip" and what in ("loss", "gradient")
    can_go_back = action == "back" and where != "at the last step"
    assert exit_code == (0 if can_skip or can_go_back else 1)
    assert load_record(RUN)["status"] == ("invalid" if exit_code else "ok")
    steps = saved()
    assert steps and all(steps.values())
    if exit_code:
        # The newest one is the last before the fault.
        assert max(steps) == (step - 1) // SAVE_EVERY * SAVE_EVERY
        assert run(action, *argv) == 0
        assert load_record(RUN)["status"] == "ok"
        assert all(map(math.isfinite, losses().values()))
    assert max(saved()) == NUM_STEPS and all(saved().values())
    assert list(losses()) == list(range(1, NUM_STEPS + 1))


@pytest.mark.slow
def test_two_ranks_go_back_together(monkeypatch, tmp_path):
    """Each rank saves a part: the value that is not finite is in the part of one."""
    write_folder(Path("data"))
    Poison(monkeypatch, "average", 4)
    argv = ("--engine", "torch", "--sharding", "zero1", "--device_train_microbatch_size", 1)
    train_in_turn("torch", tmp_path, functools.partial(run, "back", *argv))
    (event,) = read_events(RUN, "bad_loss")
    assert (event["step"], event["action"]) == (4, "back") and event["tensor"]
    assert load_record(RUN)["status"] == "ok"
    assert saved()[NUM_STEPS] and all(saved().values())


def test_gradients_that_are_clipped_are_judged_in_their_step(monkeypatch):
    """Whose samples are named then, and not those of the next step."""
    with monkeypatch.context() as patch:
        Poison(patch, "gradient", 3)
        assert run("skip", "--clip_norm", 1.0, "--no_shuffle", "--engine", "torch") == 0
    (event,) = read_events(RUN, "bad_loss")
    assert (event["step"], event["gradient_norm"], event["action"]) == (3, "nan", "skip")
    assert math.isfinite(float(event["loss"]))
    (line,) = map(json.loads, Path("runs/run/bad_batches.jsonl").read_text().splitlines())
    assert line["samples_of_ranks"] == [[f"data/{index:03d}.png" for index in (8, 9, 10, 11)]]
    assert all(saved().values())


def test_a_state_that_is_not_finite_is_told_from_the_loss_that_it_leads_to(monkeypatch):
    """No sample is blamed for it."""
    with monkeypatch.context() as patch:
        Poison(patch, "gradient", 4)
        assert run("stop", "--engine", "torch") == 1
    (event,) = read_events(RUN, "bad_loss")
    assert event["step"] == 4 and event["tensor"]
    assert not Path("runs/run/bad_batches.jsonl").exists()
    assert "step 4" in load_record(RUN)["reason"]


def test_a_run_that_comes_back_to_the_same_checkpoint_gives_up(monkeypatch):
    with monkeypatch.context() as patch:
        poisoned = Poison(patch, "loss", 1)
        poisoned.of_loss = lambda loss: loss * math.nan if poisoned.steps_left < -1 else loss
        assert run("back", "--engine", "torch", "--max_duration", "20ba") == 1
    assert [event["action"] for event in read_events(RUN, "bad_loss")] == ["back", "stop"]
    assert saved() == {2: True}


@pytest.mark.parametrize("has_room", [False, True])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, has_room, monkeypatch):
    if not has_room:  # for a copy: the tensors are written where they are
        monkeypatch.setattr("sdbench.state.writer.MAX_SHARE_OF_COPIES", 0.0)
    checkpoints = make_checkpoints(tmp_path, keep=1)
    save(checkpoints, 10)
    for bad in (math.nan, math.inf, -math.inf):
        for name in ("weights.conv", "weights.head", "optimizer.step"):
            state = make_state(20)
            state[name][(0,) * state[name].dim()] = bad
            checkpoints.begin_save(20, state, {})
            with pytest.raises(Exception, match=name) as caught:
                checkpoints.finish()
            assert caught.value.status == "invalid"
    assert all(report.not_finite for report in checkpoints.poll()[1:])
    assert names(tmp_path) == ["step_00000010"]
