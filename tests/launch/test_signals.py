"""A stop signal at any moment of a run: exit code 130, a record once there is a run, nothing left.

In the middle of training, under each launcher: tests/launch/test_processes.py. Within a step, on
each engine: tests/engines/test_stop.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

import benchmark
import train
from sdbench.base.shared_memory import find_stale
from sdbench.data.batches.loader import CheckedLoader
from sdbench.measure import watch
from sdbench.record.store import RunFolder
from sdbench.run.outcome import RunRecord
from sdbench.state.writer import CheckpointWriter
from sdbench.training import pretrain
from tests.data import datasets
from tests.forked import codes_of, log_of
from tests.runs import TINY, only_record
from tests.waiting import wait_for

SHORT = ("--no_measure_peak", "--warmup_batches", "1", "--measure_batches", "2")
SAVING = ("--run_name", "saved", "--save_every_batches", "2", "--max_duration", "1000000ba")
END_WITHIN_S = 60


pytestmark = pytest.mark.usefixtures("torch_is_imported_once")


@pytest.mark.parametrize(
    ("module", "number", "name"),
    [
        # The first one that is imported when signals are obeyed, torch half imported, and the last
        # one before there is a run.
        ("sdbench.settings.kinds", signal.SIGTERM, "SIGTERM"),
        ("torch.nn.functional", signal.SIGINT, "Ctrl-C"),
        ("sdbench.ranks.heartbeat", signal.SIGHUP, "SIGHUP"),
    ],
)
def test_a_start_is_stopped_without_a_trace(tmp_path, repository, module, number, name):
    results = ("--results_dir", str(tmp_path))
    ended = signal_at_import(module, number, *results, repository=repository)
    assert ended == (130, [f"stopped by {name}"])
    assert list(tmp_path.iterdir()) == []


def signal_at_import(module, number, *argv, repository):
    """The end of benchmark.py, sent a signal when it has imported a module, and its last errors."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "benchmark.py", *TINY, *argv],
        cwd=repository,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    with process:
        for line in process.stderr:
            if line.rstrip().endswith(f" {module}"):
                process.send_signal(number)
                break
        rest = process.stderr.read().splitlines()
    return process.returncode, [line for line in rest if not line.startswith("import time:")]


@pytest.mark.slow
def test_composer_takes_no_signal_for_itself_while_it_is_imported(tmp_path, repository):
    argv = ("--engine", "composer", "--no_measure_peak", "--results_dir", str(tmp_path))
    exit_code, printed = signal_at_import(
        "composer.core.engine", signal.SIGTERM, *argv, repository=repository
    )
    record = only_record(tmp_path)
    assert (exit_code, record["status"]) == (130, "interrupted")
    assert record["reason"].startswith("rank 0: SIGTERM: ")
    assert not any("Traceback" in line for line in printed)


def signal_before(owner, name, number):
    """Have this process get a signal when it first calls a function, which goes on where it may."""
    function = getattr(owner, name)

    def signalled(*args, **options):
        setattr(owner, name, function)
        os.kill(os.getpid(), number)
        return function(*args, **options)

    setattr(owner, name, signalled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "owner", "name"),
    [
        (benchmark.main, RunFolder, "reserve_space"),
        (benchmark.main, pretrain, "build"),
        (benchmark.main, CheckedLoader, "_begin"),
        (train.main, CheckpointWriter, "write_data"),
    ],
    ids=["folder", "model", "data", "save"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_has_begun_leaves_a_record(tmp_path, main, owner, name, number):
    flags = (*TINY, *(SAVING if main is train.main else SHORT), "--results_dir", str(tmp_path))

    def program():
        signal_before(owner, name, number)
        return main(flags)

    assert codes_of(program, tmp_path, num_ranks=1) == [130]
    printed = log_of(tmp_path, 0).read_text()
    record = only_record(tmp_path)
    assert record["status"] == "interrupted"
    assert f"interrupted: {record['reason']}\nrecord: " in printed
    assert "Traceback" not in printed
    if main is train.main:
        saved = [path.name for path in (tmp_path / "saved" / "checkpoints").iterdir()]
        assert saved and all(re.fullmatch(r"step_\d+", name) for name in saved)  # all of them whole


def test_ranks_that_are_stopped_before_they_watch_each_other_are_not_lost(tmp_path):
    def program():
        signal_before(RunRecord, "__init__", signal.SIGTERM)
        return benchmark.main([*TINY, *SHORT, "--results_dir", str(tmp_path)])

    assert codes_of(program, tmp_path) == [130, 130]
    assert only_record(tmp_path)["status"] == "interrupted"


@pytest.mark.slow
def test_a_signal_costs_nothing_that_has_been_measured(tmp_path):
    def program():
        signal_before(RunRecord, "end_well", signal.SIGTERM)
        return benchmark.main([*TINY, *SHORT, "--results_dir", str(tmp_path)])

    assert codes_of(program, tmp_path, num_ranks=1) == [0]
    assert only_record(tmp_path)["status"] == "ok"


@pytest.mark.slow
def test_a_step_that_outlasts_the_grace_of_the_scheduler_is_broken_off(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "LEAST_PATIENCE_S", 600.0)  # without --stop_grace_s

    def hang(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    monkeypatch.setattr(CheckedLoader, "_begin", hang)
    flags = (*TINY, *SHORT, "--stop_grace_s", "1", "--results_dir", str(tmp_path))
    assert codes_of(lambda: benchmark.main(flags), tmp_path, num_ranks=1) == [130]
    assert only_record(tmp_path)["status"] == "interrupted"


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_shared_memory(tmp_path, repository):
    datasets.WRITERS["mds"](tmp_path / "mds")
    flags = ("--remote", str(tmp_path / "mds"), "--image_size", "32", "--batch_size", "4")
    flags += ("--num_workers", "2", "--num_batches", "100000", "--emulate_step_seconds", "0.1")
    process = subprocess.Popen(
        [sys.executable, "data.py", *flags, "--results_dir", str(tmp_path / "runs")],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        next(line for line in process.stdout if line.startswith("Reading mds"))
        running = psutil.Process(process.pid)
        wait_for(lambda: len(running.children(recursive=True)) >= 2, what="the start of workers")
        started = running.children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the loader's workers, too
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    assert psutil.wait_procs(started, timeout=END_WITHIN_S)[1] == []
    assert find_stale() == []
    assert only_record(tmp_path / "runs")["status"] == "interrupted"
    assert "Traceback" not in rest
