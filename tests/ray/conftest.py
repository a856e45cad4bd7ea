"""One Ray cluster for the tests that kill no node of it, and fixtures of several files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from sdbench.encoding.ray_stream import NUMBER, Pool
from tests.data.s3_server import running_s3, s3  # noqa: F401

# Or one that joins would need the token of who began it.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

# The cluster ends with the process, which ends with its input.
SERVE = """
import sys
from sdbench.ranks import ray_cluster
ray_cluster.connect(None)
print(ray_cluster.head_address(), flush=True)
sys.stdin.read()
"""


ROOT = Path(__file__).resolve().parents[2]
# As `ray start` leaves the address of a cluster, at which nobody answers here.
ADDRESS_LEFT = "127.0.0.1:9"


@pytest.fixture(scope="session")
def address_here() -> Iterator[str]:
    # The paths of Ray's sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name:
        left = Path(name) / "ray" / "ray_current_cluster"
        left.parent.mkdir()
        left.write_text(ADDRESS_LEFT)
        with subprocess.Popen(
            [sys.executable, "-c", SERVE],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            yield server.stdout.readline().strip()
            server.stdin.close()


@pytest.fixture
def on_cluster(address_here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address_here)


def run_alone(*arguments: str) -> None:
    """Run Python in a process of its own: Ray Data leaves threads that connect to Ray again."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


class RowsHere:
    """In place of a `ray.data.Dataset` and of its one end: rows made in this process."""

    def __init__(self, pools: Sequence[Pool], *, num_rows: int, **_: int) -> None:
        self._num_rows = num_rows
        self._stages = [[pool.make_stage() for _ in range(pool.num_actors)] for pool in pools]

    def streaming_split(self, num_ends: int, *, equal: bool) -> list[RowsHere]:
        assert (num_ends, equal) == (1, True)
        return [self]

    def iterator(self) -> RowsHere:
        return self

    def iter_batches(self, **_: object) -> Iterator[dict[str, np.ndarray]]:
        for number in range(self._num_rows):
            block = {NUMBER: np.array([number])}
            for actors in self._stages:
                block = actors[number % len(actors)](block)
            yield block


@pytest.fixture
def stream_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No actors: encoders need the settings' `encoder_resources`, which would be the cluster's."""
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr("ray.get", lambda value: value)
    for module in ("online", "ray_shards"):
        monkeypatch.setattr(f"sdbench.encoding.{module}.make_stream", RowsHere)
        monkeypatch.setattr(f"sdbench.encoding.{module}.set_up_encoder_process", lambda _: "cpu")
