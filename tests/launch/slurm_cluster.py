"""A Slurm cluster of two nodes on this machine, for the tests: real slurmctld, slurmd and munge.

Both nodes are on the loopback interface and believe to have 8 GPUs, which are copies of /dev/null.
Needs root and Debian's packages, which it installs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

PACKAGES = ("slurm-wlm", "munge", "libslurm-dev", "gcc", "libc6-dev")
NODES = ("node1", "node2")
START_WITHIN_S = 60.0
# Slurm takes a node for dead when its slurmd has not answered for so long.
SLURMD_TIMEOUT_S = 10

CONFIG = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SchedulerType=sched/backfill
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
SlurmdTimeout={slurmd_timeout_s}
KillWait=30
PlugStackConfig={folder}/etc/plugstack.conf
NodeName=node[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=8 \
RealMemory=8000 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def reason_to_skip() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster takes root to start"
    if shutil.which("apt-get") is None and shutil.which("slurmctld") is None:
        return "Slurm is not installed, and there is no apt-get to install it with"
    return None


class SlurmCluster:
    """Two nodes that are up until `stop`."""

    def __init__(self, *, stub_source: Path) -> None:
        """Install what is missing, and start everything.

        Args:
            stub_source: A SPANK plugin in C, which is built and loaded.
        """
        _install()
        # Not under pytest's folder: the name of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "etc/slurm.conf")}
        self._write_config(stub_source)
        self._run("munged", "--force", *self._munge_options())
        self._run("slurmctld")
        for node in NODES:
            self.start_node(node)
        self.wait_until_idle()

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._run("slurmd", "-N", node)

    def wait_until_idle(self) -> None:
        """Wait until every node has ended its jobs and can take another."""
        deadline_s = time.monotonic() + START_WITHIN_S
        while self.run("sinfo", "-h", "-N", "-o", "%t").split() != ["idle"] * len(NODES):
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.1)

    def kill_node(self, node: str) -> None:
        """Kill the node's daemons and everything that runs on it, as a loss of power does."""
        daemons, tasks = [], []
        for process in psutil.process_iter():
            try:
                if process.cmdline()[-2:] == ["-N", node]:
                    daemons.append(process)
                elif process.environ().get("SLURMD_NODENAME") == node:
                    tasks.append(process)
                    daemons += [one for one in process.parents() if one.name() == "slurmstepd"]
            except psutil.Error:
                continue
        # The daemons first: they would tell Slurm how the tasks ended.
        for process in [*daemons, *tasks]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def submit(self, *arguments: str, folder: Path, **variables: str) -> int:
        """Submit a job from a folder.

        Returns:
            Its number.
        """
        output = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            cwd=folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
        return int(output)

    def job(self, number: int) -> dict[str, str]:
        """What Slurm says of a job, e.g. its JobState and ExitCode."""
        text = self.run("scontrol", "show", "job", "--oneliner", str(number))
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, number: int, *, states: tuple[str, ...], timeout_s: float) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        deadline_s = time.monotonic() + timeout_s
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < deadline_s, f"{job}\n{self.logs()}"
            time.sleep(0.2)
        return job

    def run(self, *command: str) -> str:
        """Standard output of one of Slurm's programs."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=30
        ).stdout

    def logs(self) -> str:
        """The ends of all daemons' logs."""
        parts = []
        for log in sorted((self.folder / "log").glob("*.log")):
            parts += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(parts)

    def stop(self) -> None:
        """End all daemons and jobs."""
        for process in [*psutil.process_iter()]:
            try:
                is_ours = str(self.folder) in process.environ().get("SLURM_CONF", "")
                if is_ours or str(self.folder) in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_config(self, stub_source: Path) -> None:
        folder = self.folder
        for name in ("etc", "state", "log", "run", "munge", "dev", *(f"spool-{n}" for n in NODES)):
            (folder / name).mkdir()
        folder.chmod(0o755)
        (folder / "munge").chmod(0o755)
        key = folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for index in range(8):
            os.mknod(folder / f"dev/gpu{index}", 0o666 | 0o020000, os.makedev(1, 3))
        self._run("gcc", "-shared", "-fPIC", "-o", str(folder / "stub.so"), str(stub_source))
        config = CONFIG.format(folder=folder, slurmd_timeout_s=SLURMD_TIMEOUT_S)
        (folder / "etc/slurm.conf").write_text(config)
        (folder / "etc/plugstack.conf").write_text(f"required {folder}/stub.so\n")
        (folder / "etc/gres.conf").write_text(f"Name=gpu File={folder}/dev/gpu[0-7]\n")

    def _munge_options(self) -> Iterator[str]:
        files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
        for option, name in files.items():
            suffix = "" if option == "socket" else "-file"
            yield f"--{option}{suffix}={self.folder}/munge/{name}"

    def _run(self, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, timeout=60)


def _install() -> None:
    if shutil.which("slurmctld") and Path("/usr/include/slurm/spank.h").exists():
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Services that packages would start have no place in a test.
    policy = Path("/usr/sbin/policy-rc.d")
    is_ours = not policy.exists()
    if is_ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        options = ("install", "-y", "-qq", "--no-install-recommends", *PACKAGES)
        done = subprocess.run(["apt-get", *options], env=quiet, capture_output=True, check=False)
        if done.returncode:
            subprocess.run(["apt-get", "update", "-qq"], env=quiet, check=True, capture_output=True)
            subprocess.run(["apt-get", *options], env=quiet, check=True, capture_output=True)
    finally:
        if is_ours:
            policy.unlink()
