"""Real launchers, real signals: how a run starts on several ranks, and how soon and why it ends.

Two processes pass for two nodes. Across real networks: tests/launch/test_namespaces.py; under a
scheduler: tests/launch/test_slurm.py. What the ranks do meanwhile: tests/test_two_ranks.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import benchmark
from sdbench.measure.timer import StepTimer
from sdbench.measure.watch import StepWatch
from sdbench.record.store import RunFolder
from sdbench.run import runner
from tests.forked import codes_of, exit_codes, forked_ranks, log_of, wait_for_step
from tests.ports import free_port
from tests.runs import TINY, only_record

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# A run of many minutes, to be stopped in the middle.
LONG = ("--no_measure_peak", "--warmup_batches", "1", "--measure_batches", "100000")
# "Within a minute" is the promise for a rank that dies.
END_WITHIN_S = 60
START_WITHIN_S = 120
DIST_TIMEOUT_S = 8
# The time-out, and what the others need to notice and to write.
NOTICED_WITHIN_S = DIST_TIMEOUT_S + 25

COMPOSER_2 = (str(BIN / "composer"), "-n", "2")
TORCHRUN_2 = (str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port()))


pytestmark = pytest.mark.usefixtures("torch_is_imported_once")


@pytest.mark.slow
def test_an_uneven_global_batch_is_the_same_error_on_every_rank(tmp_path):
    flags = (*TINY, "--batch_size", "7", "--results_dir", str(tmp_path / "runs"))
    assert codes_of(lambda: benchmark.main(flags), tmp_path) == [2, 2]
    told = [log_of(tmp_path, rank).read_text() for rank in range(2)]
    assert [text.count("does not divide over 2 ranks: got 7") for text in told] == [1, 0]
    assert not list(tmp_path.glob("runs/*/record.json"))


@pytest.mark.slow
def test_a_bad_picture_is_the_last_thing_that_all_ranks_print(tmp_path, picture_folder):
    (picture_folder / "1.png").write_bytes(b"no picture")
    flags = (*TINY, "--no_use_synth_data", "--remote", str(picture_folder), "--no_shuffle")
    flags += ("--batch_size", "2", "--no_measure_peak", "--results_dir", str(tmp_path / "runs"))
    assert codes_of(lambda: benchmark.main(flags), tmp_path) == [1, 1]
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
    flags = (*TINY, *LONG, "--results_dir", str(results))
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


@pytest.mark.slow
def test_a_device_that_no_longer_answers_does_not_keep_a_run_that_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PARTIAL_WITHIN_S", 1.0)
    monkeypatch.setattr(StepTimer, "steps", lambda timer: time.sleep(600))
    with forked_long_run(tmp_path) as process:
        process.terminate()
        process.join(END_WITHIN_S)
        assert process.exitcode == 130
    assert only_record(tmp_path)["reason"].startswith("rank 0: SIGTERM")


def run(folder: Path, dist_timeout_s: int = DIST_TIMEOUT_S) -> int:
    flags = ("--dist_timeout", str(dist_timeout_s), "--results_dir", str(folder))
    return benchmark.main([*TINY, *LONG, *flags])


def two_nodes(program, folder: Path):
    return forked_ranks(program, folder, num_nodes=2)


def be_first_of_two(monkeypatch, *, ranks_per_node: int, port: int) -> None:
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": ranks_per_node}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


def test_a_rank_that_never_comes_is_named(tmp_path, monkeypatch):
    be_first_of_two(monkeypatch, ranks_per_node=1, port=0)
    assert run(tmp_path, dist_timeout_s=1) == 1
    record = only_record(tmp_path)
    assert record["status"] == "timeout"
    assert record["reason"] == ("rank 0: within 1 s (--dist_timeout) rank 1 on node 1 did not come")


def test_a_port_that_is_taken_is_named(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        be_first_of_two(monkeypatch, ranks_per_node=2, port=port)
        assert run(tmp_path) == 1
    told = capsys.readouterr().err
    assert f"port {port} cannot be opened for the ranks to meet at" in told
    assert "another one is set by MASTER_PORT or --master_port" in told


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_and_is_named(tmp_path):
    with two_nodes(functools.partial(run, tmp_path), tmp_path) as ranks:
        wait_for_step(log_of(tmp_path, 0))
        os.kill(ranks[1].pid, signal.SIGSTOP)
        assert exit_codes(ranks[:1], timeout_s=NOTICED_WITHIN_S) == [1]
    record = only_record(tmp_path)
    assert record["status"] == "timeout"
    assert "rank 1 on node 1 has been silent" in record["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_the_reason_of_the_rank_that_failed_is_what_the_record_and_all_ranks_say(
    tmp_path, monkeypatch, failing
):
    step_ends = StepWatch.step_ends

    def fail_after_two_steps(self, *, loss):
        step_ends(self, loss=loss)
        if self.timer.num_steps == 2:
            raise MemoryError("no room here")

    def run_on_unlike_nodes():
        if os.environ["RANK"] == str(failing):
            monkeypatch.setattr(StepWatch, "step_ends", fail_after_two_steps)
        if os.environ["RANK"] == "1":
            # This node does not share the disk of the record.
            monkeypatch.setattr(RunFolder, "claim_failure", lambda self: False)
        return run(tmp_path)

    codes = codes_of(run_on_unlike_nodes, tmp_path, num_nodes=2, timeout_s=START_WITHIN_S)
    assert codes == [1, 1]
    record = only_record(tmp_path)
    reason = f"rank {failing}: MemoryError: no room here"
    assert (record["status"], record["reason"]) == ("oom", reason)
    for rank in range(2):
        printed = log_of(tmp_path, rank).read_text()
        assert printed.count(f"oom: {reason}\nrecord: ") == 1, printed
        assert ("Traceback" in printed) == (rank == failing)


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_of_them_behind_a_step(tmp_path):
    with two_nodes(functools.partial(run, tmp_path), tmp_path) as ranks:
        wait_for_step(log_of(tmp_path, 0))
        ranks[1].terminate()
        assert exit_codes(ranks, timeout_s=NOTICED_WITHIN_S) == [130, 130]
    record = only_record(tmp_path)
    assert record["status"] == "interrupted"
    assert list(tmp_path.rglob("steps.csv"))
    assert "SIGTERM" in record["reason"]


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
        (COMPOSER_2, os.kill, signal.SIGTERM, 130, "SIGTERM: "),
        (TORCHRUN_2, os.killpg, signal.SIGINT, 1, ": Ctrl-C"),
        # The ranks hear of each other by torchrun: they cannot tell that its end was meant.
        (TORCHRUN_2, os.kill, signal.SIGKILL, -9, "torchrun, which runs"),
    ],
    ids=["composer-kill", "torchrun-ctrl-c", "torchrun-kill-9"],
)
def test_a_launcher_that_is_stopped_leaves_a_record_and_no_rank(
    tmp_path, launcher, send, number, exit_code, reason
):
    log = tmp_path / "log.txt"
    process = subprocess.Popen(
        [*launcher, "benchmark.py", *TINY, *LONG, "--results_dir", str(tmp_path)],
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
