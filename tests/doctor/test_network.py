"""Network cards as the kernel shows them in /sys, and the speed that they promise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sdbench.doctor import network_cards
from sdbench.doctor.collective import judge_all_reduce
from sdbench.doctor.finding import Job
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import parse_request


@pytest.fixture
def add_card(monkeypatch, tmp_path):
    """A function that adds a card with one port, and its device file."""
    sys_folder, dev_folder = tmp_path / "infiniband", tmp_path / "dev"
    dev_folder.mkdir()
    monkeypatch.setattr(network_cards, "SYS_INFINIBAND", sys_folder)
    monkeypatch.setattr(network_cards, "DEV_INFINIBAND", dev_folder)
    unlimited = SimpleNamespace(
        RLIMIT_MEMLOCK=0, RLIM_INFINITY=-1, getrlimit=lambda which: (-1, -1)
    )
    monkeypatch.setattr(network_cards, "resource", unlimited)

    def add(name, *, driver, link_layer, rate, state="4: ACTIVE", has_file=True) -> None:
        port = sys_folder / name / "ports" / "1"
        port.mkdir(parents=True)
        (sys_folder / name / "device").mkdir()
        (sys_folder / name / "device" / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
        for file, text in (("link_layer", link_layer), ("rate", rate), ("state", state)):
            (port / file).write_text(f"{text}\n")
        if has_file:
            (dev_folder / f"uverbs{len(list(dev_folder.iterdir()))}").touch()

    return add


EFA = {"driver": "efa", "link_layer": "Unspecified", "rate": "100 Gb/sec (4X EDR)"}
INFINIBAND = {"driver": "mlx5_core", "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
ROCE = {"driver": "mlx5_core", "link_layer": "Ethernet", "rate": "200 Gb/sec (4X HDR)"}


@pytest.fixture
def plugin(monkeypatch) -> None:
    """Any library that is there, in the place of a plugin."""
    monkeypatch.setenv("NCCL_NET_PLUGIN", "libc.so.6")


def test_cards_are_counted_by_kind_and_rate(look, add_card, plugin, monkeypatch):
    add_card("rdmap0s6", **EFA)
    add_card("rdmap16s6", **EFA)
    add_card("mlx5_0", **ROCE)
    finding = look()["network cards"]
    assert finding["level"] == "ok"
    assert finding["found"] == "active: 1 x RoCE 200 Gbit/s, 2 x EFA 100 Gbit/s"
    monkeypatch.setattr(network_cards.resource, "getrlimit", lambda which: (65536, 65536))
    finding = look()["network cards"]
    assert finding["level"] == "warning"
    assert finding["found"].startswith("locked memory is limited to 64 KiB; ")


@pytest.mark.parametrize(
    ("fault", "level"), [({"state": "1: DOWN"}, "warning"), ({"has_file": False}, "error")]
)
def test_a_card_that_is_down_or_not_in_the_container(look, add_card, fault, level):
    add_card("mlx5_0", **INFINIBAND)
    add_card("mlx5_1", **INFINIBAND, **fault)
    assert look()["network cards"]["level"] == level


def test_efa_needs_its_plugin(look, add_card, plugin, monkeypatch, tmp_path):
    add_card("rdmap0s6", **EFA)
    assert look()["network cards"]["level"] == "ok"
    (tmp_path / "damaged.so").touch()
    monkeypatch.setenv("NCCL_NET_PLUGIN", str(tmp_path / "damaged.so"))
    assert look()["network cards"]["level"] == "warning"  # between nodes it is an error
    monkeypatch.delenv("NCCL_NET_PLUGIN")
    assert look()["network cards"]["level"] == "warning"


@pytest.mark.parametrize(
    ("seconds", "level", "share"), [(0.1, "ok", 65), (0.2, "warning", 32), (0.7, "error", 9)]
)
def test_an_all_reduce_is_compared_with_the_speed_of_the_link(seconds, level, share):
    job = Job(
        ranks=Ranks(rank=0, world_size=16, local_rank=0, local_world_size=8),
        request=parse_request([], description="", epilog=""),
        timeout_s=30.0,
        link_gbps=800.0,
    )
    judged, found = judge_all_reduce(job, seconds=seconds, num_values=865_910_724)
    assert judged == level
    # 2 x 15 / 16 x 3.4636 GB in so many seconds, of 800 Gbit/s.
    assert f"bus bandwidth {1.875 * 0.865910724 * 4 / seconds:.3g} GB/s" in found
    assert f"{share}% of " in found
