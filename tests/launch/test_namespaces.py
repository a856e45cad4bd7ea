"""Do the pods of a rendered manifest find each other, train as one run, and end as they should?

Each pod runs on a node of its own: a network namespace with its own address and, in it, a process
namespace with its own host name, shared memory and first process. Command and environment are those
of the manifest with what the operator adds; files of the container stand where `MOUNTS` says. What
stays untested is the cluster: the operator itself, NCCL, and the image.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sdbench.record.store import load_record
from tests.debian import find_program
from tests.launch.pods import Pod, list_pods
from tests.launch.rendering import documents
from tests.nodes import address_of, limit_links, make_nodes
from tests.runs import TINY
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
USER_OF_POD = 1000
# Without root's rights, but for reading: an image is readable, and a checkout of root's may not be.
AS_USER = (
    f"--reuid={USER_OF_POD} --regid={USER_OF_POD} --clear-groups "
    "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
)
ADDRESSES = (address_of(0), address_of(1))
ENDS_WITHIN_S = 150
TWO_NODES = {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "1", "NUM_WORKERS": "1", "WORLD_SIZE": "2"}
TWO_RANKS = {"world_size": 2, "num_nodes": 2, "ranks_per_node": 1}
# torchrun is there in a third of the time that composer takes.
QUICK = {"LAUNCHER": "torchrun"}
LONG = "--measure_batches=1000000"
RATE_MBIT = 10
DIST_TIMEOUT_S = 8
# From the time-out to the end of the last process of a pod.
NOTICED_WITHIN_S = 60
SHORT = ("--warmup_batches=1", "--max_warmup_batches=1", "--profile_batches=0", "--no_measure_peak")

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        os.geteuid() != 0
        or not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare", "setpriv"))),
        reason="only root makes network namespaces, with the programs of iproute2 and util-linux",
    ),
]


@dataclasses.dataclass
class Cluster:
    """Two nodes with a link between them, and a folder that both see."""

    namespaces: list[str]  # of node 0 first
    shared: Path  # the volume of the results, logs and the names of the hosts
    running: list[subprocess.Popen] = dataclasses.field(default_factory=list)

    @property
    def results(self) -> Path:
        return self.shared / "results"

    def start(self, pod: Pod, *, node: int, **changes: str) -> subprocess.Popen:
        """Start a pod on a node; its output goes to a log of its name."""
        command = [self._in_container(word) for word in pod.command]
        inside = 'hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs shm /dev/shm; shift 2'
        process = subprocess.Popen(
            [
                *("nsenter", f"--net=/run/netns/{self.namespaces[node]}"),
                *("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child"),
                *("--mount-proc", "bash", "-ec", f'{inside}; exec setpriv {AS_USER} "$@"', "bash"),
                *(pod.name, str(self.shared / "hosts"), *command),
            ],
            env={
                **pod.environment,
                **pod.from_operator,
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "XDG_CACHE_HOME": str(self.shared),
                **changes,
            },
            stdout=self.log_of(pod).open("wb"),
            stderr=subprocess.STDOUT,
        )
        self.running.append(process)
        return process

    def log_of(self, pod: Pod) -> Path:
        return self.shared / f"{pod.name}.log"

    def _in_container(self, word: str) -> str:
        mounts = {"/workspace/stable-diffusion": ROOT, "/results": self.results}
        for place, real in {**mounts, "/data": self.shared / "data"}.items():
            word = word.replace(place, str(real))
        return word


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    shared = Path(tempfile.mkdtemp(prefix="sdbench-nodes-"))  # pytest's own is for root alone
    with make_nodes(2) as names:
        two = Cluster(names, shared)
        for folder in (shared, two.results, shared / "data"):
            folder.mkdir(exist_ok=True)
            os.chown(folder, USER_OF_POD, USER_OF_POD)
        try:
            yield two
        finally:
            for process in two.running:
                process.kill()  # --kill-child ends the pod's first process, and that all others
                process.wait()
            shutil.rmtree(shared)


def pods_of(kind: str, cluster: Cluster, *arguments: str, **changes: str) -> list[Pod]:
    """The two pods of a job, known to each other by name."""
    pods = list_pods(documents(kind, "--", *TINY, *SHORT, *arguments, **TWO_NODES, **changes))
    assert len(pods) == 2
    lines = ["127.0.0.1 localhost"]
    lines += [
        f"{address} {pod.name} {pod.name}.stable-diffusion"
        for address, pod in zip(ADDRESSES, pods, strict=True)
    ]
    lines.append(f"{ADDRESSES[0]} etcd")
    (cluster.shared / "hosts").write_text("\n".join(lines) + "\n")
    return pods


def ranks_in(process: subprocess.Popen) -> list[psutil.Process]:
    """The ranks of a pod: those that run benchmark.py and know their own number."""
    ranks = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "benchmark.py" in child.cmdline() and "LOCAL_RANK" in child.environ():
                ranks[child] = child.ppid()
        except psutil.Error:
            continue
    # What a rank starts looks like it until it has become another program.
    pids = [rank.pid for rank in ranks]
    return [rank for rank, parent in ranks.items() if parent not in pids]


def records_of(cluster: Cluster) -> list[dict]:
    return [load_record(path) for path in sorted(cluster.results.glob("*/record.json"))]


def logs_of(cluster: Cluster) -> str:
    return "\n".join(path.read_text(errors="replace") for path in cluster.shared.glob("*.log"))


def test_a_fixed_job_is_one_run_that_a_slow_link_slows_by_the_time_of_the_gradients(cluster):
    free = run_fixed_job("eks", cluster)
    limit_links(cluster.namespaces, RATE_MBIT)
    # The job of the other operator, which trains the same.
    slow = run_fixed_job("trainjob", cluster, **QUICK)
    # In a ring all-reduce of two nodes each sends (2 - 1) / 2 of the gradients twice.
    gradients_bit = 32 * free["workload"]["num_trainable_parameters"]
    predicted_s = gradients_bit / (RATE_MBIT * 1e6)
    added_s = slow["summary"]["step_time_p50_s"] - free["summary"]["step_time_p50_s"]
    assert predicted_s > 2 * free["summary"]["step_time_p50_s"]  # or a busy machine would decide
    assert added_s == pytest.approx(predicted_s, rel=0.3)


def run_fixed_job(kind: str, cluster: Cluster, **changes: str) -> dict:
    known = {path.name for path in cluster.results.iterdir()}
    pods = pods_of(kind, cluster, "--measure_batches=6")
    processes = [cluster.start(pod, node=node, **changes) for node, pod in enumerate(pods)]
    assert [process.wait(ENDS_WITHIN_S) for process in processes] == [0, 0], logs_of(cluster)
    assert [cluster.log_of(pod).read_text().splitlines()[0].split(",")[0] for pod in pods] == [
        "start-ranks.sh: node 0 of 2",
        "start-ranks.sh: node 1 of 2",
    ]
    (record,) = (record for record in records_of(cluster) if record["run_id"] not in known)
    assert record["status"] == "ok"
    assert record["ranks"].items() >= TWO_RANKS.items()
    return record


def test_a_pod_that_is_stopped_leaves_a_record_that_says_so(cluster):
    pods = pods_of("eks", cluster, LONG)
    processes = [cluster.start(pod, node=node, **QUICK) for node, pod in enumerate(pods)]
    wait_for(lambda: records_of(cluster), what="the beginning of the run")
    # As the kubelet does: the first process of the container, which a signal without a handler
    # would not even reach.
    (first,) = psutil.Process(processes[0].pid).children()
    first.send_signal(signal.SIGTERM)
    assert processes[0].wait(ENDS_WITHIN_S) != 0
    (record,) = records_of(cluster)
    assert record["status"] == "interrupted"


def test_a_node_without_its_link_is_named_and_the_run_ends_on_both_sides(cluster):
    pods = pods_of("eks", cluster, LONG, f"--dist_timeout={DIST_TIMEOUT_S}")
    processes = [cluster.start(pod, node=node, **QUICK) for node, pod in enumerate(pods)]
    wait_for(lambda: "step 1/" in cluster.log_of(pods[0]).read_text(), what="the first step")
    link = ["ip", "-n", cluster.namespaces[1], "link", "set", "eth0", "down"]
    subprocess.run(link, check=True)
    # No packet says that the other side is gone: only the time-out does.
    exit_codes = [process.wait(DIST_TIMEOUT_S + NOTICED_WITHIN_S) for process in processes]
    assert 0 not in exit_codes
    (record,) = records_of(cluster)
    assert record["status"] == "timeout"
    # Each side says it of the other one, and the first of them writes the record.
    assert re.search("rank (0 on node 0|1 on node 1) has been silent", record["reason"])


@pytest.mark.parametrize("backend", ["c10d", pytest.param("etcd", marks=pytest.mark.system)])
def test_an_elastic_job_starts_again_when_a_rank_dies(backend, cluster):
    pods = pods_of("eks-elastic", cluster, "--measure_batches=40", RDZV_BACKEND=backend)
    if backend == "etcd":
        start_etcd(cluster)
    processes = [cluster.start(pod, node=node) for node, pod in enumerate(pods)]
    wait_for(lambda: records_of(cluster), what="the beginning of the run")
    (rank,) = ranks_in(processes[1])
    rank.kill()
    exit_codes = [process.wait(ENDS_WITHIN_S) for process in processes]
    assert exit_codes == [0, 0], logs_of(cluster)
    before, after = records_of(cluster)
    assert before["status"] in ("failed", "interrupted")
    assert after["status"] == "ok"
    assert after["ranks"].items() >= {**TWO_RANKS, "restarts": 1}.items()


def start_etcd(cluster: Cluster) -> None:
    program = find_program("etcd", package="etcd-server", folder=cluster.shared / "debian")
    (pod,) = list_pods(documents("etcd"))
    assert pod.command[0] == "etcd"
    pod = dataclasses.replace(pod, command=(program, *pod.command[1:]))
    process = cluster.start(pod, node=0)
    knock = f"import socket; socket.create_connection(({ADDRESSES[0]!r}, 2379), 1)"
    asking = ["ip", "netns", "exec", cluster.namespaces[0], sys.executable, "-c", knock]
    wait_for(lambda: subprocess.run(asking).returncode == 0, what="an answer of the etcd")
    assert process.poll() is None
