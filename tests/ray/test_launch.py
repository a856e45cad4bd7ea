"""--engine ray: bad input ends as with other launchers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import benchmark
from tests.refusals import printed_refusal

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]


def test_bad_input_ends_with_two_and_leaves_no_record(tmp_path, capsys):
    argv = ("--model_name", "tiny", "--use_synth_data", "--batch_size", "7", "--engine", "ray")
    results = tmp_path / "runs"
    code = benchmark.main([*argv, "--num_ray_workers", "2", "--results_dir", str(results)])
    printed = "".join(capsys.readouterr())
    assert code == 2, printed
    assert printed.count("error:") == 1
    assert "--batch_size" in printed
    assert not results.exists()


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
