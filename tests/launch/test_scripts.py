"""Linters of shell scripts and Dockerfiles, and what start-ranks.sh hands to a launcher."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sdbench.base.stop import keep_handlers
from sdbench.launch import stop_grace

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SCRIPTS = [
    *sorted(ROOT.glob("*-node/*.sh")),
    *sorted(ROOT.glob("*-node/*.sbatch")),
    ROOT / ".ci/run",
]
DOCKERFILES = sorted(ROOT.glob("*-node/*.Dockerfile"))
# Versions of Debian packages cannot be pinned in an image whose base the user chooses.
NOT_PINNED = "DL3008"


def name(path: Path) -> str:
    return path.name


def run(*command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_shellcheck_finds_nothing_in_a_script(script):
    assert run("bash", "-n", str(script)).returncode == 0
    done = run(str(BIN / "shellcheck"), "--severity=style", "--shell=bash", str(script))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=name)
def test_hadolint_finds_nothing_in_a_dockerfile(dockerfile):
    done = run(str(BIN / "hadolint"), "--ignore", NOT_PINNED, str(dockerfile))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=name)
def test_a_dockerfile_uses_what_it_asks_for_and_copies_what_is_there(dockerfile):
    text = dockerfile.read_text()
    used = text + (ROOT / "single-node/install-suite.sh").read_text()
    for argument in re.findall(r"^ARG (\w+)", text, flags=re.MULTILINE):
        assert re.search(rf"\$\{{?{argument}\b", used), argument
    for line in re.findall(r"^COPY (.+)", text, flags=re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source


@pytest.fixture
def signed_archive(tmp_path):
    """A folder with what AWS's site has, signed by another key, and the fingerprint of that."""
    if shutil.which("gpg") is None:
        pytest.skip("gpg is not installed")
    archive = tmp_path / "site" / "aws-efa-installer-1.0.0.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(b"an archive")
    home = tempfile.mkdtemp(prefix="g")  # the path of a socket in it must be short

    def gpg(*command):
        done = run("gpg", "--homedir", home, "--batch", "--passphrase", "", *map(str, command))
        assert done.returncode == 0, done.stderr
        return done.stdout

    gpg("--quick-gen-key", "nobody@example.com", "ed25519")
    gpg("--output", archive.parent / "aws-efa-installer.key", "--export")
    gpg("--output", archive.with_name(archive.name + ".sig"), "--detach-sign", archive)
    fingerprint = re.search("^fpr:+(.+):$", gpg("--with-colons", "--list-keys"), re.MULTILINE)
    run("gpgconf", "--homedir", home, "--kill", "all")
    shutil.rmtree(home, ignore_errors=True)  # the agent that ends removes its sockets, too
    return archive, fingerprint[1]


@pytest.mark.parametrize("fault", [None, "another key", "another archive"])
def test_only_the_installer_that_aws_has_signed_is_unpacked(tmp_path, signed_archive, fault):
    archive, fingerprint = signed_archive
    if fault == "another archive":
        archive.write_bytes(b"another archive")
    text = (ROOT / "multi-node/1.Dockerfile").read_text()
    steps = text[text.index("mkdir -m 700 /tmp/efa") : text.index("&& tar -xzf")]
    variables = f"EFA_INSTALLER_VERSION=1.0.0 EFA_KEY_FINGERPRINT={fingerprint}"
    if fault == "another key":  # as the Dockerfile has it
        variables = "EFA_INSTALLER_VERSION=1.0.0 " + re.search(r"EFA_KEY_FINGERPRINT=\w+", text)[0]
    script = f"curl() {{ cp {archive.parent}/* .; }}; {variables}; {steps} && echo unpacks"
    done = run("bash", "-c", script.replace("/tmp/efa", str(tmp_path / "efa")))
    assert (done.stdout.endswith("unpacks\n"), done.returncode == 0) == (fault is None,) * 2


