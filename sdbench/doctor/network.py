"""Checks of the network between nodes: its cards, and whether NCCL will use them."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from sdbench.doctor.finding import ERROR, OK, SKIPPED, WARNING, Check, Job, Seen

SYS_INFINIBAND = Path("/sys/class/infiniband")
DEV_INFINIBAND = Path("/dev/infiniband")
EFA = "EFA"


class Nic(NamedTuple):
    """One port of a network card that can write into another machine's memory.

    Attributes:
        name: Of the device, e.g. ``mlx5_0``.
        kind: ``EFA``, ``InfiniBand``, ``RoCE`` or the driver's name.
        state: As the kernel tells it, e.g. ``ACTIVE``.
        gbps: Its rate in Gbit/s.
    """

    name: str
    kind: str
    state: str
    gbps: float


def read_nics() -> list[Nic]:
    """All such ports of this node."""
    nics = []
    for port in sorted(SYS_INFINIBAND.glob("*/ports/*")):
        device = port.parents[1]
        driver = (device / "device/driver").resolve().name
        layer, state, rate = (_read(port / name) for name in ("link_layer", "state", "rate"))
        kind = EFA if driver == "efa" else {"Ethernet": "RoCE"}.get(layer, layer or driver)
        gbps = re.match(r"[\d.]+", rate)  # 100 Gb/sec (4X EDR)
        state = state.partition(": ")[2]  # 4: ACTIVE
        nics.append(Nic(device.name, kind, state, float(gbps[0]) if gbps else 0.0))
    return nics


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def find_active_nics() -> list[Nic]:
    """The ports that are up."""
    return [nic for nic in read_nics() if nic.state == "ACTIVE"]


def describe_nics(nics: list[Nic]) -> str:
    """The ports by kind and rate, e.g. ``32 x EFA 100 Gbit/s``."""
    counts = Counter(f"{nic.kind} {nic.gbps:g} Gbit/s" for nic in nics)
    return ", ".join(f"{number} x {kind}" for kind, number in counts.items()) or "none"


def check_cards(job: Job) -> Seen:
    """Whether EFA or InfiniBand is there, up, and handed to this container."""
    nics = read_nics()
    if not nics:
        level = WARNING if job.ranks.num_nodes > 1 else SKIPPED
        yield level, "neither EFA nor InfiniBand: between nodes gradients travel over TCP"
        return
    yield OK, f"active: {describe_nics(find_active_nics())}"
    for nic in nics:
        if nic.state != "ACTIVE":
            yield WARNING, f"{nic.name} is {nic.state or 'in no known state'}"
    num_devices = len({nic.name for nic in nics})
    files = DEV_INFINIBAND.glob("uverbs*")
    num_usable = sum(os.access(path, os.R_OK | os.W_OK) for path in files)
    if num_usable < num_devices:
        yield ERROR, f"{num_usable} of {num_devices} files of {DEV_INFINIBAND} can be opened"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY:
        yield WARNING, f"locked memory is limited to {limit // 1024} KiB"


def check_nccl(job: Job) -> Seen:
    """Whether NCCL's settings and libraries let it use the fastest network of this node."""
    import psutil

    nics = find_active_nics()
    yield OK, describe_nics(nics) if nics else "TCP"
    interfaces = psutil.net_if_addrs()
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        given = os.environ.get(variable, "^")
        # NCCL takes prefixes; ^ excludes some, = asks for exact names.
        names = tuple(given.removeprefix("=").split(","))
        if given[:1] != "^" and not any(real.startswith(names) for real in interfaces):
            yield ERROR, f"{variable}={given}, and this node has {', '.join(interfaces)}"
    reason = _why_tcp(nics)
    if reason is not None:
        yield ERROR if job.ranks.num_nodes > 1 else WARNING, f"NCCL will use TCP: {reason}"


def _why_tcp(nics: list[Nic]) -> str | None:
    """What keeps NCCL from EFA or InfiniBand; None if nothing does."""
    if not nics:
        return None
    is_efa = any(nic.kind == EFA for nic in nics)
    plugin = os.environ.get("NCCL_NET_PLUGIN", "libnccl-net.so")
    # The files that NCCL tries for a name of a plugin (src/plugin/plugin_open.cc).
    files = (file for name in plugin.split(",") for file in (name, f"libnccl-net-{name}.so"))
    has_plugin = plugin != "none" and any(map(_can_load, files))
    provider = os.environ.get("FI_PROVIDER", "efa")
    if os.environ.get("NCCL_NET", "").lower() == "socket":
        return "NCCL_NET=Socket"
    if is_efa and not has_plugin:
        return f"NCCL's plugin {plugin} cannot be loaded"
    if is_efa and "efa" not in provider.split(","):
        return f"FI_PROVIDER={provider}"
    if not has_plugin and os.environ.get("NCCL_IB_DISABLE", "0") != "0":
        return "NCCL_IB_DISABLE is set"
    if not has_plugin and not _can_load("libibverbs.so.1"):
        return "libibverbs.so.1 cannot be loaded"
    return None


def _can_load(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


CHECKS = (
    Check(
        "network cards",
        check_cards,
        "on a cloud, start nodes with EFA enabled; hand the devices to the container (docker run "
        "--device /dev/infiniband --ulimit memlock=-1, a limit vpc.amazonaws.com/efa or rdma/... "
        "in the pod, LimitMEMLOCK=infinity for slurmd); look at the cable of a port that is down",
    ),
    Check(
        "NCCL network",
        check_nccl,
        "unset the variable that is named; for EFA install aws-ofi-nccl and libfabric (AWS's EFA "
        "installer has both) where the loader finds them (LD_LIBRARY_PATH, /etc/ld.so.conf.d), "
        "for InfiniBand libibverbs1",
    ),
)
