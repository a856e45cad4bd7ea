"""--engine ray: which cluster is joined, and bad input, which ends as with other launchers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

import benchmark
import data
from sdbench.launch import ray_job
from sdbench.ranks import ray_cluster
from sdbench.ranks.ray_cluster import NUM_PLACES
from tests.documents import ON_RAY, commands
from tests.ports import free_port
from tests.ray.conftest import ADDRESS_LEFT
from tests.refusals import printed_refusal
from tests.runs import only_record

TINY = ("--model_name", "nano", "--use_synth_data", "--engine", "ray")
SHORT = ("--image_size", "64", "--no_measure_peak", "--warmup_batches", "1")
SHORT += ("--measure_batches", "2")
# From a result to the end of the command: 3 s at a load of 5 on two cores.
ENDS_WITHIN_S = 8.0


@pytest.mark.parametrize("by_variable", [False, True])
def test_nobody_at_the_address(by_variable, tmp_path, repository):
    """Before Ray and torch are imported, and without Ray's own patience of minutes."""
    address = f"127.0.0.1:{free_port()}"
    argv = (*TINY, "--results_dir", str(tmp_path / "runs"))
    argv += () if by_variable else ("--ray_address", address)
    command = [sys.executable, "-X", "importtime", "benchmark.py", *argv]
    env = {**os.environ, **({"RAY_ADDRESS": address} if by_variable else {})}
    ended = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)
    assert ended.returncode == 1
    *imports, reason = ended.stderr.splitlines()
    assert address in reason
    imported = {line.rpartition("|")[2].strip() for line in imports}
    assert "sdbench.plan.resolve" in imported
    assert not imported & {"ray", "torch"}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("program", "argv", "refused"),
    [
        (benchmark, ("--batch_size", "8", "--device_train_microbatch_size", "3"), 8),
        (benchmark, ("--batch_size", "7", "--ray_address", "10.0.0.1:6379"), 7),
        (data, ("--batch_size", "3"), 3),
    ],
)
def test_bad_settings_are_refused_before_a_cluster_is_started_or_asked(
    program, argv, refused, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(ray_cluster, "connect", None)
    results = tmp_path / "runs"
    argv = (*TINY, "--num_ray_workers", "2", *argv, "--results_dir", str(results))
    assert program.main(argv) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed_refusal(printed.err).value == refused
    assert not results.exists()


@pytest.mark.ray
@pytest.mark.usefixtures("on_cluster")
def test_fewer_ranks_say_so_and_have_the_drivers_threads(tmp_path, repository, monkeypatch):
    """All places of the cluster for each of two ranks, of which one begins."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what Ray sets, too, where nobody did
    ranks = ("--num_ray_workers", "2", "--min_ray_workers", "1", "--batch_size", "2")
    resources = ("--ray_worker_resources", json.dumps({"CPU": NUM_PLACES}))
    command = [sys.executable, "benchmark.py", *TINY, *SHORT, *ranks, *resources]
    command += ["--results_dir", str(tmp_path), "--json"]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "; free now: CPU" in ended.stderr.splitlines()[0]
    assert "\nRay has started 1 of 2 ranks, as it had no room for more" in ended.stderr
    record = only_record(tmp_path)
    # What the ranks print comes to the driver, which answers.
    assert json.loads(ended.stdout)["source"] == record["run_id"]
    assert record["ranks"]["world_size"] == 1
    assert record["config"]["num_threads"] == 1
    assert record["chosen"]["num_threads"] == "OMP_NUM_THREADS"


@pytest.mark.ray
def test_the_command_of_the_readme_ends_soon_after_its_result_and_leaves_nothing(
    repository, tmp_path
):
    (command,) = (
        line for line in commands() if line.startswith("python benchmark.py ") and ON_RAY in line
    )
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "RAY_TMPDIR": "/tmp"}
    results = ("--results_dir", str(tmp_path / "runs"))
    with subprocess.Popen(
        [sys.executable, *shlex.split(command)[1:], *results],
        cwd=repository,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines, actors = [], set()
        for line in process.stdout:
            printed_s = time.monotonic()
            lines.append(line)
            children = psutil.Process(process.pid).children(recursive=True)
            actors |= {name for one in children if (name := _name_of(one)).startswith("ray::")}
    ended_s = time.monotonic()
    assert process.returncode == 0, lines
    assert lines[-1].startswith("record: ")
    record = only_record(tmp_path / "runs")
    assert (record["status"], record["config"]["engine"]) == ("ok", "ray")
    assert record["ranks"]["world_size"] == 2
    assert record["summary"]["startup"]["seconds"]["launcher"] > 0
    # torch 2.11 makes an empty folder of this name there when torch._dynamo is imported, unless an
    # earlier test in this process has set its variable.
    left = [one for one in (tmp_path / "tmp").rglob("*") if one.name[:14] != "torchinductor_"]
    assert left == []
    assert ended_s - printed_s < ENDS_WITHIN_S
    assert any(name.startswith("ray::RayTrainW") for name in actors)
    # Ray Train would wait for it, for up to 12 s where no dashboard answers it.
    assert not any(name.startswith("ray::PlacementG") for name in actors)


def _name_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


@pytest.mark.parametrize(
    ("in_job", "threads", "carried"), [(False, "1", "1"), (True, "1", None), (True, "4", "4")]
)
def test_the_one_thread_that_ray_chooses_for_a_job_is_not_the_users(
    in_job, threads, carried, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.delenv(ray_cluster.JOB_VARIABLE, raising=False)
    if in_job:
        monkeypatch.setenv(ray_cluster.JOB_VARIABLE, "{}")
    assert ray_cluster.carried_variables().get("OMP_NUM_THREADS") == carried


@pytest.mark.parametrize(
    ("num_places", "threads", "left"),
    [(1, "1", None), (10, "10", None), (0.5, "1", None), (10, "4", "4"), (1, None, None)],
)
def test_the_threads_that_ray_chooses_for_a_worker_are_not_the_users(
    num_places, threads, left, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    ray_cluster.forget_threads_of_ray(num_places)
    assert os.environ.get("OMP_NUM_THREADS") == left


@pytest.mark.parametrize("place", ["/proc/none", "/dev/null/copies", "no-such+scheme://bucket"])
def test_a_storage_that_cannot_be_written_is_refused_before_a_cluster_is_asked(
    place, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(ray_cluster, "connect", None)
    argv = (*TINY, "--ray_address", "10.0.0.1:6379", "--ray_storage_path", place)
    argv += ("--results_dir", str(tmp_path / "runs"))
    assert benchmark.main(argv) == 2
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == ("--ray_storage_path", place)
    assert not (tmp_path / "runs").exists()


def test_a_storage_may_be_a_folder_of_this_one_with_a_space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = SimpleNamespace(ray_storage_path="my copies", run_name="first")
    ray_job._check_storage(config)
    assert (tmp_path / "my copies" / "first").is_dir()


@pytest.mark.parametrize(
    ("states", "min_workers", "has_room"),
    [
        ({"PENDING"}, None, False),
        ({"CREATED"}, None, True),
        (set(), None, True),  # the controller is still being started
        (set(), 1, False),  # with a least number of ranks it asks for places only if there are some
        ({"CREATED"}, 1, True),
    ],
)
def test_ranks_that_ray_is_starting_are_not_said_to_have_no_room(
    states, min_workers, has_room, monkeypatch, capsys
):
    monkeypatch.setattr(ray_job, "PERIOD_S", 0.01)
    monkeypatch.setattr("ray.get", lambda *_, **__: ray_job.Heard("", 0, 0, None))
    monkeypatch.setattr(ray_cluster, "head_address", lambda: "")
    monkeypatch.setattr(ray_cluster, "is_listening", lambda _: True)
    monkeypatch.setattr(ray_cluster, "states_of_places", lambda: states)
    config = SimpleNamespace(dist_timeout=0.1, num_ray_workers=2, min_ray_workers=min_workers)
    desk = SimpleNamespace(collect=SimpleNamespace(remote=object))
    is_over = threading.Event()

    def fit():  # starts no rank, and ends well after a while
        is_over.wait(0.3 if has_room else None)
        return SimpleNamespace(return_value=0)

    code = ray_job._Driver(desk, config, SimpleNamespace(fit=fit)).run([])
    is_over.set()
    assert code == (0 if has_room else 1)
    assert ("no room for the ranks within 0.1 s" in capsys.readouterr().err) != has_room


def test_the_threads_of_a_rank_leave_cores_to_decoders_and_encoders(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sdbench.NUM_CPUS", 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():  # as Ray Train sets them
        monkeypatch.setenv(name, value)
    online = ("--online_preprocessing", "--num_decoders", "4", "--num_encoders", "3")
    elsewhere = ("--encoder_resources", '{"encoder": 1}')
    found = []
    for more in ((), online, (*online, *elsewhere)):
        argv = (*TINY, "--print_config", *more, "--results_dir", str(tmp_path))
        assert benchmark.main(argv) == 0
        found += re.findall(r"^num_threads: (\d+)", capsys.readouterr().out, re.MULTILINE)
    assert found == ["16", "9", "12"]


@pytest.mark.ray
def test_a_cluster_that_runs_here_is_not_joined_unasked(address_here):
    """`ray start` leaves its address in a file, which Ray reads where it is given none."""
    assert address_here != ADDRESS_LEFT


@pytest.mark.ray
@pytest.mark.usefixtures("on_cluster")
def test_bad_input_ends_with_two_and_leaves_no_record(tmp_path, capsys):
    """Only a rank knows what its machine can do."""
    results = tmp_path / "runs"
    argv = (*TINY, "--precision", "tf32", "--num_ray_workers", "2", "--results_dir", str(results))
    code = benchmark.main(argv)
    printed = "".join(capsys.readouterr())
    assert code == 2, printed
    assert printed.count("error:") == 1
    assert "--precision" in printed
    assert not results.exists()


@pytest.mark.ray
@pytest.mark.usefixtures("on_cluster")
def test_ranks_that_no_cluster_has_room_for_are_not_waited_for_without_end(
    tmp_path, repository, monkeypatch, capsys
):
    argv = (*TINY, "--num_ray_workers", "400", "--results_dir", str(tmp_path / "runs"))
    # In a process of its own, which ends while Ray still waits for the ranks.
    command = [sys.executable, "benchmark.py", *argv, "--dist_timeout", "3"]
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "RAY_TMPDIR": "/tmp"}
    ended = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)
    assert ended.returncode == 1
    # torch 2.11 makes an empty folder of this name there when torch._dynamo is imported, unless an
    # earlier test in this process has set its variable.
    left = [one for one in (tmp_path / "tmp").rglob("*") if one.name[:14] != "torchinductor_"]
    assert left == []
    assert "wait for room for up to 3 s (--dist_timeout)" in ended.stderr
    assert "had no room for the ranks within 3 s" in ended.stderr
    # A cluster of this machine alone does not grow.
    monkeypatch.delenv("RAY_ADDRESS")
    assert benchmark.main(argv) == 2
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == ("--num_ray_workers", 400)
    assert not (tmp_path / "runs").exists()
