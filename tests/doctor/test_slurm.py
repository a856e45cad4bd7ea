"""srun as the launcher, on a real Slurm of two nodes that believe to have GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.slurm_cluster import SlurmCluster, reason_to_skip

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = (sys.executable, "-m", "sdbench", "doctor", "--json", "--model_name", "tiny")
DOCTOR += ("--timeout_s", "120")  # the tests of Ray run at the same time
SRUN = ("srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2")


@pytest.fixture(scope="module")
def cluster():
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    cluster = SlurmCluster(stub_source=ROOT / "tests" / "launch" / "pyxis_stub.c")
    yield cluster
    cluster.stop()


def test_srun_is_launcher_enough(cluster, tmp_path):
    done = subprocess.run(
        [*SRUN, *DOCTOR, "--results_dir", str(tmp_path)],
        cwd=ROOT,
        # Gloo asks for the address of the host's name, which need not be one of this machine.
        env={**cluster.environment, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    # There is no driver for the GPUs that Slurm gives, which is the one error.
    assert done.returncode == 1, done.stderr + cluster.logs()
    report = json.loads(done.stdout)
    assert (report["num_nodes"], report["num_ranks"]) == (2, 2)
    errors = [finding for finding in report["findings"] if finding["level"] == "error"]
    assert [(one["name"], one["nodes"]) for one in errors] == [("GPUs", [0, 1])]
    levels = {finding["name"]: finding["level"] for finding in report["findings"]}
    assert [levels[name] for name in ("ranks", "all-reduce")] == ["ok"] * 2
