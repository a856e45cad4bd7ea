"""Other processes that load the machine are noticed before the measurement."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

import benchmark
from sdbench.measure import neighbours
from sdbench.record.store import load_record

LOOP = "while True: pass"
QUICK = (
    *("--model_name", "tiny", "--use_synth_data", "--engine", "torch", "--batch_size", "1"),
    *("--warmup_batches", "0", "--measure_batches", "1", "--profile_batches", "0"),
    "--no_measure_peak",
)


@pytest.fixture
def stranger():
    """The id of a process that computes, and that no process of the test has started: an orphan."""
    started = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" > /dev/null 2>&1 & echo $!', sys.executable, LOOP],
        capture_output=True,
        text=True,
        check=True,
    )
    yield int(started.stdout)
    os.kill(int(started.stdout), signal.SIGKILL)


@pytest.mark.slow
def test_a_stranger_is_named_and_flagged_but_no_process_of_the_run(
    tmp_path, capsys, monkeypatch, plain_replay, stranger
):
    seen = psutil.process_iter
    child = subprocess.Popen([sys.executable, "-c", LOOP])
    shown = {os.getpid(), os.getppid(), child.pid}
    monkeypatch.setattr(psutil, "process_iter", lambda *a: (p for p in seen(*a) if p.pid in shown))
    monkeypatch.setattr(neighbours, "MIN_SHARE", 0.005)  # other tests may leave little
    try:
        assert neighbours.Neighbours().describe([os.getpid()]) is None
        shown.add(stranger)
        assert benchmark.main([*QUICK, "--results_dir", str(tmp_path)]) == 0
    finally:
        child.kill()
        child.wait()
    (record,) = map(load_record, tmp_path.glob("*/record.json"))
    assert "busy" in record["summary"]["flags"]
    used = re.search(
        rf"^caution: another process uses (\d\.\d) of {os.cpu_count()} cores: "
        rf"{psutil.Process(stranger).name()} \(pid {stranger}\)$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert used and float(used[1]) < 1.3
