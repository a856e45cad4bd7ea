"""--engine ray on two nodes: what dies in the middle comes back, or the run ends with a reason.

The nodes are network namespaces, each with a raylet and workers; programs run on the first one.

The losses after a fault are those of a run without one, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from sdbench.record.history import read_history
from sdbench.record.store import load_record
from tests.data.s3_server import BUCKET
from tests.nodes import address_of, make_nodes
from tests.train.in_turn import train_in_turn
from tests.train.written import read_events, read_losses, read_steps
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
# Names of processes.
GCS, RAYLET, WORKER = "gcs_server", "raylet", "ray::"
PORT = 6379
ADDRESS = f"{address_of(0)}:{PORT}"  # of the head
OPTIONS = ("--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats")
# Each node holds one rank.
HEAD, SECOND = {"rank": 1, "trainer": 1}, {"rank": 1, "encoder": 1}
RANKS = ("--ray_worker_resources", '{"CPU": 1, "rank": 1}')
TINY = ("--model_name", "nano", "--image_size", "64", "--batch_size", "4", "--use_synth_data")
PLAIN = ("--engine", "ray", "--num_workers", "0", "--num_threads", "1", "--log_every_batches", "1")
NUM_STEPS = 24
SAVED = ("--save_every_batches", "3", "--resume", "auto")
ENDLESS = 1_000_000
RANK, ENCODER = f"{WORKER}RayTrainWorker", "EncodeStage"
STORE_PORT = 5000
STORE = {
    "S3_ENDPOINT_URL": f"http://{address_of(0)}:{STORE_PORT}",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "the-key-that-no-log-may-have",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
# From the end of the head or of the driver to that of a rank; 8 s on an idle machine.
RANK_ENDS_S = 25
# Of a run, or from a fault to the end of what it ends.
ENDS_WITHIN_S = 240

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(4 * ENDS_WITHIN_S),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter"))),
        reason="only root makes network namespaces, with the programs of iproute2 and util-linux",
    ),
]


@dataclasses.dataclass
class RayCluster:
    """A head and further nodes, of which each can be killed and started again."""

    namespaces: Sequence[str]  # of the head first
    resources: Sequence[Mapping[str, float]]  # of each node, by which workers are placed
    folder: Path  # for sockets and logs of Ray, and for what programs print
    started: list[subprocess.Popen] = dataclasses.field(default_factory=list)

    def end_programs(self) -> None:
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
        place = [f"--address={ADDRESS}"]
        if index == 0:
            place = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, *OPTIONS]
        command += [f"--node-ip-address={address_of(index)}", f"--temp-dir={self.folder / 'ray'}"]
        command.append(f"--resources={json.dumps(self.resources[index])}")
        log = self.folder / f"node{index}.log"
        started = self.start(command, log, node=index)
        assert started.wait(ENDS_WITHIN_S) == 0, log.read_text()

    def start(
        self, command: Sequence[str], log: Path, *, node: int = 0, **variables: str
    ) -> subprocess.Popen:
        with log.open("wb") as output:
            program = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.namespaces[node]}", *command],
                cwd=self.folder,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "RAY_ADDRESS": ADDRESS,
                    "RAY_AUTH_MODE": "disabled",  # or a token in ~/.ray would turn it on
                    "GLOO_SOCKET_IFNAME": "eth0",  # all nodes have the host name of this machine
                    **variables,
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
        """Kill all processes of a node at once but for those to spare, and their children."""
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


@dataclasses.dataclass
class Training:
    """A run of train.py: its driver, its folder, and what the driver has printed."""

    driver: subprocess.Popen
    folder: Path
    log: Path

    def wait(self) -> int:
        return self.driver.wait(ENDS_WITHIN_S)

    def wait_for_save(self, *, num_restarts: int = 0) -> None:
        """Wait for a checkpoint of a run that goes on, behind its last restart."""

        def is_saved() -> bool:
            assert self.driver.poll() is None, self.log.read_text()
            names = [event["event"] for event in read_history(self.folder)]
            if names.count("begin") <= num_restarts:
                return False
            return "save" in names[len(names) - names[::-1].index("begin") :]

        wait_for(is_saved, what="a checkpoint", within_s=ENDS_WITHIN_S, log=self.log)

    def events(self, kind: str) -> list[dict]:
        return read_events(self.folder, kind)

    def losses(self) -> list[str]:
        return read_losses(self.folder)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[RayCluster]:
    # The paths of Ray's sockets, which are below it, have to be shorter than 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    with make_nodes(2) as names:
        cluster = RayCluster(names, [HEAD, SECOND], folder)
        try:
            cluster.repair()
            yield cluster
        finally:
            for index in range(len(names)):
                cluster.kill_node(index)
            shutil.rmtree(folder)


@pytest.fixture
def cluster(two_nodes: RayCluster) -> RayCluster:
    """The module's cluster, with those of its nodes started again that a test has killed."""
    two_nodes.end_programs()
    two_nodes.repair()
    return two_nodes


