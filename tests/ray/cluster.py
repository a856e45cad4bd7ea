"""`make_cluster`: Ray nodes in network namespaces, with an address each, and how one of them dies.

Each node has a raylet and workers of its own. Programs that train run on the first one, the head.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.nodes import address_of, make_nodes
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
# Names of processes.
GCS, RAYLET, WORKER = "gcs_server", "raylet", "ray::"
PORT = 6379
START_WITHIN_S = 60
OPTIONS = ("--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats")


@dataclasses.dataclass
class RayCluster:
    """A head and further nodes, of which each can be killed and started again."""

    namespaces: Sequence[str]  # of the head first
    resources: Sequence[Mapping[str, float]]  # of each node, by which workers are placed
    folder: Path  # for sockets and logs of Ray, and for what programs print
    started: list[subprocess.Popen] = dataclasses.field(default_factory=list)

    @property
    def address(self) -> str:
        """Of the head, as RAY_ADDRESS has it."""
        return f"{address_of(0)}:{PORT}"

    def end_programs(self) -> None:
        """Kill the programs that are still running."""
        for program in self.started:
            program.kill()
            program.wait()
        self.started.clear()

    def repair(self) -> None:
        """Start the nodes that are dead, and wait until they have joined."""
        if not self.processes(0, GCS):
            for index in range(len(self.namespaces)):
                self.kill_node(index)  # a new head knows nothing of them
        for index in range(len(self.namespaces)):
            if not self.processes(index, RAYLET):
                self._start_node(index)

    def _start_node(self, index: int) -> None:
        place = [f"--address={self.address}"]
        if index == 0:
            place = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, *OPTIONS]
        command += [f"--node-ip-address={address_of(index)}", f"--temp-dir={self.folder / 'ray'}"]
        command.append(f"--resources={json.dumps(self.resources[index])}")
        log = self.folder / f"node{index}.log"
        started = self.start(command, log, node=index)
        assert started.wait(START_WITHIN_S) == 0, log.read_text()

    def start(
        self, command: Sequence[str], log: Path, *, node: int = 0, **environment: str
    ) -> subprocess.Popen:
        """Start a program on a node, with variables beside those of this process."""
        with log.open("wb") as output:
            program = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.namespaces[node]}", *command],
                cwd=self.folder,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "RAY_ADDRESS": self.address,
                    "RAY_AUTH_MODE": "disabled",  # or a token in ~/.ray would turn it on
                    "GLOO_SOCKET_IFNAME": "eth0",  # all nodes have the host name of this machine
                    **environment,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(program)
        return program

    def processes(self, node: int, name: str = "") -> list[psutil.Process]:
        """Living processes of a node whose name begins so; a worker's is `ray::` and its class."""
        words = ("ip", "netns", "pids", self.namespaces[node])
        answer = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        found = []
        for pid in answer.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if process.name().startswith(name) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill_node(self, node: int, *, spare: Sequence[int] = ()) -> None:
        """Kill all processes of a node at once, as if its machine were switched off.

        Processes with an id in `spare`, and their children, live on.
        """
        spared = set(spare)
        for pid in spare:
            spared |= {child.pid for child in psutil.Process(pid).children(recursive=True)}

        def kill_all() -> bool:
            living = [each for each in self.processes(node) if each.pid not in spared]
            for process in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return not living

        wait_for(kill_all, what=f"the end of node {node}")


@contextlib.contextmanager
def make_cluster(resources: Sequence[Mapping[str, float]]) -> Iterator[RayCluster]:
    """A cluster that lasts as long as the context."""
    # The paths of Ray's sockets, which are below it, have to be shorter than 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    with make_nodes(len(resources)) as names:
        cluster = RayCluster(names, resources, folder)
        try:
            cluster.repair()
            yield cluster
        finally:
            for index in range(len(names)):
                cluster.kill_node(index)
            shutil.rmtree(folder)
