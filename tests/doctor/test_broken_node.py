"""A node on which many things are broken at once, for real: each check sees its own.

In namespaces of its own a process gets what a default container has (64 MiB of shared memory, no
device files, little locked memory), full and small disks, and an EFA card in /sys.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sdbench.base.shared_memory import VARIABLE
from tests.doctor.conftest import FAKES
from tests.doctor.namespaces import enter

ROOT = Path(__file__).resolve().parents[2]
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
ulimit -l 64
exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock {doctor}
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict[str, dict]:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm to mount over")
    own_mounts = enter("--mount", programs=("setpriv",))
    here = tmp_path_factory.mktemp("broken")
    doctor = [sys.executable, "-m", "sdbench", "doctor", "--json", "--model_name", "tiny"]
    doctor += ["--num_workers", "8", "--batch_size", "2048", "--no_check_memory"]
    doctor += ["--device_train_microbatch_size", "1024", "--image_size", "64"]
    doctor += ["--results_dir", str(here / "full" / "runs")]
    script = BREAK.format(here=here, doctor=shlex.join(doctor))
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith("NCCL_") and name != VARIABLE
        },
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


@pytest.mark.parametrize(
    ("name", "level", "seen"),
    [
        # 2 ranks x 8 loaders x 3 batches x 1024 images x 3 x 64 x 64 bytes.
        ("shared memory", "error", ["batches of the loaders take 0.6 GiB", "000007_locals"]),
        ("disk", "error", ["full/runs has 0.0 GiB free: No space", "small has 0.2 GiB free"]),
        ("processes", "warning", ["16 loader processes"]),
        (
            "network cards",
            "error",
            ["0 of 1 files", "1 x EFA 100 Gbit/s", "64 KiB", "NCCL will use TCP"],
        ),
        ("GPUs", "error", ["GPU 1 has 50.0 of 79.6 GiB taken, by 3 other processes"]),
    ],
)
def test_each_check_sees_its_own_fault(findings, name, level, seen):
    assert findings[name]["level"] == level
    for text in seen:
        assert text in findings[name]["found"]
    assert findings[name]["advice"]
