"""--engine ray: which cluster is joined, and bad input, which ends as with other launchers."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import benchmark
from sdbench.ranks.ray_cluster import ANSWER_WITHIN_S
from tests.ports import free_port
from tests.ray.conftest import ADDRESS_LEFT
from tests.refusals import printed_refusal


@pytest.mark.parametrize("by_variable", [False, True])
def test_nobody_at_the_address(by_variable, tmp_path, monkeypatch, capsys):
    address = f"127.0.0.1:{free_port()}"
    argv = ["--model_name", "tiny", "--use_synth_data", "--engine", "ray"]
    if by_variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:
        argv += ["--ray_address", address]
    began_s = time.monotonic()
    assert benchmark.main([*argv, "--results_dir", str(tmp_path / "runs")]) == 1
    # Ray alone takes 9 minutes and more. Half of this bound is for its import.
    assert time.monotonic() - began_s < 2 * ANSWER_WITHIN_S
    assert address in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.ray
def test_a_cluster_that_runs_here_is_not_joined_unasked(address_here):
    """`ray start` leaves its address in a file, which Ray reads where it is given none."""
    assert address_here != ADDRESS_LEFT


@pytest.mark.ray
@pytest.mark.usefixtures("on_cluster")
def test_bad_input_ends_with_two_and_leaves_no_record(tmp_path, capsys):
    argv = ("--model_name", "tiny", "--use_synth_data", "--batch_size", "7", "--engine", "ray")
    results = tmp_path / "runs"
    code = benchmark.main([*argv, "--num_ray_workers", "2", "--results_dir", str(results)])
    printed = "".join(capsys.readouterr())
    assert code == 2, printed
    assert printed.count("error:") == 1
    assert "--batch_size" in printed
    assert not results.exists()


@pytest.mark.ray
@pytest.mark.usefixtures("on_cluster")
def test_ranks_that_no_cluster_has_room_for_are_not_waited_for_without_end(
    tmp_path, repository, monkeypatch, capsys
):
    argv = ("--model_name", "tiny", "--use_synth_data", "--engine", "ray")
    argv += ("--num_ray_workers", "400", "--results_dir", str(tmp_path / "runs"))
    # In a process of its own, which ends while Ray still waits for the ranks.
    command = [sys.executable, "benchmark.py", *argv, "--dist_timeout", "3"]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "wait for room for up to 3 s (--dist_timeout)" in ended.stderr
    assert "had no room for the ranks within 3 s" in ended.stderr
    # A cluster of this machine alone does not grow.
    monkeypatch.delenv("RAY_ADDRESS")
    assert benchmark.main(argv) == 2
    refusal = printed_refusal(capsys.readouterr().err)
    assert (refusal.flag, refusal.value) == ("--num_ray_workers", 400)
    assert not (tmp_path / "runs").exists()
