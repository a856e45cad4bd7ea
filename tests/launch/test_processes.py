"""Real launchers, real signals: how a run starts on several ranks, and how it ends.

What the ranks do between them: tests/test_two_ranks.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import benchmark
from sdbench.measure.timer import StepTimer
from sdbench.run import runner
from tests.forked import exit_codes, forked_ranks, log_of, wait_for_step
from tests.ports import free_port
from tests.runs import only_record

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TINY = ("--model_name", "tiny", "--use_synth_data", "--num_workers", "0", "--no_measure_peak")
# The engine that is ready in a third of the time: Composer is not what is tested.
LEAN = ("--engine", "torch")
# A run of many minutes, to be stopped in the middle.
LONG = ("--warmup_batches", "1", "--measure_batches", "100000")
# "Within a minute" is the promise for a rank that dies.
END_WITHIN_S = 60

COMPOSER_2 = (str(BIN / "composer"), "-n", "2")
TORCHRUN_2 = (str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port()))


pytestmark = pytest.mark.usefixtures("torch_is_imported_once")


def test_an_uneven_global_batch_is_the_same_error_on_every_rank(tmp_path):
    flags = (*LEAN, *TINY, "--batch_size", "7", "--results_dir", str(tmp_path / "runs"))
    with forked_ranks(lambda: benchmark.main(flags), tmp_path) as ranks:
        assert exit_codes(ranks) == [2, 2]
    told = [log_of(tmp_path, rank).read_text() for rank in range(2)]
    assert [text.count("does not divide over 2 ranks: got 7") for text in told] == [1, 0]
    assert not list(tmp_path.glob("runs/*/record.json"))


def test_a_bad_picture_is_the_last_thing_that_all_ranks_print(tmp_path, picture_folder):
    (picture_folder / "1.png").write_bytes(b"no picture")
    flags = (*LEAN, *TINY, "--no_use_synth_data", "--remote", str(picture_folder), "--no_shuffle")
    flags += ("--batch_size", "2", "--num_threads", "1", "--results_dir", str(tmp_path / "runs"))
    with forked_ranks(lambda: benchmark.main(flags), tmp_path) as ranks:
        assert exit_codes(ranks) == [1, 1]
    record = only_record(tmp_path / "runs")
    reason = record["reason"]
    assert reason.startswith(f"rank 1: {picture_folder}/1.png: ")
    for rank in range(2):
        *_, told, last = log_of(tmp_path, rank).read_text().splitlines()
        assert told == f"failed: {reason}"
        assert last == f"record: {tmp_path / 'runs' / record['run_id']}"


@contextlib.contextmanager
def forked_long_run(results):
    """A run without a launcher that is some steps into training."""
    flags = (*LEAN, *TINY, *LONG, "--num_threads", "1", "--results_dir", str(results))
    with forked_ranks(lambda: benchmark.main(flags), results, num_ranks=1) as (process,):
        wait_for_step(log_of(results, 0))
        yield process


def test_a_lone_process_that_is_killed_leaves_a_record_that_says_so(tmp_path):
    with forked_long_run(tmp_path) as process:
        process.kill()
        process.join(END_WITHIN_S)
    record = only_record(tmp_path)
    assert record["status"] == "failed"
    assert "killed before it could say why" in record["reason"]


def test_a_device_that_no_longer_answers_does_not_keep_a_run_that_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PARTIAL_WITHIN_S", 1.0)
    monkeypatch.setattr(StepTimer, "steps", lambda timer: time.sleep(600))
    with forked_long_run(tmp_path) as process:
        process.terminate()
        process.join(END_WITHIN_S)
        assert process.exitcode == 130
    assert only_record(tmp_path)["reason"].startswith("rank 0: SIGTERM")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ema", ["--use_ema", "--no_use_ema"])
@pytest.mark.parametrize("microbatch", ["2", "8"])
@pytest.mark.parametrize("preset", ["seed", "fast"])
def test_the_memory_estimate_of_the_full_model_is_near_its_peak(tmp_path, preset, microbatch, ema):
    if (preset, microbatch, ema) == ("seed", "8", "--use_ema"):
        pytest.skip("24 GiB must refuse this one")
    argv = ("--use_synth_data", "--preset", preset, "--device_train_microbatch_size", microbatch)
    argv += (ema, "--warmup_batches", "1", "--measure_batches", "1", "--results_dir", str(tmp_path))
    # In a process of its own, whose peak is not that of the run before.
    subprocess.run([sys.executable, "benchmark.py", *argv], cwd=ROOT, check=True, timeout=800)
    record = only_record(tmp_path)
    estimate_gib = record["memory_estimate_gib"]["total_gib"]
    assert record["summary"]["peak_memory_gib"] == pytest.approx(estimate_gib, rel=0.15)


# `kill` reaches the launcher alone. torchrun turns every bad end into 1.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "send", "number", "exit_code", "reason"),
    [
        (COMPOSER_2, os.killpg, signal.SIGINT, 130, ": Ctrl-C"),
        (COMPOSER_2, os.kill, signal.SIGTERM, 130, "SIGTERM: "),
        (TORCHRUN_2, os.killpg, signal.SIGINT, 1, ": Ctrl-C"),
        # The ranks hear of each other by torchrun: they cannot tell that its end was meant.
        (TORCHRUN_2, os.kill, signal.SIGKILL, -9, "torchrun, which runs"),
    ],
    ids=["composer-ctrl-c", "composer-kill", "torchrun-ctrl-c", "torchrun-kill-9"],
)
def test_a_launcher_that_is_stopped_leaves_a_record_and_no_rank(
    tmp_path, launcher, send, number, exit_code, reason
):
    log = tmp_path / "log.txt"
    process = subprocess.Popen(
        [*launcher, "benchmark.py", *LEAN, *TINY, *LONG, "--results_dir", str(tmp_path)],
        cwd=ROOT,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    wait_for_step(log)
    started = psutil.Process(process.pid).children(recursive=True)
    send(process.pid, number)
    assert process.wait(timeout=END_WITHIN_S) == exit_code
    assert psutil.wait_procs(started, timeout=END_WITHIN_S)[1] == []
    record = only_record(tmp_path)
    assert record["status"] == ("failed" if number == signal.SIGKILL else "interrupted")
    assert reason in record["reason"]
