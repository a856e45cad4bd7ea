"""Network cards and NCCL's plugin, with cards as the kernel shows them in /sys/class/infiniband."""

from __future__ import annotations

import ctypes.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdbench.doctor import network
from sdbench.doctor.collective import Reduced, judge_all_reduce
from sdbench.doctor.finding import Finding
from sdbench.doctor.flags import parse
from sdbench.doctor.job import Job
from sdbench.ranks.distributed import Ranks


@pytest.fixture
def add_card(monkeypatch, tmp_path):
    """A function that adds a card with one port, and its device file."""
    sys_folder, dev_folder = tmp_path / "infiniband", tmp_path / "dev"
    dev_folder.mkdir()
    monkeypatch.setattr(network, "SYS_INFINIBAND", sys_folder)
    monkeypatch.setattr(network, "DEV_INFINIBAND", dev_folder)

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


def find_library() -> Path:
    """Some shared library, to take the place of a plugin."""
    name = ctypes.util.find_library("m")
    for line in Path("/proc/self/maps").read_text().splitlines():
        if name and line.endswith(f"/{name}"):
            return Path(line.split()[-1])
    pytest.skip(f"this process has not loaded {name}")


@pytest.fixture
def plugin(monkeypatch, tmp_path) -> Path:
    folder = tmp_path / "plugin"
    folder.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    return folder / "libnccl-net.so"


def test_no_card_is_no_fault_of_a_single_node(look):
    finding = look()["network cards"]
    assert (finding["level"], finding["found"]) == ("skipped", "neither EFA nor InfiniBand")


def test_cards_are_counted_by_kind_and_rate(look, add_card):
    add_card("rdmap0s6", **EFA)
    add_card("rdmap16s6", **EFA)
    add_card("mlx5_0", **ROCE)
    finding = look()["network cards"]
    assert finding["level"] == "ok"
    assert finding["found"] == ("1 x RoCE 200 Gbit/s, 2 x EFA 100 Gbit/s active; 3 device files")


def test_a_port_that_is_down_is_named(look, add_card):
    add_card("mlx5_0", **INFINIBAND)
    add_card("mlx5_1", **INFINIBAND, state="1: DOWN")
    finding = look()["network cards"]
    assert finding["level"] == "warning"
    assert finding["found"] == (
        "mlx5_1 port 1 is DOWN; 1 x InfiniBand 400 Gbit/s active; 2 device files"
    )


def test_a_container_without_the_device_files_is_an_error(look, add_card):
    add_card("rdmap0s6", **EFA)
    add_card("rdmap16s6", **EFA, has_file=False)
    finding = look()["network cards"]
    assert finding["level"] == "error"
    assert finding["found"].startswith("1 of 2 device files can be opened in ")
    assert "vpc.amazonaws.com/efa" in finding["advice"]


def test_efa_without_its_plugin_means_tcp(look, add_card):
    add_card("rdmap0s6", **EFA)
    finding = look()["NCCL network"]
    assert finding["level"] == "warning"  # of a single node; between nodes it is an error
    assert finding["found"] == (
        "NCCL will use TCP and not EFA: the loader finds no plugin libnccl-net.so"
    )
    assert "aws-ofi-nccl" in finding["advice"]


def test_the_plugin_that_the_loader_finds_is_named(look, add_card, plugin):
    add_card("rdmap0s6", **EFA)
    shutil.copy(find_library(), plugin)
    finding = look()["NCCL network"]
    assert (finding["level"], finding["found"]) == ("ok", f"plugin {plugin}")


def test_a_damaged_plugin_means_tcp(look, add_card, plugin):
    add_card("rdmap0s6", **EFA)
    plugin.write_bytes(b"")
    finding = look()["NCCL network"]
    assert finding["level"] == "warning"
    assert finding["found"] == (
        f"NCCL will use TCP and not EFA: the plugin cannot be loaded ({plugin}: file too short)"
    )


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("FI_PROVIDER", "tcp", "FI_PROVIDER=tcp"),
        ("NCCL_NET", "Socket", "NCCL_NET=Socket"),
        ("NCCL_NET_PLUGIN", "none", "NCCL_NET_PLUGIN=none: no plugin"),
        (
            "NCCL_NET_PLUGIN",
            "spcx",
            "NCCL_NET_PLUGIN=spcx, and the loader finds no spcx or libnccl-net-spcx.so",
        ),
    ],
)
def test_a_variable_that_keeps_nccl_from_efa_is_named(
    look, add_card, plugin, monkeypatch, name, value, what
):
    add_card("rdmap0s6", **EFA)
    shutil.copy(find_library(), plugin)
    monkeypatch.setenv(name, value)
    finding = look()["NCCL network"]
    assert finding["level"] == "warning"
    assert finding["found"] == f"NCCL will use TCP and not EFA: {what}"