@pytest.fixture
def store(cluster: RayCluster) -> None:
    """An S3 server on the head, with an empty bucket."""
    address = ("-H", address_of(0), "-p", str(STORE_PORT))
    log = cluster.folder / "store.log"
    cluster.start([sys.executable, "-m", "moto.server", *address], log)
    wait_for(lambda: "Running on" in log.read_text(), what="the start of the store", log=log)
    bucket = f"{STORE['S3_ENDPOINT_URL']}/{BUCKET}"
    put = f"import urllib.request as r; r.urlopen(r.Request('{bucket}', method='PUT'))"
    assert cluster.start([sys.executable, "-c", put], log).wait(ENDS_WITHIN_S) == 0, log.read_text()


def start(
    cluster: RayCluster, name: str, *argv: str, num_steps: int = NUM_STEPS, results: str = "runs"
) -> Training:
    command = [sys.executable, str(ROOT / "train.py"), *TINY, *PLAIN, *SAVED, *argv]
    command += ["--results_dir", str(cluster.folder / results), "--run_name", name]
    command += ["--max_duration", f"{num_steps}ba"]
    log = cluster.folder / f"{results}-{name}.log"
    folder = cluster.folder / results / name
    return Training(cluster.start(command, log, **STORE), folder, log)


def start_two_ranks(cluster: RayCluster, name: str, *argv: str, **changes) -> Training:
    return start(cluster, name, "--num_ray_workers", "2", *RANKS, *argv, **changes)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[str]:
    """The losses of a run of two ranks without a fault, and without Ray."""
    folder = tmp_path_factory.mktemp("expected")
    place = ("--results_dir", str(folder), "--run_name", "run", "--max_duration", f"{NUM_STEPS}ba")
    train_in_turn("torch", folder, [*TINY, *PLAIN, *place, "--engine", "torch"])
    losses = read_losses(folder / "run")
    assert len(losses) == NUM_STEPS
    return losses


def test_a_killed_rank_and_a_killed_node_that_comes_back_are_replaced(cluster, expected):
    training = start_two_ranks(cluster, "replaced", "--max_failures", "2")
    training.wait_for_save()
    kill_rank(cluster, node=1)
    training.wait_for_save(num_restarts=1)
    cluster.kill_node(1)
    cluster.repair()
    assert training.wait() == 0, training.log.read_text()
    assert training.losses() == expected
    first, *restarts = training.events("begin")
    assert (first["step"], len(restarts)) == (0, 2)
    for restart in restarts:
        assert restart["step"] in {save["step"] for save in training.events("save")}
        assert 0 < restart["step"] < NUM_STEPS
        assert restart["down_s"] > 0
    record = load_record(training.folder)
    assert (record["status"], record["ranks"]["restarts"]) == ("ok", 2)
    summary = record["summary"]
    assert summary["num_restarts"] == 2
    for name in ("num_lost_steps", "lost_s", "down_s"):
        assert summary[name] == pytest.approx(sum(restart[name] for restart in restarts))


def kill_rank(cluster: RayCluster, *, node: int) -> None:
    (rank,) = cluster.processes(node, RANK)
    rank.kill()