def test_composers_version_is_that_of_the_requirements():
    pinned = re.search(r"^mosaicml==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    for path in (*DOCKERFILES, ROOT / "multi-node/README.md"):
        versions = re.findall(r"MOSAICML_VERSION=([\d.]+)", path.read_text())
        assert set(versions) == {pinned[1]}, path


def make_python(folder: Path, *, has_composer: bool = True) -> Path:
    """A stub of Python that prints its arguments."""
    folder.mkdir(parents=True)
    stub = folder / "python3"
    composer = 'echo "$0"; exit' if has_composer else "exit 1"
    stub.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then {composer}; fi\necho "$*"\n')
    stub.chmod(0o755)
    return stub


@pytest.fixture
def suite(tmp_path) -> Path:
    """A folder with a space in its name."""
    suite = tmp_path / "our suite"
    (suite / "multi-node").mkdir(parents=True)
    shutil.copy(ROOT / "multi-node/start-ranks.sh", suite / "multi-node")
    return suite


@pytest.fixture
def start_ranks(suite):
    """Run start-ranks.sh up to Python, a stub that prints its arguments."""
    python = make_python(suite / "environment")
    path = f"{python.parent}:/usr/bin:/bin"

    def start(*argv: str, **variables: str) -> subprocess.CompletedProcess:
        script = str(suite / "multi-node/start-ranks.sh")
        return run("bash", script, *argv, env={"PATH": path, **variables})

    return start


STARTED = "-m sdbench.launch.node 110"
TWO_NODES = {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
# Kubeflow's elastic PyTorchJob: torchrun reads the rest from PET_* by itself.
ELASTIC = {"PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_BACKEND": "c10d"}
ELASTIC |= {"LAUNCHER": "torchrun", "PET_NNODES": "2:2", "NUM_GPUS_PER_NODE": "8"}


@pytest.mark.parametrize(
    ("variables", "launched"),
    [
        ({}, "composer --nproc 1 --world_size 1 --node_rank 0 benchmark.py"),
        (
            {**TWO_NODES, "NODE_RANK": "1", "WORLD_SIZE": "16"},
            "composer --nproc 8 --world_size 16 --node_rank 1 --master_addr a --master_port 29500 "
            "benchmark.py",
        ),
        # Kubeflow's PyTorchJob: RANK is the number of the pod, WORLD_SIZE counts pods.
        (
            {**TWO_NODES, "RANK": "1", "WORLD_SIZE": "2", "LAUNCHER": "torchrun"},
            "torchrun --nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr a "
            "--master_port 29500 benchmark.py",
        ),
        # Kubeflow's Trainer.
        (
            {
                **{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "0"},
                **{"PET_MASTER_ADDR": "b", "PET_MASTER_PORT": "29400"},
            },
            "composer --nproc 4 --world_size 8 --node_rank 0 --master_addr b --master_port 29400 "
            "benchmark.py",
        ),
        (ELASTIC, "torchrun --nproc_per_node 8 benchmark.py"),
        (
            {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_GPUS_ON_NODE": "4"},
            "composer --nproc 4 --world_size 4 --node_rank 0 benchmark.py",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "2,GPU-5d2a"},
            "composer --nproc 2 --world_size 2 --node_rank 0 benchmark.py",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "-1"},
            "composer --nproc 1 --world_size 1 --node_rank 0 benchmark.py",
        ),
    ],
)
def test_ranks_are_started_as_the_scheduler_says(start_ranks, variables, launched):
    done = start_ranks("--seed", "1", **variables)
    assert done.returncode == 0, done.stderr
    # A flag of the user replaces the one of the script.
    flags = "--stop_grace_s 110 --seed 1"
    assert done.stdout.splitlines()[-1] == f"{STARTED} {launched} {flags}"


def test_another_program_may_stand_first(start_ranks):
    launched = f"{STARTED} composer --nproc 1 --world_size 1 --node_rank 0"
    done = start_ranks("train.py", "--run_name", "a b.py")
    assert done.stdout.endswith(f"{launched} train.py --stop_grace_s 110 --run_name a b.py\n")
    done = start_ranks("generate.py", "--seed", "1")
    assert done.stdout.endswith(f"{launched} generate.py --seed 1\n")
    done = start_ranks("tran.py")
    assert done.returncode == 2 and "got 'tran.py'; allowed: benchmark.py, " in done.stderr


@pytest.mark.parametrize(
    ("job", "name", "value"),
    [
        (TWO_NODES, "MASTER_PORT", "80"),
        (TWO_NODES, "MASTER_PORT", "0x50"),
        (TWO_NODES, "MASTER_ADDR", ""),
        (TWO_NODES, "NODE_RANK", "2"),
        (TWO_NODES, "NUM_NODES", "two"),
        (TWO_NODES, "NUM_GPUS_PER_NODE", "{8}"),
        (TWO_NODES, "WORLD_SIZE", "12"),
        (TWO_NODES, "NUM_RANKS", "64"),
        (TWO_NODES, "LAUNCHER", "mpirun"),
        (ELASTIC, "PET_RDZV_ENDPOINT", "etcd:80"),
        (ELASTIC, "PET_NNODES", "1:x"),
    ],
)
def test_a_bad_variable_is_refused_by_name(start_ranks, job, name, value):
    done = start_ranks(**{**job, "NODE_RANK": "1", name: value})
    assert done.returncode == 2
    (message,) = done.stderr.splitlines()
    assert f"got '{value.split(':')[-1]}'; allowed: " in message
    assert name in message.split("change it with ")[1]


def test_several_tasks_on_a_node_do_not_each_start_all_of_its_ranks(start_ranks):
    done = start_ranks(SLURM_STEP_NUM_TASKS="16", SLURM_STEP_NUM_NODES="2", **TWO_NODES)
    assert done.returncode == 2
    assert "got '16 tasks on 2 nodes'; allowed: one task on each node" in done.stderr


@pytest.mark.parametrize(
    ("has_composer", "used"),
    [
        # A virtual environment or one of conda that is active, and an image.
        ({"on PATH": True, "virtual": True, ".venv": True}, "on PATH"),
        # The base environment of conda, or a module that was loaded later.
        ({"on PATH": False, "virtual": True, "conda": True, ".venv": True}, "virtual"),
        ({"on PATH": False, "virtual": False, "conda": True, ".venv": True}, "conda"),
        ({"on PATH": False, "conda": False, ".venv": True}, ".venv"),
        ({"on PATH": False, ".venv": False}, None),
    ],
)
def test_the_launcher_is_that_of_the_active_environment(suite, has_composer, used):
    pythons = {
        name: make_python(suite / name / "bin", has_composer=has)
        for name, has in has_composer.items()
    }
    env = {"PATH": f"{pythons['on PATH'].parent}:/usr/bin:/bin"}
    env |= {"VIRTUAL_ENV": str(suite / "virtual"), "CONDA_PREFIX": str(suite / "conda")}
    done = run("bash", str(suite / "multi-node/start-ranks.sh"), env=env)
    if used is None:
        assert done.returncode == 2
        assert f"no Python has Composer: got '{pythons['on PATH']}'; allowed: " in done.stderr
    else:
        assert f", composer of {pythons[used]}\n{STARTED} composer " in done.stdout


@pytest.mark.parametrize("name", ["composer", "torchrun"])
def test_a_launcher_waits_for_ranks_that_it_stops_as_long_as_the_scheduler(name, monkeypatch):
    from composer.cli import launcher as composer
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import PContext

    waited_s = []

    def clean_up(processes):
        waited_s.append(composer.CLEANUP_TIMEOUT.total_seconds())

    def stop_ranks():
        PContext.close(None, signal.SIGTERM)
        PContext.close(None, signal.SIGTERM, 30)  # as torch 2.14 does

    monkeypatch.setattr(composer, "CLEANUP_TIMEOUT", composer.CLEANUP_TIMEOUT)
    monkeypatch.setattr(composer, "_cleanup_processes", clean_up)
    monkeypatch.setattr(composer, "main", lambda: composer._cleanup_processes({}))
    monkeypatch.setattr(PContext, "close", lambda _, signal, timeout: waited_s.append(timeout))
    monkeypatch.setattr(torchrun, "main", stop_ranks)
    with keep_handlers():
        stop_grace.main(name, 110.0)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert set(waited_s) == {110.0}
