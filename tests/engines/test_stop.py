"""A signal within a step: the step is ended, on all ranks, and then the run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from sdbench.base import stop
from sdbench.base.errors import RunError
from sdbench.base.stop import Terminated, stop_signals_raise
from sdbench.engines import ENGINES, load_engine
from tests.engines.linear import (
    BATCH_SIZE,
    MICROBATCH,
    make_config,
    make_parts,
    mean_squared_error,
    train_by_hand,
    watch_with,
)
from tests.forked import NUM_RANKS, run_in_group

NUM_MICROBATCHES = BATCH_SIZE // MICROBATCH
# In the first micro-batch of the third step, and in the one behind it.
FIRST = 2 * NUM_MICROBATCHES + 1
SECOND = FIRST + 1

each_engine = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def terminal_signals():
    """As at a terminal: under nohup SIGHUP would be ignored."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler)


def loss_with(faults):
    """The loss, with a signal or a NaN in the micro-batches of these numbers, from 1."""
    numbers = itertools.count(1)

    def loss(output):
        value, fault = mean_squared_error(output), faults.get(next(numbers))
        if fault == "nan":
            return value * float("nan")
        if fault is not None:
            os.kill(os.getpid(), fault)
        return value

    return loss


def train(engine, signals, *, ends_with) -> tuple[BaseException, torch.Tensor]:
    job, fit = make_parts(loss=loss_with(signals)), load_engine(engine)
    with pytest.raises(ends_with) as caught, stop_signals_raise():
        fit(job, make_config(), watch_with())
    return caught.value, job.model.unet.weight.detach()[0]


@each_engine
@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGTERM, Terminated), (signal.SIGHUP, Terminated), (signal.SIGINT, KeyboardInterrupt)],
)
def test_the_step_is_ended_first(engine, number, error):
    # A launcher passes the signal on, so that it arrives twice.
    ended_by, weights = train(engine, {FIRST: number, SECOND: number}, ends_with=error)
    assert getattr(ended_by, "number", signal.SIGINT) == number
    torch.testing.assert_close(weights, train_by_hand()[1][3])


@each_engine
def test_a_second_signal_ends_the_run_at_once(engine, monkeypatch):
    clock = itertools.count(0, 10)
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    signals = {FIRST: signal.SIGTERM, SECOND: signal.SIGINT}
    _, weights = train(engine, signals, ends_with=KeyboardInterrupt)
    torch.testing.assert_close(weights, train_by_hand()[1][2])


def test_a_loop_that_breaks_after_a_signal_was_stopped():
    # As when the signal has reached the workers of the loader, too.
    with pytest.raises(Terminated) as caught, stop_signals_raise(), stop.stop_signals_ask():
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("a worker exited")
    assert caught.value.number == signal.SIGTERM
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_signal_after_the_loop_does_not_disturb_the_end_that_the_first_one_has_caused():
    with pytest.raises(Terminated) as caught, stop_signals_raise():
        try:
            with stop.stop_signals_ask():
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("comes_before", [False, True])
def test_work_that_may_be_broken_off_is_not_waited_for(comes_before):
    with pytest.raises(Terminated), stop_signals_raise(), stop.stop_signals_ask() as request:
        if comes_before:
            os.kill(os.getpid(), signal.SIGTERM)
        with request.raises_at_once():
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("still here")


def test_a_wait_that_no_signal_interrupts_looks_at_the_request(monkeypatch):
    """As that of a rank of Ray, whose thread is not the main one."""
    monkeypatch.setattr(stop, "LOOK_S", 0.01)
    monkeypatch.setattr(stop, "_asked", None)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        time.sleep(seconds)
        if len(waits) == 2:
            stop.ask_to_stop(signal.SIGTERM)
        return False

    with (
        pytest.raises(Terminated),
        stop.stop_signals_ask() as request,
        request.raises_at_once(),
    ):
        stop.waited(wait, 60.0)
    assert len(waits) == 2
    assert not stop.waited(lambda _: False, 0.02)
    assert stop.waited(lambda _: True, 0.0)


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_step_that_does_not_end_is_broken_off(asks_first, monkeypatch):
    """And outside a loop, where no step is to be ended, the first signal is obeyed."""
    monkeypatch.setattr(stop, "SAME_REQUEST_S", 0.1)
    monkeypatch.setattr(stop, "PATIENCE_S", 0.5)
    loop = stop.stop_signals_ask() if asks_first else contextlib.nullcontext()
    with pytest.raises(Terminated) as caught, stop_signals_raise(), loop:
        os.kill(os.getpid(), signal.SIGTERM)
        if asks_first:
            time.sleep(60)
        raise AssertionError("still here")
    assert caught.value.number == signal.SIGTERM


def test_a_loop_that_ends_in_time_gets_no_reminder(monkeypatch):
    monkeypatch.setattr(stop, "PATIENCE_S", 0.3)
    with pytest.raises(Terminated), stop_signals_raise(), stop.stop_signals_ask():
        os.kill(os.getpid(), signal.SIGTERM)
    signals = []
    monkeypatch.setattr(os, "kill", lambda *signal: signals.append(signal))
    time.sleep(0.6)
    assert signals == []


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_signal_that_python_drops_comes_again(number, error, capsys):
    class Signalled:
        def __del__(self):
            os.kill(os.getpid(), number)  # Python drops what a destructor raises

    with pytest.raises(error), stop_signals_raise():
        Signalled()
        for _ in range(500):
            time.sleep(0.01)
    assert "Exception ignored" not in capsys.readouterr().err


def train_rank(engine, fault, *, rank) -> tuple[str, int]:
    """Train until rank 1 has the fault; the exception's name, and the steps."""
    # Rank 0 reads the loss of the fourth step alone, as a progress line may.
    observer = SimpleNamespace(
        loop_begins=lambda: None, step_ends=lambda index, loss, **_: index == 3 and loss()
    )
    watch = watch_with(*([observer] if rank == 0 else []))
    # Two micro-batches a step: the fault is in the third one.
    loss = loss_with({5: fault} if rank == 1 else {})
    job = make_parts(num_ranks=NUM_RANKS, rank=rank, loss=loss)
    with pytest.raises((RunError, Terminated)) as caught, stop_signals_raise():
        load_engine(engine)(job, make_config(), watch)
    return caught.type.__name__, watch.timer.num_steps


@pytest.fixture(scope="module")
def ends_of_ranks(tmp_path_factory):
    """How each of two ranks ended: a list by rank of "engine fault" to name and steps."""
    folder = tmp_path_factory.mktemp("ranks")

    def run(rank):
        ends = {
            f"{engine} {fault}": train_rank(engine, fault, rank=rank)
            for engine in ENGINES
            for fault in (signal.SIGTERM, "nan")
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(ends))

    run_in_group(run, folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@each_engine
@pytest.mark.parametrize(
    ("fault", "end"), [(signal.SIGTERM, ["Terminated", 3]), ("nan", ["RunError", 4])]
)
def test_ranks_end_together_when_one_has_a_reason_to(engine, fault, end, ends_of_ranks):
    assert [ends[f"{engine} {fault}"] for ends in ends_of_ranks] == [end, end]
