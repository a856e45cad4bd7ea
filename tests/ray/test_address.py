"""Which Ray cluster is joined: the one at an address, and none that nobody has named."""

from __future__ import annotations

import time

import pytest

import benchmark
from sdbench.ranks.ray_cluster import ANSWER_WITHIN_S
from tests.ports import free_port
from tests.ray.conftest import ADDRESS_LEFT


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
