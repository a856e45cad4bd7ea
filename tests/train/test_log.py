"""What a training run writes as it goes: on a full disk, and of numbers that JSON does not have."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

import train
from sdbench.base.files import GrowingFile
from sdbench.cli import main as sdbench
from sdbench.engines import load_engine
from sdbench.record.history import read_history
from sdbench.record.store import load_record
from sdbench.training.log import TrainLog
from tests.data.datasets import write_folder
from tests.forked import codes_of, log_of
from tests.train.written import read_events, read_steps, trained

RUN = Path("runs/run")
TINY = ("--model_name", "nano", "--engine", "torch", "--use_synth_data", "--batch_size", "2")
TINY += ("--run_name", RUN.name, "--log_every_batches", "1")


def limit_files(num_bytes: int) -> None:
    """Let no file of this process grow beyond this, as a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def test_lines_that_a_full_disk_refuses_are_written_when_it_has_room(tmp_path, capsys):
    path = tmp_path / "lines"
    file, lost = GrowingFile(path), GrowingFile(path)
    file.append("first\n")
    limit_files(len("first\nse"))  # a write is cut off, the next is refused
    try:
        file.append("second\n")
        file.append("third\n")
        assert path.read_text() == "first\n"
        assert capsys.readouterr().err.count("warning") == 1
        lost.append("a\nb\n")
        capsys.readouterr()
        lost.close()
        assert capsys.readouterr().err == f"warning: 2 lines of {path} are lost\n"
    finally:
        limit_files(resource.RLIM_INFINITY)
    file.append("fourth\n")
    file.close()
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_run_goes_on_while_the_disk_is_full(tmp_path, monkeypatch):
    """From its first checkpoint until it has noted that another one could not be saved."""
    load_engine("torch")
    add_event = TrainLog.add_event

    def fill_and_empty(self, event, **facts):
        add_event(self, event, **facts)
        if event == "save" and facts["error"] is not None:
            limit_files(resource.RLIM_INFINITY)
        elif event == "save" and facts["step"] == 3:
            limit_files((RUN / "steps.csv").stat().st_size + 10)

    monkeypatch.setattr(TrainLog, "add_event", fill_and_empty)
    # A save is noted by the one after the next at the latest, which may fail as well.
    argv = [*TINY, "--max_duration", "15ba", "--save_every_batches", "3", "--keep", "9"]
    codes = codes_of(lambda: train.main(argv), tmp_path, num_ranks=1)
    assert codes == [0], log_of(tmp_path, 0).read_text()
    assert [row["step"] for row in read_steps(RUN)] == [str(n) for n in range(1, 16)]
    errors = {event["step"]: event["error"] for event in read_events(RUN, "save")}
    assert errors.keys() == {3, 6, 9, 12, 15}
    assert errors[3] is errors[15] is None
    assert any(error is not None for error in errors.values())
    assert read_history(RUN)[-1]["event"] == "end"


def test_a_last_checkpoint_that_cannot_be_written_fails_the_run_and_is_noted(tmp_path):
    load_engine("torch")

    def program() -> int:
        limit_files(2**20)
        return train.main([*TINY, "--max_duration", "1ba"])

    assert codes_of(program, tmp_path, num_ranks=1) == [1], log_of(tmp_path, 0).read_text()
    (save,) = read_events(RUN, "save")
    assert save["error"] is not None and save["error"] in load_record(RUN)["reason"]


@pytest.mark.slow
def test_a_validation_loss_that_is_not_finite_ends_nothing(tmp_path, capsys):
    """The first update makes the weights so large that every prediction overflows."""
    write_folder(tmp_path / "held-out")
    look = ("--validate_every_batches", 1, "--validation_remote", "held-out")
    trained("run", 1, *TINY, *look, "--num_validation_images", 2, "--use_ema", "--lr", 1e30)
    assert "warning: numbers of the event validation at step 1" in capsys.readouterr().err
    (validation,) = read_events(RUN, "validation")
    assert validation["loss"] is validation["ema_loss"] is None
    assert validation["by_timestep"] == [None] * 8
    assert validation["num_samples"] == 2
    assert [path.name for path in (RUN / "checkpoints").iterdir()] == ["step_00000001"]
    assert sdbench(["report", str(RUN)]) == 0
    assert "not finite at step 1" in (RUN / "report.html").read_text()


@pytest.mark.slow
def test_a_run_goes_on_behind_damaged_last_lines():
    trained("run", 1, *TINY, "--resume", "auto")
    for name in ("history.jsonl", "steps.csv"):
        with (RUN / name).open("ab") as file:
            file.write(b"17\n" + b"[" * 100_000 + b'\n\xff\xfe\x00\n{"event": "sa')
    trained("run", 2, *TINY, "--resume", "auto")
    assert [row["step"] for row in read_steps(RUN)] == ["1", "2"]
    kinds = [event["event"] for event in read_history(RUN)]
    assert kinds == ["begin", "save", "end"] * 2


def test_what_a_kill_has_cost_is_known(tmp_path):
    def age() -> None:
        hour_ago_s = time.time() - 3600
        for name in ("steps.csv", "history.jsonl"):
            os.utime(tmp_path / name, (hour_ago_s, hour_ago_s))

    def begin(num_steps: int) -> dict:
        log = TrainLog(tmp_path)
        log.begin(num_steps=num_steps, images_per_step=2, passed_over=(), validated_by="")
        log.add_steps([(num_steps + n, 0.5, 0.001, 4.0, 0.1) for n in (1, 2)])
        log.mark_step(num_steps + 2)
        log.close()
        return read_events(tmp_path, "begin")[-1]

    first = begin(0)
    assert (first["step"], first["num_lost_steps"], first["down_s"]) == (0, 0, 0.0)
    with (tmp_path / "steps.csv").open("a") as file:  # as a process leaves it that was killed
        file.write("3,0.4,0.001,4.0,0.1\n4,0.3")
    age()
    # Two steps of two images at four images/s are lost.
    second = begin(1)
    assert (second["step"], second["num_lost_steps"], second["lost_s"]) == (1, 2, 1.0)
    assert 3600 < second["down_s"] < 3660
    log = TrainLog(tmp_path)
    log.add_event("end", step=3)
    log.close()
    # Going on behind the planned end costs nothing, however much later.
    age()
    assert begin(3)["down_s"] == 0.0
    totals = TrainLog(tmp_path).totals(images_per_step=2)
    assert (totals["num_restarts"], totals["num_lost_steps"], totals["lost_s"]) == (2, 2, 1.0)
    assert totals["down_s"] == second["down_s"]
    assert totals["total_train_s"] == pytest.approx(5 * 0.5 + 1.0)
