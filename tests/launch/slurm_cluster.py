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
from pathlib import Path

import psutil

from tests.waiting import wait_for

PACKAGES = ("slurm-wlm", "munge", "libslurm-dev", "gcc", "libc6-dev")
NODES = ("node1", "node2")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

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
SlurmdTimeout=10
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
        """Install what is missing, build the SPANK plugin, and start everything."""
        _install()
        # Not under pytest's folder: the name of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "etc/slurm.conf")}
        self._write_config(stub_source)
        files = {option: f"{option}-file" for option in ("key", "pid", "log", "seed")}
        places = {"socket": "socket", **files}.items()
        munge = [f"--{option}={self.folder}/munge/{name}" for name, option in places]
        self._run("munged", "--force", *munge)
        self._run("slurmctld")
        for node in NODES:
            self.start_node(node)
        self.wait_until_idle()

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._run("slurmd", "-N", node)

    def wait_until_idle(self) -> None:
        """Wait until every node has ended its jobs and can take another."""
        idle = ["idle"] * len(NODES)
        shown = ("sinfo", "-h", "-N", "-o", "%t")
        wait_for(lambda: self.run(*shown).split() == idle, what="the rest of all nodes")

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
        """Submit a job from a folder; its number."""
        return int(self.run("sbatch", "--parsable", *arguments, folder=folder, **variables))

    def job(self, number: int) -> dict[str, str]:
        """What Slurm says of a job, e.g. its JobState and ExitCode."""
        text = self.run("scontrol", "show", "job", "--oneliner", str(number))
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, number: int, *states: str) -> dict[str, str]:
        """Wait until a job has ended, or is in one of these states."""
        wait_for(
            lambda: self.job(number)["JobState"] in (*states, *ENDED),
            what=f"the end of job {number} or one of {states}",
            within_s=270,  # four ranks on two cores, and the tests of Ray beside them
            log=self.folder / "log/slurmctld.log",
        )
        return self.job(number)

    def run(self, *command: str, folder: Path | None = None, **variables: str) -> str:
        """Standard output of one of Slurm's programs."""
        environment = {**self.environment, **variables}
        options = {"capture_output": True, "text": True, "check": True, "timeout": 30}
        return subprocess.run(command, cwd=folder, env=environment, **options).stdout

    def logs(self) -> str:
        """The ends of all daemons' logs."""
        logs = sorted((self.folder / "log").glob("*.log"))
        return "\n".join(log.read_text(errors="replace")[-2000:] for log in logs)

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
        (folder / "etc/slurm.conf").write_text(CONFIG.format(folder=folder))
        (folder / "etc/plugstack.conf").write_text(f"required {folder}/stub.so\n")
        (folder / "etc/gres.conf").write_text(f"Name=gpu File={folder}/dev/gpu[0-7]\n")

    def _run(self, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, timeout=60)


def _install() -> None:
    if shutil.which("slurmctld") and Path("/usr/include/slurm/spank.h").exists():
        return
    # Services that packages would start have no place in a test.
    policy = Path("/usr/sbin/policy-rc.d")
    is_ours = not policy.exists()
    if is_ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    install = f"apt-get install -y -qq --no-install-recommends {' '.join(PACKAGES)}"
    command = f"{install} || (apt-get update -qq && {install})"
    try:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, shell=True, env=quiet, check=True, capture_output=True)
    finally:
        if is_ours:
            policy.unlink()
