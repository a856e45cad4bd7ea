"""Which Ray cluster is joined: the one at an address, and none that nobody has named."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import benchmark
from sdbench.ranks.ray_cluster import ANSWER_WITHIN_S, describe_job_stop
from tests.ports import free_port


@pytest.mark.parametrize("by_variable", [False, True])
def test_nobody_at_the_address(by_variable, tmp_path, monkeypatch, capsys):
    address = f"127.0.0.1:{free_port()}"
    argv = ["--model_name", "tiny", "--use_synth_data", "--engine", "ray"]
    if by_variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:
        argv += ["--ray_address", address]
    began_s = time.monotonic()
    assert benchmark.main([*argv, "--results_dir", str(tmp_path / "runs")]) == 1
    # Ray alone takes 9 minutes and more. Half of this bound is for its import.
    assert time.monotonic() - began_s < 2 * ANSWER_WITHIN_S
    assert address in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.ray
def test_a_cluster_that_runs_here_is_not_joined_unasked():
    """`ray start` leaves its address in a file, which Ray reads where it is given none."""
    repository = Path(__file__).parents[2]
    lines = [
        "from sdbench.ranks import ray_cluster",
        "ray_cluster.connect(None)",
        "import ray",
        "print('head', ray.get_runtime_context().gcs_address)",
        "ray.shutdown()",
    ]
    # The paths of Ray's sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)],
            cwd=repository,
            env={**os.environ, "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (address,) = (line for line in done.stdout.splitlines() if line.startswith("head "))
    assert not address.endswith(":9")


def test_a_job_that_ray_would_kill_after_3_s_is_told_so():
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    assert "RAY_JOB_STOP_WAIT_TIME_S" in describe_job_stop(job)
    assert describe_job_stop(job | {"RAY_JOB_STOP_WAIT_TIME_S": "120"}) is None
    assert describe_job_stop({}) is None
