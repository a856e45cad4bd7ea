"""A rank that never comes, hangs or fails: how soon does the run end, and does it say which one?

Two processes pass for two nodes. Across real networks: tests/launch/test_namespaces.py; under a
launcher: tests/launch/test_processes.py; under a scheduler: tests/launch/test_slurm.py.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
from pathlib import Path

import pytest

import benchmark
from sdbench.measure.watch import StepWatch
from sdbench.record.store import RunFolder
from tests.forked import exit_codes, forked_ranks, log_of, wait_for_step
from tests.runs import only_record

# Each node would take all cores of this machine for its own, and the ranks wait for their threads.
TINY = (
    *("--model_name", "tiny", "--engine", "torch", "--use_synth_data", "--num_workers", "0"),
    *("--num_threads", "1", "--no_measure_peak"),
)
LONG = ("--warmup_batches", "1", "--measure_batches", "1000000")
DIST_TIMEOUT_S = 8
# The promise: the time-out, and what the others need to notice and to write.
END_WITHIN_S = DIST_TIMEOUT_S + 25
START_WITHIN_S = 120


pytestmark = pytest.mark.usefixtures("torch_is_imported_once")


def run(folder: Path, dist_timeout_s: int = DIST_TIMEOUT_S) -> int:
    flags = ("--dist_timeout", str(dist_timeout_s), "--results_dir", str(folder))
    return benchmark.main([*TINY, *LONG, *flags])


def two_nodes(program, folder: Path):
    """A rank on each of two nodes."""
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


def test_a_rank_that_hangs_ends_the_run_and_is_named(tmp_path):
    with two_nodes(functools.partial(run, tmp_path), tmp_path) as ranks:
        wait_for_step(log_of(tmp_path, 0))
        os.kill(ranks[1].pid, signal.SIGSTOP)
        assert exit_codes(ranks[:1], timeout_s=END_WITHIN_S) == [1]
    record = only_record(tmp_path)
    assert record["status"] == "timeout"
    assert "rank 1 on node 1 has been silent" in record["reason"]


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

    with two_nodes(run_on_unlike_nodes, tmp_path) as ranks:
        assert exit_codes(ranks, timeout_s=START_WITHIN_S) == [1, 1]
    record = only_record(tmp_path)
    reason = f"rank {failing}: MemoryError: no room here"
    assert (record["status"], record["reason"]) == ("oom", reason)
    for rank in range(2):
        printed = log_of(tmp_path, rank).read_text()
        assert printed.count(f"oom: {reason}\nrecord: ") == 1, printed
        assert ("Traceback" in printed) == (rank == failing)


def test_a_signal_to_one_rank_ends_all_of_them_behind_a_step(tmp_path):
    with two_nodes(functools.partial(run, tmp_path), tmp_path) as ranks:
        wait_for_step(log_of(tmp_path, 0))
        ranks[1].terminate()
        assert exit_codes(ranks, timeout_s=END_WITHIN_S) == [130, 130]
    record = only_record(tmp_path)
    assert record["status"] == "interrupted"
    assert list(tmp_path.rglob("steps.csv"))
    assert "SIGTERM" in record["reason"]
