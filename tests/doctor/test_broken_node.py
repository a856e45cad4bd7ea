"""A node whose disks and shared memory are small or full, for real, in a namespace of its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sdbench.base.shared_memory import VARIABLE
from tests.doctor.conftest import FAKES

ROOT = Path(__file__).resolve().parents[2]
BREAK = """
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
head -c 100 /dev/zero > /dev/shm/000007_locals
mkdir {here}/full {here}/small
mount -t tmpfs -o size=1m tmpfs {here}/full
head -c 2m /dev/zero > {here}/full/filled 2> {here}/why || true
mount -t tmpfs -o size=200m tmpfs {here}/small
exec {doctor}
"""


@pytest.mark.slow
def test_small_and_full_disks_and_shared_memory(tmp_path):
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm to mount over")
    # Another user becomes root of a namespace of users, where the system allows it.
    own_user = () if os.getuid() == 0 else ("--user", "--map-root-user")
    own_mounts = ["unshare", *own_user, "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*own_mounts, "true"]).returncode != 0:
        pytest.skip(f"namespaces cannot be made here: {shlex.join(own_mounts)} fails")
    doctor = [sys.executable, "-m", "sdbench", "doctor", "--json", "--model_name", "tiny"]
    doctor += ["--num_workers", "8", "--batch_size", "2048", "--no_check_memory"]
    doctor += ["--device_train_microbatch_size", "1024", "--image_size", "64"]
    doctor += ["--results_dir", str(tmp_path / "full" / "runs"), "--timeout_s", "100"]
    script = BREAK.format(here=tmp_path, doctor=shlex.join(doctor))
    environment = {
        **{name: value for name, value in os.environ.items() if name != VARIABLE},
        **{"PYTHONPATH": str(FAKES), "FAKE_GPUS": "[{}, {}]"},
        **{"TMPDIR": str(tmp_path / "small"), "OMP_NUM_THREADS": "1"},
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
    findings = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    for name, level, texts in (
        # 2 ranks x 8 loaders x 3 batches x 1024 images x 3 x 64 x 64 bytes.
        ("shared memory", "error", ["batches of the loaders need 0.6 GiB", "000007_locals"]),
        ("disk", "error", ["full/runs has 0.0 GiB free: No space", "small has 0.2 GiB free"]),
        ("processes", "warning", ["16 loader processes"]),
    ):
        assert findings[name]["level"] == level
        assert findings[name]["advice"]
        assert all(text in findings[name]["found"] for text in texts), findings[name]
