"""A rank that never comes, hangs or fails: how soon does the run end, and does it say which one?

The ranks of two nodes are started here as two launchers on one machine. Across real networks:
tests/launch/test_namespaces.py; under a scheduler: tests/launch/test_slurm.py.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sdbench.record.store import load_record

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# Each node would take all cores of this machine for its own, and the ranks wait for their threads.
ONE_THREAD = ("--num_threads", "1")
TINY = (
    *("--model_name", "tiny", "--engine", "torch", "--use_synth_data", "--num_workers", "0"),
    *ONE_THREAD,
)
LONG = ("--warmup_batches", "1", "--measure_batches", "1000000")
DIST_TIMEOUT_S = 8
# The promise: the time-out, and what the others need to notice and to write.
END_WITHIN_S = DIST_TIMEOUT_S + 25
START_WITHIN_S = 120


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


# torchrun is there in a third of the time that composer takes, and waits for its nodes by itself.
LAUNCHERS = {
    "composer": ("composer", "--nproc", "1", "--world_size", "2"),
    "torchrun": ("torchrun", "--nproc_per_node", "1", "--nnodes", "2"),
}


def start_node(
    node: int,
    port: int,
    results: Path,
    *,
    program: str = "benchmark.py",
    launcher: str = "torchrun",
) -> subprocess.Popen:
    """One of two nodes with a rank each."""
    name, *ranks = LAUNCHERS[launcher]
    place = ("--node_rank", f"{node}", "--master_addr", "127.0.0.1", "--master_port", f"{port}")
    flags = (*TINY, *LONG, "--dist_timeout", str(DIST_TIMEOUT_S), "--results_dir", str(results))
    return subprocess.Popen(
        [str(BIN / name), *ranks, *place, program, *flags],
        cwd=ROOT,
        stdout=(results / f"node{node}.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for_step(results: Path) -> None:
    deadline_s = time.monotonic() + START_WITHIN_S
    while "step 1/" not in (results / "node0.log").read_text():
        assert time.monotonic() < deadline_s, (results / "node0.log").read_text()
        time.sleep(0.2)


def only_record(results: Path) -> dict:
    (path,) = results.glob("*/record.json")
    return load_record(path)


@pytest.fixture
def nodes():
    """Nodes that a test has started; none of their processes outlives it."""
    started: list[subprocess.Popen] = []
    yield started
    for node in started:
        if node.poll() is None:
            for process in psutil.Process(node.pid).children(recursive=True):
                process.kill()
            node.kill()
            node.wait()


def test_a_rank_that_never_comes_is_named(tmp_path, nodes):
    nodes.append(start_node(0, free_port(), tmp_path, launcher="composer"))
    assert nodes[0].wait(timeout=START_WITHIN_S) == 1
    record = only_record(tmp_path)
    assert record["status"] == "timeout"
    assert record["reason"] == (
        f"rank 0: within {DIST_TIMEOUT_S} s (--dist_timeout) rank 1 on node 1 did not come"
    )


def test_a_rank_that_hangs_ends_the_run_and_is_named(tmp_path, nodes):
    port = free_port()
    nodes += [start_node(node, port, tmp_path) for node in (0, 1)]
    wait_for_step(tmp_path)
    (hanging,) = psutil.Process(nodes[1].pid).children()
    hanging.send_signal(signal.SIGSTOP)
    assert nodes[0].wait(timeout=END_WITHIN_S) == 1
    record = only_record(tmp_path)
    assert record["status"] == "timeout"
    assert "rank 1 on node 1 has been silent" in record["reason"]


def test_the_reason_of_the_rank_that_failed_is_the_one_in_the_record(tmp_path, nodes):
    port = free_port()
    program = str(Path(__file__).with_name("fail_on_rank_1.py"))
    nodes += [start_node(node, port, tmp_path, program=program) for node in (0, 1)]
    assert nodes[0].wait(timeout=START_WITHIN_S) == 1
    assert nodes[1].wait(timeout=START_WITHIN_S) == 1
    record = only_record(tmp_path)
    assert (record["status"], record["reason"]) == ("oom", "rank 1: MemoryError: no room here")


def test_a_signal_to_one_rank_ends_all_of_them_behind_a_step(tmp_path, nodes):
    port = free_port()
    nodes += [start_node(node, port, tmp_path) for node in (0, 1)]
    wait_for_step(tmp_path)
    (rank,) = psutil.Process(nodes[1].pid).children()
    rank.send_signal(signal.SIGTERM)
    assert [node.wait(timeout=END_WITHIN_S) for node in nodes] == [1, 1]
    record = only_record(tmp_path)
    assert record["status"] == "interrupted"
    assert "SIGTERM" in record["reason"]
