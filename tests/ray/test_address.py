"""An address where no Ray cluster answers is an error, and soon."""

from __future__ import annotations

import socket
import time

import pytest

import benchmark
from sdbench.ranks.ray_cluster import ANSWER_WITHIN_S


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("by_variable", [False, True])
def test_nobody_at_the_address(by_variable, free_port, tmp_path, monkeypatch, capsys):
    address = f"127.0.0.1:{free_port}"
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
