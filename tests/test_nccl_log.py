"""The network that NCCL used, read from its log. NCCL itself needs GPUs on two machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sdbench.ranks.distributed import Ranks
from sdbench.ranks.nccl_log import NcclLog
from sdbench.record.formulas import SOCKETS

TWO_NODES = Ranks(rank=0, world_size=16, local_rank=0, local_world_size=8)
ONE_NODE = Ranks(rank=0, world_size=8, local_rank=0, local_world_size=8)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        # Set and then deleted, so that what NcclLog sets is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("network", ["AWS Libfabric", SOCKETS])
def test_the_network_is_read_from_nccls_own_log(network):
    log = NcclLog(TWO_NODES, device_type="cuda")
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(
        "node1:71:80 [0] NCCL INFO NET/Plugin: Plugin load returned 0\n"
        f"node1:71:80 [0] NCCL INFO Using network {network}\n"
        "node1:71:80 [0] NCCL INFO comm 0x5581 rank 0 nranks 16\n"
    )
    assert os.environ["NCCL_DEBUG"] == "INFO"
    assert log.read_network() == network


@pytest.mark.parametrize(
    ("ranks", "device_type"), [(ONE_NODE, "cuda"), (TWO_NODES, "cpu")], ids=["one node", "gloo"]
)
def test_nothing_is_asked_where_nccl_crosses_no_network(ranks, device_type):
    assert NcclLog(ranks, device_type=device_type).read_network() is None
    assert "NCCL_DEBUG" not in os.environ


def test_the_users_own_log_is_left_alone(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert NcclLog(TWO_NODES, device_type="cuda").read_network() is None
    assert os.environ["NCCL_DEBUG"] == "WARN"
