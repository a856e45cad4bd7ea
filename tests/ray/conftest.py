"""One Ray cluster for the tests that kill no node of it, and fixtures of several files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.s3_server import running_s3, s3  # noqa: F401
from tests.ray.stream_here import stream_here  # noqa: F401

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


# As `ray start` leaves the address of a cluster, at which nobody answers here.
ADDRESS_LEFT = "127.0.0.1:9"


@pytest.fixture(scope="session")
def address_here() -> Iterator[str]:
    """The address of a cluster of this machine."""
    # The paths of Ray's sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name:
        left = Path(name) / "ray" / "ray_current_cluster"
        left.parent.mkdir()
        left.write_text(ADDRESS_LEFT)
        with subprocess.Popen(
            [sys.executable, "-c", SERVE],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RAY_TMPDIR": name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            yield server.stdout.readline().strip()
            server.stdin.close()


@pytest.fixture
def on_cluster(address_here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the test join the cluster of this machine."""
    monkeypatch.setenv("RAY_ADDRESS", address_here)
