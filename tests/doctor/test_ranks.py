"""Several ranks: on two nodes that differ, and with one missing."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdbench.cli import main
from sdbench.engines import load_engine
from tests.doctor.test_node import install
from tests.doctor.test_report import NAMES
from tests.forked import exit_codes, forked_ranks, log_of
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = ["-m", "sdbench", "doctor", "--json", "--model_name", "tiny"]
TIMEOUT_S = 120
# Gloo asks for the address of the host's name, which need not be one of this machine.
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module", autouse=True)
def torch_is_imported_once():
    load_engine("torch")


def read(output: str) -> dict[str, list[dict]]:
    """The findings of the one document on standard output, by name."""
    findings: dict[str, list[dict]] = {}
    for finding in json.loads(output)["findings"]:
        findings.setdefault(finding["name"], []).append(finding)
    return findings


def output_of(folder: Path, rank: int) -> Path:
    """What a forked rank of the doctor prints on standard output."""
    return folder / f"output{rank}.json"


def examine(folder: Path, *flags: str, **environment: str) -> int:
    """The doctor in a forked rank."""
    os.environ |= QUIET | environment
    output = output_of(folder, int(os.environ["RANK"])).open("w")
    os.dup2(output.fileno(), 1)
    sys.stdout = output
    return main([*DOCTOR[2:], "--results_dir", str(folder), *flags])


def examine_alone(folder: Path, *flags: str, **environment: str) -> tuple[int | None, str, str]:
    """Exit code, output and errors of the doctor on one rank, whatever place it is told."""
    program = functools.partial(examine, folder, *flags, **environment)
    with forked_ranks(program, folder, num_ranks=1) as ranks:
        (exit_code,) = exit_codes(ranks, timeout_s=TIMEOUT_S)
    rank = int(environment.get("RANK", 0))
    return exit_code, output_of(folder, rank).read_text(), log_of(folder, 0).read_text()


@pytest.mark.slow
def test_two_nodes_that_differ_over_a_slow_link(tmp_path):
    """Node 1 has an older package; what both have in common is one line. Two ranks on each."""
    install(tmp_path / "site", "webdataset", "0.1")

    def program() -> int:
        if os.environ["NODE_RANK"] == "1":
            sys.path.insert(0, str(tmp_path / "site"))
        return examine(tmp_path, "--timeout_s", "100", "--link_gbps", "1e6")

    with forked_ranks(program, tmp_path, num_ranks=4, num_nodes=2) as ranks:
        codes = exit_codes(ranks, timeout_s=TIMEOUT_S)
    outputs = [output_of(tmp_path, rank).read_text() for rank in range(4)]
    assert codes == [1, 0, 0, 0], outputs
    assert outputs[1:] == [""] * 3  # the first rank has the report
    findings = read(outputs[0])
    assert list(findings) == NAMES
    software = {tuple(line["nodes"]): line["found"] for line in findings["software"]}
    assert set(software) == {(0,), (1,)}
    assert software[(1,)].startswith("webdataset 0.1 where ==1.0.2 is pinned; ")
    assert [line["nodes"] for line in findings["model"]] == [[0, 1]]
    assert findings["nodes alike"][0]["level"] == "warning"
    [reduced] = findings["all-reduce"]
    assert reduced["level"] == "error"
    matched = re.search(
        r"over 4 ranks on 2 nodes in ([\d.e-]+) s: bus bandwidth ([\d.e-]+) GB/s", reduced["found"]
    )
    seconds, gb_per_s = map(float, matched.groups())
    # 2 (n - 1) / n is 1.5 for four ranks; the U-Net of tiny has 933,508 weights.
    assert gb_per_s == pytest.approx(1.5 * 933_508 * 4 / seconds / 1e9, rel=0.02)


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_in_time(tmp_path):
    started_s = time.monotonic()
    exit_code, output, errors = examine_alone(tmp_path, "--timeout_s", "4", WORLD_SIZE="2")
    assert exit_code == 1, errors
    assert time.monotonic() - started_s < 60
    findings = read(output)
    assert findings["ranks"][0]["level"] == "error"
    assert "rank 1 on node 1" in findings["ranks"][0]["found"]
    assert findings["software"][0]["level"] == "ok"


@pytest.mark.slow
def test_a_rank_that_cannot_reach_the_first_one_says_so_itself(tmp_path):
    port = str(free_port())
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": port}
    exit_code, output, errors = examine_alone(tmp_path, "--timeout_s", "2", **place)
    assert (exit_code, output) == (1, "")
    assert f"127.0.0.1:{port}" in json.loads(errors[errors.index("{") :])["findings"][0]["found"]


def test_srun_in_a_container_without_slurm_asks_for_an_address(tmp_path):
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_STEP_NODELIST": "one", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    environment = {**os.environ, **QUIET, **step, "PATH": str(tmp_path)}
    command = [sys.executable, *DOCTOR]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "MASTER_ADDR" in done.stderr


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"http://127.0.0.1:{silent.getsockname()[1]}/a.tar"
        flags = ("--remote", place, "--timeout_s", "3")
        exit_code, output, errors = examine_alone(tmp_path, *flags)
    assert exit_code == 1, errors
    [data] = read(output)["data"]
    assert data["level"] == "error"
    assert "--timeout_s" in data["advice"]
