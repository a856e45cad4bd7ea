"""Checkpoints of one rank: saved in the background, found, loaded and removed."""

from __future__ import annotations

import copy
import os
import shutil
import threading
import types

import pytest
import torch

from sdbench.base.errors import RunError
from tests.refusals import refused
from tests.state.states import holds, make_checkpoints, make_state, names, save

BIG = 2**24  # values, 64 MiB: still being written when the next statement is reached
FACTS = {"images": 2048, "loss": 0.1, "settings": {"lr": 1e-4, "model": "nano"}, "ids": [3, None]}


def set_room(monkeypatch, has_room):
    """Let the host's memory have room for copies, or none."""
    free = types.SimpleNamespace(available=2**40 if has_room else 0)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)


@pytest.mark.parametrize("has_room", [False, True])
def test_what_is_loaded_is_what_was_saved(tmp_path, has_room, monkeypatch):
    set_room(monkeypatch, has_room)
    checkpoints = make_checkpoints(tmp_path)
    assert checkpoints.newest() is None
    save(checkpoints, 10)
    facts = copy.deepcopy(FACTS)
    checkpoints.begin_save(20, make_state(20), facts)
    facts["ids"].append(4)  # they may change at once
    checkpoints.finish()
    newest = make_checkpoints(tmp_path).newest()
    assert (newest.step, newest.facts) == (20, FACTS)
    assert holds(newest, 20)
    for name, tensor in newest.tensors().items():
        expected = make_state()[name]
        assert (tensor.size(), tensor.dtype) == (expected.size(), expected.dtype)
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 4, 5))
    newest.load_into({"weights.conv": parameter})
    assert torch.equal(parameter, make_state(20)["weights.conv"])
    assert names(tmp_path) == ["step_00000010", "step_00000020"]


@pytest.mark.parametrize("has_room", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_may_change_once_they_are_read(tmp_path, device, has_room, monkeypatch):
    set_room(monkeypatch, has_room)
    checkpoints = make_checkpoints(tmp_path)
    weights = torch.full((BIG,), 1.0, device=device)
    random_state = torch.full((16,), 1.0)
    state = {"weights": weights, "random_state": random_state}
    checkpoints.begin_save(1, state, {})
    random_state.fill_(2.0)  # small: it may change at once
    checkpoints.wait_until_read()
    weights.fill_(2.0)
    checkpoints.finish()
    assert [report.is_copied for report in checkpoints.poll()] == [has_room]
    checkpoints.newest().load_into(state)
    assert (weights.min(), weights.max(), random_state.max()) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("has_room", [False, True])
def test_training_goes_on_while_the_disk_is_slow(tmp_path, has_room, monkeypatch):
    set_room(monkeypatch, has_room)
    checkpoints, is_written, fsync = make_checkpoints(tmp_path), threading.Event(), os.fsync

    def wait_and_fsync(descriptor):
        assert is_written.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wait_and_fsync)
    checkpoints.begin_save(10, make_state(10), {})
    checkpoints.wait_until_read()
    assert checkpoints.poll() == []
    assert checkpoints.newest() is None
    is_written.set()
    checkpoints.finish()
    assert checkpoints.newest().step == 10


def test_each_save_is_reported_once(tmp_path):
    checkpoints = make_checkpoints(tmp_path)
    state = {"weights": torch.zeros(BIG)}
    checkpoints.begin_save(1, state, {})
    checkpoints.begin_save(2, state, {})  # waits for the first one
    checkpoints.finish()
    reports = checkpoints.poll()
    assert [(report.step, report.error) for report in reports] == [(1, None), (2, None)]
    for report in reports:
        assert report.num_bytes == 4 * BIG
        assert 0 < report.stall_s <= report.duration_s + 0.1
    assert checkpoints.poll() == []
    checkpoints.finish()  # nothing is under way


@pytest.mark.parametrize(
    ("keep", "keep_every", "kept"),
    [(1, None, [60]), (2, None, [50, 60]), (2, 20, [20, 40, 50, 60]), (9, None, range(10, 70, 10))],
)
def test_the_newest_stay_and_those_of_every_so_many_steps(tmp_path, keep, keep_every, kept):
    checkpoints = make_checkpoints(tmp_path, keep=keep, keep_every=keep_every)
    for step in range(10, 70, 10):
        save(checkpoints, step)
    assert names(tmp_path) == [f"step_{step:08d}" for step in kept]


def test_a_step_that_is_reached_again_is_saved_again(tmp_path):
    checkpoints = make_checkpoints(tmp_path, keep=1)
    save(checkpoints, 10)
    save(checkpoints, 20)
    save(checkpoints, 20, value=99)
    assert names(tmp_path) == ["step_00000020"]
    assert holds(checkpoints.newest(), 99)


@pytest.mark.parametrize(
    ("other", "value"),
    [
        ({"weights.tail": torch.zeros(7)}, "weights.tail: not saved"),
        ({"weights.head": torch.zeros(8).bfloat16()}, "weights.head: bfloat16 [7]"),
        ({"weights.head": torch.zeros(7)}, "weights.head: bfloat16 [7]"),
    ],
)
def test_the_checkpoint_of_another_job_is_refused(tmp_path, other, value):
    save(make_checkpoints(tmp_path), 10)
    with refused("--resume", value=value):
        make_checkpoints(tmp_path).newest().load_into({**make_state(), **other})


def test_what_the_disk_cannot_take_is_not_begun(tmp_path):
    checkpoints = make_checkpoints(tmp_path)
    save(checkpoints, 10)
    huge = torch.zeros(1).expand(2**50)  # which takes no memory
    checkpoints.begin_save(20, {"weights": huge}, {})
    with pytest.raises(RunError, match="step 20 was not saved: no space left"):
        checkpoints.finish()
    assert [report.step for report in checkpoints.poll() if report.error] == [20]
    assert names(tmp_path) == ["step_00000010"]
    save(checkpoints, 30)
    assert checkpoints.newest().step == 30


@pytest.mark.parametrize(("keep", "kept"), [(1, [10]), (2, [30, 40]), (3, [30, 40])])
def test_the_oldest_goes_first_where_the_disk_has_room_for_two(tmp_path, keep, kept, monkeypatch):
    """As long as another one stays that was found whole."""
    usage = shutil.disk_usage
    checkpoints = make_checkpoints(tmp_path, keep=keep)
    state = {"weights": torch.zeros(2**20)}

    def with_little_room(path):
        taken = sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file())
        room = 5 * 2**21 if keep > 1 else 6 * 2**20  # of checkpoints of 4 MiB: two, or one
        return usage(path)._replace(free=max(0, room - taken))

    monkeypatch.setattr(shutil, "disk_usage", with_little_room)
    for step in (10, 20, 30, 40):
        checkpoints.begin_save(step, state, {})
        if step > 10 and keep == 1:
            with pytest.raises(RunError, match="no space left"):
                checkpoints.finish()
        checkpoints.finish()
    assert names(tmp_path) == [f"step_{step:08d}" for step in kept]
    if keep == 1:  # nor does one go that this process has not found whole
        anew = make_checkpoints(tmp_path, keep=keep)
        anew.begin_save(20, state, {})
        with pytest.raises(RunError, match="no space left"):
            anew.finish()
    assert checkpoints.newest().step == kept[-1]