def test_a_node_that_stays_away_leaves_fewer_ranks_and_the_last_one_ends_the_run(cluster, expected):
    elastic = ("--min_ray_workers", "1", "--max_failures", "1")
    training = start_two_ranks(cluster, "elastic", *elastic, num_steps=ENDLESS)
    training.wait_for_save()
    cluster.kill_node(1)
    training.wait_for_save(num_restarts=1)
    kill_rank(cluster, node=0)
    assert training.wait() == 1
    check_failure(training)
    _, restart = training.events("begin")
    # Until then with two ranks, each of which draws noise of its own.
    num_shared = min(restart["step"], NUM_STEPS)
    assert training.losses()[:num_shared] == expected[:num_shared] != []
    steps = [int(row["step"]) for row in read_steps(training.folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > restart["step"]
    assert "Ray has started 1 of 2 ranks" in training.log.read_text()
    record = load_record(training.folder)
    assert record["ranks"]["world_size"] == 1
    assert record["config"]["batch_size"] == 4
    assert record["config"]["device_train_microbatch_size"] == 4
    assert re.match("rank 0 was lost", record["reason"])
    assert "--max_failures" in record["reason"]


def test_ctrl_c_saves_all_and_the_run_goes_on_elsewhere_from_a_store(cluster, store, expected):
    """The nodes were started without the variables of the store, which the command has."""
    storage = ("--ray_storage_path", f"s3://{BUCKET}/runs")
    first = start_two_ranks(cluster, "stored", *storage)
    first.wait_for_save()
    first.driver.send_signal(signal.SIGINT)
    assert first.wait() == 130, first.log.read_text()
    assert load_record(first.folder)["status"] == "interrupted"
    assert first.events("save")[-1]["step"] == len(first.losses())
    num_steps = len(first.losses())
    assert 0 < num_steps < NUM_STEPS
    second = start_two_ranks(cluster, "stored", *storage, results="elsewhere")
    assert second.wait() == 0, second.log.read_text()
    assert first.losses() + second.losses() == expected
    secret = STORE["AWS_SECRET_ACCESS_KEY"].encode()
    files = [path for path in cluster.folder.rglob("*") if path.is_file()]
    assert {"record.json", "raylet.out"} <= {path.name for path in files}
    assert [path for path in files if secret in path.read_bytes()] == []


@pytest.mark.full  # as long as the others, whose faults are worse
def test_encoders_on_another_node_than_ranks_one_of_which_is_killed(cluster):
    encoders = ("--online_preprocessing", "--encoder_resources", '{"CPU": 1, "encoder": 1}')
    training = start_on_head(cluster, "online", *encoders, num_steps=NUM_STEPS)
    training.wait_for_save()

    def find_encoders(node: int) -> list[psutil.Process]:
        return [each for each in cluster.processes(node, WORKER) if ENCODER in each.name()]

    assert [len(cluster.processes(node, RANK)) for node in range(2)] == [1, 0]
    (encoder,) = find_encoders(1)
    assert not find_encoders(0)
    encoder.kill()
    assert training.wait() == 0, training.log.read_text()
    assert len(training.losses()) == NUM_STEPS
    assert load_record(training.folder)["workload"]["num_failed_blocks"] == 0


def start_on_head(cluster: RayCluster, name: str, *argv: str, num_steps: int) -> Training:
    ranks = ("--num_ray_workers", "1", "--ray_worker_resources", '{"CPU": 1, "trainer": 1}')
    return start(cluster, name, *ranks, *argv, num_steps=num_steps)


def kill_head(cluster: RayCluster, driver: int) -> None:
    cluster.kill_node(0, spare=[driver])


def kill_directory(cluster: RayCluster) -> None:
    """Rank and driver are alive and hear of each other; Ray would end them after 60 s."""
    (directory,) = cluster.processes(0, GCS)
    directory.kill()


@pytest.mark.full
def test_the_death_of_the_clusters_directory_ends_a_run_with_a_reason(cluster):
    training = start_on_head(cluster, "directory", "--max_failures", "-1", num_steps=ENDLESS)
    training.wait_for_save()
    kill_directory(cluster)
    assert training.wait() == 1
    check_failure(training)
    wait_for(
        lambda: not cluster.processes(0, RANK), what="the end of the rank", within_s=RANK_ENDS_S
    )


def test_a_rank_elsewhere_ends_soon_when_the_head_is_lost(cluster):
    """Ray alone lets it train on for a minute."""
    place = ("--num_ray_workers", "1", "--ray_worker_resources", '{"CPU": 1, "encoder": 1}')
    training = start(cluster, "elsewhere", *place, num_steps=ENDLESS)
    training.wait_for_save()
    (rank,) = cluster.processes(1, RANK)
    left_before = set(Path(tempfile.gettempdir()).glob("sdbench-ray-*"))
    kill_head(cluster, training.driver.pid)
    rank.wait(RANK_ENDS_S)
    assert training.wait() == 1
    check_failure(training)
    last = max(save["step"] for save in training.events("save"))
    assert (training.folder / "checkpoints" / f"step_{last:08}").is_dir()
    # That of the driver is gone.
    assert len(left_before - set(Path(tempfile.gettempdir()).glob("sdbench-ray-*"))) == 1


def check_failure(training: Training) -> None:
    """The run has failed, with a reason and without a traceback behind it."""
    record = load_record(training.folder)
    assert record["status"] == "failed"
    printed = training.log.read_text()
    assert f"failed: {record['reason']}\n" in printed
    assert "Traceback" not in printed[printed.rindex(record["reason"]) :], printed
