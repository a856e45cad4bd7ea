"""However a run ends between two updates, no step is lost, and it goes on as if it had not."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train
from sdbench.data.batches.batches import SampleBatchReader
from sdbench.engines import load_engine
from sdbench.evaluate import networks
from sdbench.measure import watch
from sdbench.measure.watch import StepWatch
from sdbench.models.diffusion import DiffusionModel
from sdbench.record.store import load_record
from sdbench.training import evaluations
from sdbench.training.train_hooks import TrainHooks
from tests.data.datasets import write_folder
from tests.forked import codes_of, log_of
from tests.marks import quick_and_slow
from tests.score_networks import write_fid_network
from tests.state.states import flip_byte
from tests.train.at_losses import before_each_loss
from tests.train.written import read_events, read_losses, saved_steps

RUN = Path("runs/run")
# In the stored order samples 6 and 7 are the batch of step 4; an evaluation is behind step 3.
NUM_STEPS, LAST, FIRST_SAMPLE = 6, 3, 6
FOREVER_S, AT_ONCE_S = 1000.0, 250.0
LINE = ("--model_name", "nano", "--remote", "data", "--no_shuffle", "--num_workers", 0)
LINE += ("--batch_size", 2, "--use_ema", "--clip_norm", 0.5, "--log_every_batches", 1)
LINE += ("--max_duration", f"{NUM_STEPS}ba", "--resume", "auto", "--changed_inputs", "accept")
VALIDATION = ("--validate_every_batches", LAST, "--validation_remote", "held-out")
VALIDATION += ("--num_validation_images", 4)
SCORES = ("--score_every_batches", LAST, "--num_score_images", 4, "--fid_network", "fid.pt")
SCORES += ("--validation_remote", "held-out", "--sample_steps", 2)
SAMPLES = ("--sample_every_batches", LAST, "--sample_steps", 2, "--sample_prompts", "prompts.txt")

Patch = pytest.MonkeyPatch


def run(engine: str, *argv: object, name: str = "run") -> int:
    return train.main([*map(str, (*LINE, "--engine", engine, "--run_name", name, *argv))])


def write_inputs() -> None:
    for folder in ("data", "held-out"):
        shutil.rmtree(folder, ignore_errors=True)
        write_folder(Path(folder))
    Path("prompts.txt").write_text("a red circle")


@functools.cache
def whole_losses(engine: str) -> list[str]:
    """The losses of a run that was not ended early."""
    assert run(engine, name="whole") == 0
    return read_losses(Path("runs/whole"))


def signal_soon() -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()


def signal_and_sleep(*_: object) -> None:
    signal_soon()
    time.sleep(FOREVER_S)


def do_before(patch: Patch, owner: object, name: str, act: Callable[..., None]) -> None:
    """Have a function do something first."""
    known = getattr(owner, name)

    def act_and_go_on(*args, **options):
        act(*args, **options)
        return known(*args, **options)

    patch.setattr(owner, name, act_and_go_on)


def in_batch_of_step_4(patch: Patch, act: Callable[[], None]) -> None:
    def look(reader, keys):
        if keys[0].index == FIRST_SAMPLE:
            act()

    do_before(patch, SampleBatchReader, "read_good", look)


def signal_in_the_wait_for_step_4(patch: Patch) -> None:
    waits = iter(range(1, NUM_STEPS + 1))

    def look(watch):
        if next(waits) == LAST + 1:
            signal_soon()

    do_before(patch, StepWatch, "data_wait_begins", look)


def in_forward_pass_of_step_4(patch: Patch, act: Callable[[], None]) -> None:
    before_each_loss(patch, lambda number: act() if number == LAST + 1 else None)


def bad_picture(patch: Patch) -> None:
    Path(f"data/{FIRST_SAMPLE:03d}.png").write_bytes(b"no picture")


def bad_held_out_picture(patch: Patch) -> None:
    """Damaged while the model trains: it is sound at the start."""
    damage = Path("held-out/001.png").write_bytes
    do_before(patch, TrainHooks, "begins", lambda *_: damage(b"no picture"))


def silent_loader_at_sigterm(patch: Patch) -> None:
    in_batch_of_step_4(patch, signal_and_sleep)


def silent_worker_at_sigterm(patch: Patch) -> None:
    in_batch_of_step_4(patch, lambda: time.sleep(FOREVER_S))
    signal_in_the_wait_for_step_4(patch)


def silent_loader(patch: Patch) -> None:
    in_batch_of_step_4(patch, lambda: time.sleep(FOREVER_S))


def killed_worker(patch: Patch) -> None:
    in_batch_of_step_4(patch, lambda: os.kill(os.getpid(), signal.SIGKILL))


def sigterm_in_a_long_validation(patch: Patch) -> None:
    """One of 80 s, of which a batch takes 20 s."""
    turns = iter([signal_soon])

    def be_slow(model, *args, **options):
        if not model.training:
            next(turns, lambda: None)()
            time.sleep(2.5)

    do_before(patch, DiffusionModel, "predict", be_slow)


def sigterm_while_a_network_loads(patch: Patch) -> None:
    """Not the first time, when it is only tried out."""
    turns = iter([lambda: None, signal_and_sleep])
    do_before(patch, networks, "open_networks", lambda *_, **__: next(turns)())


def no_memory_in_a_forward_pass(patch: Patch) -> None:
    """After the noise of the step has been drawn."""

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    in_forward_pass_of_step_4(patch, fail)


def step_that_outlasts_the_grace(patch: Patch) -> None:
    in_forward_pass_of_step_4(
        patch, lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(FOREVER_S))
    )


QUICK = ("torch", bad_picture, (), 1)
CASES = [
    QUICK,
    ("composer", bad_held_out_picture, VALIDATION, 1),
    ("ray", silent_loader_at_sigterm, (), 130),
    ("torch", silent_worker_at_sigterm, ("--num_workers", 1), 130),
    ("torch", sigterm_in_a_long_validation, VALIDATION, 130),
    ("torch", sigterm_while_a_network_loads, SCORES, 130),
    ("torch", silent_loader, ("--data_timeout_s", 0.5), 1),
    ("torch", killed_worker, ("--num_workers", 1), 1),
    ("torch", no_memory_in_a_forward_pass, (), 1),
    ("torch", step_that_outlasts_the_grace, ("--stop_grace_s", 0.5), 130),
]


@pytest.mark.parametrize(
    ("engine", "cause", "argv", "code"),
    quick_and_slow(CASES, quick=[QUICK]),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_last_step_is_saved_and_a_resume_is_exact(engine, cause, argv, code):
    write_inputs()
    write_fid_network(Path("fid.pt"))
    expected = whole_losses(engine)
    with pytest.MonkeyPatch.context() as patch:
        # No part of an evaluation, and no wait, is broken off because it takes long.
        patch.setattr(watch, "LEAST_PATIENCE_S", 10 * FOREVER_S)
        cause(patch)
        started_s = time.monotonic()
        assert run(engine, *argv) == code
        assert time.monotonic() - started_s < AT_ONCE_S
    done = read_losses(RUN)
    # A worker takes what it has read ahead with it.
    assert len(done) == LAST or (cause is killed_worker and done)
    assert done == expected[: len(done)]
    assert saved_steps(RUN) == [len(done)]
    reason = load_record(RUN)["reason"]
    assert "; lost:" not in reason
    assert reason.endswith(f"; step {len(done)} is saved, and the same command goes on from it")
    write_inputs()
    assert run(engine, *argv) == 0
    assert read_losses(RUN) == expected


def bad_picture_of_one_rank(patch: Patch) -> None:
    """The second one of step 4."""
    Path(f"data/{FIRST_SAMPLE + 1:03d}.png").write_bytes(b"no picture")


def silent_loader_of_one_rank_at_sigterm(patch: Patch) -> None:
    """Both ranks get the signal, and the other one has its batch."""

    def look(reader, keys):
        if keys[0].index == FIRST_SAMPLE + 1:
            time.sleep(FOREVER_S)

    do_before(patch, SampleBatchReader, "read_good", look)
    signal_in_the_wait_for_step_4(patch)


def error_while_one_rank_writes_pictures(patch: Patch) -> None:
    def fail(*args, **options):
        raise ValueError("no font")

    patch.setattr(evaluations, "make_grid", fail)  # on the first rank


OF_RANKS = [
    ("torch", "full", bad_picture_of_one_rank, (), 1),
    ("torch", "zero1", silent_loader_of_one_rank_at_sigterm, (), 130),
    ("torch", "none", error_while_one_rank_writes_pictures, SAMPLES, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "sharding", "cause", "argv", "code"),
    OF_RANKS,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_two_ranks_save_the_last_step_together(tmp_path, engine, sharding, cause, argv, code):
    load_engine(engine)
    importlib.import_module("sdbench.training.evaluations")
    write_inputs()

    def program() -> int:
        with pytest.MonkeyPatch.context() as patch:
            cause(patch)
            return run(engine, "--sharding", sharding, "--device_train_microbatch_size", 1, *argv)

    codes = codes_of(program, tmp_path, timeout_s=AT_ONCE_S)
    assert codes == [code, code], log_of(tmp_path, 0).read_text()
    assert saved_steps(RUN) == [LAST]
    assert len(read_losses(RUN)) == LAST
    assert "; lost:" not in load_record(RUN)["reason"]


@pytest.mark.slow
def test_a_run_goes_on_behind_damaged_metadata():
    """Which the plan reads before all checksums are checked."""
    write_inputs()
    argv = ("--save_every_batches", 2)
    assert run("torch", *argv) == 0
    whole = read_losses(RUN)
    damaged = RUN / "checkpoints" / f"step_{NUM_STEPS:08d}" / ".metadata"
    flip_byte(damaged)
    assert run("torch", *argv) == 0
    begin = read_events(RUN, "begin")[-1]
    assert begin["step"] == NUM_STEPS - 2 and str(damaged) in begin["passed_over"][0]
    assert read_losses(RUN) == whole and saved_steps(RUN) == [NUM_STEPS - 2, NUM_STEPS]
