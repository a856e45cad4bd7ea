"""`sbatch 2.train.sbatch` on a real Slurm: two nodes with two ranks each, and how a job ends.

Pyxis is a stub that takes its options and starts no container; all else is Slurm itself.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

import train
from sdbench.record.store import load_record
from tests.forked import codes_of
from tests.launch.slurm_cluster import SlurmCluster, reason_to_skip
from tests.launch.test_scripts import make_python
from tests.runs import TINY, only_record
from tests.train.written import read_losses
from tests.waiting import wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--warmup_batches", "1", "--measure_batches", "2", "--profile_batches", "0")
LONG = ("--warmup_batches", "1", "--measure_batches", "1000000")
TWO_RANKS_EACH = ("--gpus-per-node=2", "2.train.sbatch")
ONE_RANK_EACH = ("--gpus-per-node=1", "2.train.sbatch")
# Gloo asks for the address of the host's name, which need not be one of this machine.
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
# torchrun is there in a third of the time that composer takes.
QUICK = {**VARIABLES, "LAUNCHER": "torchrun"}
TIMEOUT_S = 120
# Of a training run: seconds, so that it is stopped on its way.
NUM_STEPS = 80


@pytest.fixture(scope="module")
def cluster():
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    cluster = SlurmCluster(stub_source=Path(__file__).with_name("pyxis_stub.c"))
    yield cluster
    cluster.stop()


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder multi-node of a checkout, to submit from."""
    for name in ("benchmark.py", "train.py", "sdbench", ".venv"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to((ROOT / name).resolve())
    shutil.copytree(ROOT / "multi-node", tmp_path / "multi-node")
    return tmp_path / "multi-node"


@pytest.fixture
def stub_suite(tmp_path) -> Path:
    """A suite with a space in its name, whose Python prints its GPUs and its arguments."""
    suite = tmp_path / "our suite"
    shutil.copytree(ROOT / "multi-node", suite / "multi-node")
    (suite / "benchmark.py").touch()
    python = make_python(suite / ".venv/bin")
    python.write_text(python.read_text().replace('"$*"', '"$CUDA_VISIBLE_DEVICES: $*"'))
    return suite


def log_of(folder: Path) -> str:
    # Slurm makes it some moments after the job has begun.
    return "".join(log.read_text() for log in folder.glob("stable-diffusion_*.log"))


ALL = "0,1,2,3,4,5,6,7"


@pytest.mark.parametrize(
    ("options", "variables", "devices"),
    [
        ((), {}, ALL),
        (("--gpus-per-node=2",), {}, "0,1"),
        (("--gres=gpu:4",), {}, "0,1,2,3"),
        (("--gres=gpu",), {}, "0"),
        (("--gpus-per-node=0",), {}, ""),
        # Of the one on GPUs of its own each, Slurm would start this script eight times on a node.
        (("--ntasks-per-node=8", "--gpus-per-task=1"), {}, ALL),
        (("--export=NONE",), {}, ALL),
        # Left in the shell by the commands for Kubernetes.
        ((), {"NUM_GPUS_PER_NODE": "2", "WORLD_SIZE": "4", "PET_NNODES": "7"}, ALL),
    ],
    ids=str,
)
def test_the_gpus_of_a_job_are_those_of_its_step_however_it_is_submitted(
    cluster, stub_suite, tmp_path, options, variables, devices
):
    script = str(stub_suite / "multi-node/2.train.sbatch")
    path = "/usr/bin:/bin"  # without Composer
    words = (*options, script, "--seed", "1")
    number = cluster.submit(*words, folder=tmp_path, PATH=path, **variables)
    assert cluster.wait(number)["JobState"] == "COMPLETED", log_of(tmp_path)
    num_ranks = max(1, len(devices.split(",")))
    place = f"--master_addr 127.0.0.1 --master_port {10000 + number}"
    started = [line for line in log_of(tmp_path).splitlines() if "sdbench.launch" in line]
    assert sorted(started) == [
        f"{node}: {devices}: -m sdbench.launch.node 110 composer --nproc {num_ranks} --world_size "
        f"{2 * num_ranks} --node_rank {node} {place} benchmark.py --stop_grace_s 110 --seed 1"
        for node in range(2)
    ]


def test_image_and_mounts_are_where_the_variables_of_aws_say(cluster, stub_suite, tmp_path):
    image = tmp_path / "apps/mosaicml-stable-diffusion.sqsh"
    image.parent.mkdir()
    image.touch()
    script, log = str(stub_suite / "multi-node/2.train.sbatch"), tmp_path / "pyxis.txt"
    for data in ({"DATA_PATH": "/data"}, {"DATA_PATH": "/data", "FSX_MOUNT": "/a:/b,/c:/d"}):
        variables = {"APPS_PATH": str(image.parent), "PYXIS_STUB_LOG": str(log), **data}
        number = cluster.submit(script, folder=tmp_path, **variables)
        assert cluster.wait(number)["ExitCode"] == "0:0", log_of(tmp_path)
    suite = f"container-mounts={stub_suite}:{stub_suite}"
    assert set(log.read_text().splitlines()) == {
        f"container-image={image}",
        f"{suite},/data:/data",
        f"{suite},/a:/b,/c:/d",
    }


def wait_for_step(cluster, number: int, folder: Path, *, start: int = 1) -> None:
    cluster.wait(number, "RUNNING")
    wait_for(lambda: log_of(folder).count("step 1/") >= start, what="the first step")


def test_a_job_trains_on_two_nodes_with_the_ranks_that_slurm_gives(cluster, folder, tmp_path):
    image = tmp_path / "image.sqsh"
    image.touch()
    stale = Path("/dev/shm/000000_locals")
    stale.write_bytes(b"of a killed run")
    number = cluster.submit(
        *(*TWO_RANKS_EACH, *TINY, *SHORT, "--device_train_microbatch_size", "4"),
        folder=folder,
        IMAGE=str(image),
        MOUNTS="/fsx:/fsx",
        PYXIS_STUB_LOG=str(tmp_path / "pyxis.txt"),
        **VARIABLES,
    )
    job = cluster.wait(number)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log_of(folder)
    record = only_record(folder.parent / "runs")
    assert record["status"] == "ok"
    assert record["ranks"] == {
        "launcher": "composer",
        "network": None,
        "world_size": 4,
        "num_nodes": 2,
        "ranks_per_node": 2,
        "restarts": 0,
    }
    # No GPU: one micro-batch of 4 images per rank and step.
    assert record["config"]["batch_size"] == 4 * 4
    assert not stale.exists()
    options = set((tmp_path / "pyxis.txt").read_text().splitlines())
    assert options == {
        f"container-image={image}",
        f"container-mounts={tmp_path}:{tmp_path},/fsx:/fsx",
    }


def test_a_job_whose_ranks_fail_has_failed_with_their_exit_code(cluster, folder):
    argv = (*TINY, *SHORT, "--batch_size", "7")
    number = cluster.submit(*ONE_RANK_EACH, *argv, folder=folder, **VARIABLES)
    job = cluster.wait(number)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0")
    assert log_of(folder).count("does not divide over 2 ranks: got 7") == 1


def test_a_job_that_lost_a_node_measures_again_and_a_cancelled_one_says_so(cluster, folder):
    number = cluster.submit(*ONE_RANK_EACH, *TINY, *LONG, folder=folder, **QUICK)
    wait_for_step(cluster, number, folder)
    cluster.kill_node("node2")
    job = cluster.wait(number, "PENDING")
    assert job["JobState"] == "PENDING", log_of(folder)
    first = only_record(folder.parent / "runs")
    assert first["status"] == "failed"
    assert "on node 1" in first["reason"]
    cluster.start_node("node2")
    cluster.wait_until_idle()
    # Slurm holds back a job that lost a node for a minute or two. One that began at once would find
    # one node of its two: Slurm 22.05 counts the lost one off some time after that is back.
    time.sleep(5)
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    wait_for_step(cluster, number, folder, start=2)
    cluster.run("scancel", str(number))
    job = cluster.wait(number)
    assert job["JobState"] == "CANCELLED"
    _, again = map(load_record, sorted((folder.parent / "runs").glob("*/record.json")))
    assert (again["ranks"]["restarts"], again["ranks"]["num_nodes"]) == (1, 2)
    assert again["status"] == "interrupted"
    assert "SIGTERM" in again["reason"]


def test_a_job_that_is_requeued_while_it_trains_goes_on_by_itself(cluster, folder, tmp_path):
    """A run without a stop, of the same ranks on this machine, has the same losses."""
    recipe = (*TINY, "--batch_size", "2", "--max_duration", f"{NUM_STEPS}ba", "--use_ema")
    recipe += ("--log_every_batches", "1", "--run_name", "first", "--resume", "auto")
    number = cluster.submit(*ONE_RANK_EACH, "train.py", *recipe, folder=folder, **QUICK)
    wait_for_step(cluster, number, folder)
    cluster.run("scontrol", "requeue", str(number))
    cluster.wait(number, "PENDING")
    cluster.wait_until_idle()
    run = folder.parent / "runs" / "first"
    stopped = load_record(run)
    assert stopped["status"] == "interrupted" and "SIGTERM" in stopped["reason"]
    # Slurm would hold it back for a minute or two.
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    job = cluster.wait(number)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log_of(folder)
    record = load_record(run)
    assert (record["status"], record["ranks"]["restarts"]) == ("ok", 1)
    summary = record["summary"]
    assert 0 < summary["first_step"] < NUM_STEPS
    assert (summary["num_restarts"], summary["num_lost_steps"]) == (1, 0)

    whole = functools.partial(train.main, [*recipe, "--results_dir", str(tmp_path / "whole")])
    assert codes_of(whole, tmp_path, timeout_s=TIMEOUT_S) == [0, 0]
    losses = read_losses(run)
    assert len(losses) == NUM_STEPS
    assert losses == read_losses(tmp_path / "whole" / "first")


def test_processes_of_srun_need_a_launcher(cluster, tmp_path):
    command = f"{sys.executable} {ROOT}/benchmark.py {' '.join(TINY)} --print_config >&2"
    lines = ("#!/bin/bash", *(f"{srun}{command}; echo $?" for srun in ("", "srun -n1 ", "srun ")))
    (tmp_path / "job.sbatch").write_text("\n".join([*lines, ""]))
    options = ("--nodes=1", "--ntasks=2", "--output=codes.txt", "--error=log.txt", "job.sbatch")
    number = cluster.submit(*options, folder=tmp_path, **VARIABLES)
    job = cluster.wait(number)
    log = (tmp_path / "log.txt").read_text()
    assert job["JobState"] == "COMPLETED", log
    assert (tmp_path / "codes.txt").read_text().split() == ["0", "0", "2"], log
    assert "got '2 tasks without RANK'; allowed: one task on each node" in log