def test_a_plugin_is_found_by_its_short_name(look, add_card, plugin, monkeypatch):
    add_card("rdmap0s6", **EFA)
    shutil.copy(find_library(), plugin.with_name("libnccl-net-ofi.so"))
    monkeypatch.setenv("NCCL_NET_PLUGIN", "ofi")
    finding = look()["NCCL network"]
    assert finding["found"] == f"plugin {plugin.with_name('libnccl-net-ofi.so')}"


def test_infiniband_needs_no_plugin_and_can_be_switched_off(look, add_card, monkeypatch):
    add_card("mlx5_0", **INFINIBAND)
    monkeypatch.setattr(network, "ctypes", SimpleNamespace(CDLL=lambda name: name))
    finding = look()["NCCL network"]
    assert (finding["level"], finding["found"]) == ("ok", "NCCL's own InfiniBand verbs")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    finding = look()["NCCL network"]
    assert finding["level"] == "warning"
    assert finding["found"] == "NCCL will use TCP and not InfiniBand: NCCL_IB_DISABLE is set"


def test_infiniband_without_its_library_means_tcp(look, add_card, monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    add_card("mlx5_0", **INFINIBAND)
    monkeypatch.setattr(network, "ctypes", SimpleNamespace(CDLL=refuse))
    assert look()["NCCL network"]["found"] == (
        "NCCL will use TCP and not InfiniBand: libibverbs.so.1 cannot be loaded"
    )


def judge(*, seconds: float, network: str) -> Finding:
    """What 16 ranks on two nodes think of an all-reduce of 865,910,724 numbers."""
    flags = vars(parse([]))
    del flags["json"], flags["strict"]
    ranks = Ranks(rank=0, world_size=16, local_rank=0, local_world_size=8)
    job = Job(ranks=ranks, **flags)
    return judge_all_reduce(job, Reduced(seconds, network), num_values=865_910_724)


@pytest.mark.parametrize(
    ("seconds", "level", "share"), [(0.1, "ok", 65), (0.2, "warning", 32), (0.7, "error", 9)]
)
def test_an_all_reduce_is_compared_with_the_cards_of_a_node(
    monkeypatch, add_card, seconds, level, share
):
    for number in range(8):
        add_card(f"rdmap{number}s6", **EFA)
    finding = judge(seconds=seconds, network="AWS Libfabric")
    assert finding.level == level
    # 2 x 15 / 16 x 3.4636 GB in so many seconds, of 8 x 100 Gbit/s.
    assert f"bus bandwidth {1.875 * 0.865910724 * 4 / seconds:.3g} GB/s" in finding.found
    assert finding.found.endswith(f"nominal 100 GB/s (8 x EFA 100 Gbit/s), {share} % of it")
    assert "by NCCL's network AWS Libfabric" in finding.found


def test_tcp_beside_faster_cards_is_an_error_whatever_its_speed(monkeypatch, add_card):
    add_card("rdmap0s6", **EFA)
    finding = judge(seconds=0.001, network="Socket")
    assert finding.level == "error"
    assert finding.found.startswith("NCCL took TCP and not the faster cards; ")


def test_gpus_without_cards_use_tcp(look, set_gpus):
    set_gpus({})
    finding = look()["NCCL network"]
    assert finding["level"] == "ok"
    assert finding["found"] == "TCP; the loader finds no plugin libnccl-net.so"


def test_a_plugin_that_is_asked_for_and_missing_is_told_even_without_cards(
    look, set_gpus, monkeypatch
):
    set_gpus({})
    monkeypatch.setenv("NCCL_NET_PLUGIN", "spcx")
    finding = look()["NCCL network"]
    assert finding["level"] == "warning"
    assert finding["found"].startswith("TCP; NCCL_NET_PLUGIN=spcx, and the loader finds no ")
