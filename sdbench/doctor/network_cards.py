"""Checks of the network cards between nodes."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from sdbench.doctor.finding import ERROR, OK, SKIPPED, WARNING, Job, Seen, check

SYS_INFINIBAND = Path("/sys/class/infiniband")
DEV_INFINIBAND = Path("/dev/infiniband")
EFA = "EFA"


class Nic(NamedTuple):
    """A port of an RDMA network card; the state is the kernel's, e.g. ``ACTIVE``.

    The kind is ``EFA``, ``InfiniBand``, ``RoCE`` or the driver's name.
    """

    name: str
    kind: str
    state: str
    gbps: float


def read_nics() -> list[Nic]:
    """Return all RDMA ports of this node."""
    nics = []
    for port in sorted(SYS_INFINIBAND.glob("*/ports/*")):
        device = port.parents[1]
        driver = (device / "device/driver").resolve().name
        files = (port / name for name in ("link_layer", "state", "rate"))
        layer, state, rate = (file.read_text().strip() if file.exists() else "" for file in files)
        kind = EFA if driver == "efa" else {"Ethernet": "RoCE"}.get(layer, layer or driver)
        gbps = re.match(r"[\d.]+", rate)  # 100 Gb/sec (4X EDR)
        state = state.partition(": ")[2]  # 4: ACTIVE
        nics.append(Nic(device.name, kind, state, float(gbps[0]) if gbps else 0.0))
    return nics


@check(
    "network cards",
    "on a cloud, start nodes with EFA enabled; hand the devices to the container (docker run "
    "--device /dev/infiniband --ulimit memlock=-1, a limit vpc.amazonaws.com/efa or rdma/... "
    "in the pod, LimitMEMLOCK=infinity for slurmd); look at the cable of a port that is down; "
    "for EFA install aws-ofi-nccl where the loader finds it (LD_LIBRARY_PATH)",
)
def check_cards(job: Job) -> Seen:
    """Check that EFA or InfiniBand is present, up, and usable from this container."""
    nics = read_nics()
    if not nics:
        level = WARNING if job.ranks.num_nodes > 1 else SKIPPED
        yield level, "neither EFA nor InfiniBand: gradients travel over TCP between nodes"
        return
    kinds = Counter(f"{nic.kind} {nic.gbps:g} Gbit/s" for nic in nics if nic.state == "ACTIVE")
    active = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    yield OK, f"active: {active or 'none'}"
    for nic in nics:
        if nic.state != "ACTIVE":
            yield WARNING, f"{nic.name} is {nic.state or 'in an unknown state'}"
    num_devices = len({nic.name for nic in nics})
    files = DEV_INFINIBAND.glob("uverbs*")
    num_usable = sum(os.access(path, os.R_OK | os.W_OK) for path in files)
    if num_usable < num_devices:
        yield ERROR, f"{num_usable} of {num_devices} files of {DEV_INFINIBAND} can be opened"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY:
        yield WARNING, f"locked memory is limited to {limit // 1024} KiB"
    if any(nic.kind == EFA for nic in nics):
        plugin = os.environ.get("NCCL_NET_PLUGIN", "libnccl-net.so")
        # The files that NCCL tries for each name (src/plugin/plugin_open.cc).
        files = (file for name in plugin.split(",") for file in (name, f"libnccl-net-{name}.so"))
        if not any(map(_can_load, files)):
            level = ERROR if job.ranks.num_nodes > 1 else WARNING
            yield level, f"NCCL will use TCP: its plugin for EFA, {plugin}, cannot be loaded"


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
