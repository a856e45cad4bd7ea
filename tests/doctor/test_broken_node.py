"""A node on which many things are broken at once, for real: each line sees its own.

In namespaces of its own a process gets what a default container has (64 MiB of shared memory, no
device files, low limits), full and small disks, and an EFA card in /sys.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doctor.conftest import FAKES
from tests.doctor.namespaces import enter

ROOT = Path(__file__).resolve().parents[2]
MEMORY_LIMIT = 2**20

BREAK = """
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
head -c 100 /dev/zero > /dev/shm/000007_locals
mkdir {here}/full {here}/small
mount -t tmpfs -o size=1m tmpfs {here}/full
head -c 2m /dev/zero > {here}/full/filled 2> {here}/why || true
mount -t tmpfs -o size=200m tmpfs {here}/small
mount -t tmpfs tmpfs /sys/class
mkdir -p /sys/class/infiniband/rdmap0s6/ports/1 /sys/class/infiniband/rdmap0s6/device
ln -s /sys/bus/pci/drivers/efa /sys/class/infiniband/rdmap0s6/device/driver
echo '4: ACTIVE' > /sys/class/infiniband/rdmap0s6/ports/1/state
echo '100 Gb/sec (4X EDR)' > /sys/class/infiniband/rdmap0s6/ports/1/rate
echo Unspecified > /sys/class/infiniband/rdmap0s6/ports/1/link_layer
mount -t tmpfs tmpfs /sys/fs/cgroup
echo {memory_limit} > /sys/fs/cgroup/memory.max
ulimit -n 200
ulimit -l 64
exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock {doctor}
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict[str, dict]:
    if not Path("/dev/shm").is_dir() or not Path("/sys/fs/cgroup").is_dir():
        pytest.skip("no /dev/shm or no /sys/fs/cgroup to mount over")
    own_mounts = enter("--mount", programs=("setpriv",))
    here = tmp_path_factory.mktemp("broken")
    doctor = [sys.executable, "-m", "sdbench", "doctor", "--json", "--model_name", "tiny"]
    doctor += ["--results_dir", str(here / "full" / "runs")]
    script = BREAK.format(here=here, memory_limit=MEMORY_LIMIT, doctor=shlex.join(doctor))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("NCCL_")},
        "PYTHONPATH": str(FAKES),
        "FAKE_GPUS": json.dumps([{}, {"used_gib": 50.0, "num_processes": 3}]),
        "TMPDIR": str(here / "small"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*own_mounts, "sh", "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == "error"
    return {finding["name"]: finding for finding in report["findings"]}


def test_default_shared_memory_of_a_container_is_an_error(findings):
    finding = findings["shared memory"]
    assert finding["level"] == "error"
    # 2 ranks x 8 loaders x 3 batches x 1024 images x 3 x 64 x 64 bytes.
    assert finding["found"] == (
        "/dev/shm has 64 MiB of 64 MiB free, batches of 8 loaders per rank take 576 MiB"
    )
    assert finding["advice"].startswith("docker run --shm-size=4g, ")


def test_what_a_killed_run_has_left_is_a_warning(findings):
    finding = findings["stale memory"]
    assert finding["level"] == "warning"
    assert finding["found"] == "1 file of runs that are no more: 000007_locals"


def test_a_full_and_a_small_disk_are_told_apart(findings, tmp_path_factory):
    finding = findings["disk"]
    assert finding["level"] == "error"
    full, small, cache = finding["found"].split("; ")
    assert full.startswith("results folder ")
    assert full.endswith(": 0 MiB free, and cannot be written (No space left on device)")
    assert small.startswith("temporary folder ")
    assert small.endswith("/small: 200 MiB free")
    assert cache.startswith("cache folder ")
    assert "--results_dir" in finding["advice"] and "TMPDIR" in finding["advice"]


def test_limits_that_network_cards_cannot_work_with_are_an_error(findings):
    finding = findings["limits"]
    assert finding["level"] == "error"
    assert finding["found"].startswith(
        "locked memory 64 KiB: network cards cannot be given memory to write to; 200 open "
        "files, and a rank of this job may need "
    )
    assert "memlock=-1" in finding["advice"] and "ulimit -n" in finding["advice"]


def test_the_limit_of_a_container_on_memory_is_seen(findings):
    finding = findings["host memory"]
    assert finding["level"] == "error"
    assert ", 1 MiB allowed to this container or job; the weights alone take " in finding["found"]


def test_a_card_without_device_files_is_an_error(findings):
    finding = findings["network cards"]
    assert finding["level"] == "error"
    assert finding["found"] == (
        "0 of 1 device files can be opened in /dev/infiniband; 1 x EFA 100 Gbit/s active"
    )


def test_efa_without_a_plugin_is_a_warning_on_one_node(findings):
    finding = findings["NCCL network"]
    assert finding["level"] == "warning"
    assert finding["found"].startswith("NCCL will use TCP and not EFA: ")


def test_a_busy_gpu_is_an_error(findings):
    finding = findings["GPUs"]
    assert finding["level"] == "error"
    assert finding["found"].startswith("GPU 1 has 50.0 of 79.6 GiB taken by 3 other processes; ")
