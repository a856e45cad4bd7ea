"""A run's log in Weights & Biases, whose client is replaced by a stub."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from PIL import Image

from sdbench.run.trackers import PERIOD_S, WandbLog


@pytest.fixture
def begun(monkeypatch) -> list[SimpleNamespace]:
    """The W&B runs: the settings of each, and what was logged."""
    wandb = pytest.importorskip("wandb")
    runs = []

    def init(**settings):
        run = SimpleNamespace(settings=settings, steps=[], define_metric=lambda *_, **__: None)
        run.log = lambda values, step: run.steps.append((step, values["loss/train/total"]))
        runs.append(run)
        return run

    monkeypatch.setattr(wandb, "init", init)
    return runs


def test_the_parts_of_a_run_have_one_id(tmp_path, begun):
    for folder in (tmp_path / "one", tmp_path / "one", tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        WandbLog(name="run", project=None, rank=0).start(config={}, folder=folder, has_parts=True)
    first, again, other = (run.settings["id"] for run in begun)
    assert first == again != other
    assert {run.settings["resume"] for run in begun} == {"allow"}


def test_figures_and_pictures_of_a_part_have_their_step(tmp_path, begun):
    wandb = pytest.importorskip("wandb")
    log = WandbLog(name="run", project=None, rank=0)
    log.start(config={}, folder=tmp_path, has_parts=True)
    logged = []
    begun[0].log = logged.append
    Image.new("RGB", (8, 8)).save(tmp_path / "grid.png")
    log.log({"loss/train/total": 0.5}, step=3)
    log.log_picture("samples", tmp_path / "grid.png", step=4)
    figures, picture = logged
    assert figures == {"step": 3, "loss/train/total": 0.5}
    assert picture["step"] == 4 and isinstance(picture["samples"], wandb.Image)


def test_losses_are_read_when_that_is_due_and_where_the_phase_changes(tmp_path, begun, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    log = WandbLog(name="run", project=None, rank=0)
    log.start(config={}, folder=tmp_path)
    (run,) = begun
    num_logged = []
    for index in range(6):
        phase = "warmup" if index < 2 else "measured"
        log.step_ends(index=index, phase=phase, loss=lambda: 0.5, num_steps=6)
        num_logged.append(len(run.steps))
        now_s[0] += 0.4 * PERIOD_S
    # The phase changes with the third step, and a period later another line is due.
    assert num_logged == [0, 0, 2, 2, 2, 5]
    log.close()
    assert run.steps == [(index, 0.5) for index in range(6)]
