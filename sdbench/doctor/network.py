"""Which network is there between the nodes, and will NCCL use it?"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from sdbench.doctor.finding import ERROR, OK, SKIPPED, Finding, error, join, ok, skipped, warning
from sdbench.doctor.gpus import count_gpus
from sdbench.doctor.job import Job

SYS_INFINIBAND = Path("/sys/class/infiniband")
DEV_INFINIBAND = Path("/dev/infiniband")
# linux/capability.h
CAP_IPC_LOCK = 14
# A margin for what a rank opens by itself (libraries, logs, pipes), not a measurement.
OWN_OPEN_FILES = 256
LOAD_TIMEOUT_S = 20.0
# Image and token ids travel from a loader process to its rank as one file descriptor each.
TENSORS_PER_BATCH = 2

EFA = "EFA"

# Loads the first library that can be loaded, as NCCL does, in a process of its own: a plugin may
# start threads or crash. Prints the file that it was, and why the ones before it were not.
LOAD = """
import ctypes, json, os, sys
errors = {}
for name in sys.argv[1:]:
    before = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps")}
    try:
        ctypes.CDLL(name)
    except OSError as error:
        errors[name] = str(error)
        continue
    after = [line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps")]
    loaded = [path for path in after if path.startswith("/") and path not in before]
    stem = os.path.basename(name).split(".so")[0]
    own = [path for path in loaded if os.path.basename(path).startswith(stem)]
    print(json.dumps({"path": (own or loaded or [name])[0], "errors": errors}))
    sys.exit()
print(json.dumps({"path": None, "errors": errors}))
"""


class Nic(NamedTuple):
    """One port of a network card that can write into another machine's memory.

    Attributes:
        name: Device and port, e.g. ``mlx5_0 port 1``.
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
    return [
        _read_nic(device, port)
        for device in sorted(SYS_INFINIBAND.glob("*"))
        for port in sorted(device.glob("ports/*"))
    ]


def _read_nic(device: Path, port: Path) -> Nic:
    driver = (device / "device/driver").resolve().name
    layer = _read(port / "link_layer")
    kind = EFA if driver == "efa" else {"Ethernet": "RoCE"}.get(layer, layer or driver)
    rate = re.match(r"[\d.]+", _read(port / "rate"))  # 100 Gb/sec (4X EDR)
    return Nic(
        name=f"{device.name} port {port.name}",
        kind=kind,
        state=_read(port / "state").partition(": ")[2],  # 4: ACTIVE
        gbps=float(rate[0]) if rate else 0.0,
    )


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
    return ", ".join(f"{number} x {kind}" for kind, number in counts.items())


def check_fabric(job: Job) -> Finding:
    """Whether EFA or InfiniBand is there, up, and handed to this container."""
    nics = read_nics()
    if not nics:
        if job.ranks.num_nodes > 1:
            return warning(
                "neither EFA nor InfiniBand: gradients travel over TCP",
                "on a cloud, start nodes with EFA enabled; in a pod, ask for its network devices",
            )
        return skipped("neither EFA nor InfiniBand")
    down = [nic for nic in nics if nic.state != "ACTIVE"]
    active = [nic for nic in nics if nic.state == "ACTIVE"]
    findings = [ok(f"{describe_nics(active)} active")] if active else []
    findings += [
        warning(
            f"{nic.name} is {nic.state or 'in no known state'}",
            "have the cable and the switch port looked at, or leave the device out with "
            "NCCL_IB_HCA",
        )
        for nic in down
    ]
    return join([*findings, _check_device_files(nics)])


def _check_device_files(nics: list[Nic]) -> Finding:
    num_devices = len({nic.name.split()[0] for nic in nics})
    files = sorted(DEV_INFINIBAND.glob("uverbs*"))
    usable = [path for path in files if os.access(path, os.R_OK | os.W_OK)]
    if len(usable) >= num_devices:
        return ok(f"{len(usable)} device files")
    return error(
        f"{len(usable)} of {num_devices} device files can be opened in {DEV_INFINIBAND}",
        "hand the devices to the container: docker run --device /dev/infiniband, or a limit "
        "vpc.amazonaws.com/efa or rdma/... in the pod",
    )


def check_nccl_network(job: Job) -> Finding:
    """Which network NCCL will use between nodes: a plugin, its own InfiniBand, or TCP."""
    nics = find_active_nics()
    if not nics and not count_gpus():
        return skipped("no GPU: gloo over TCP")
    plugin = load_plugin(os.environ.get("NCCL_NET_PLUGIN"))
    if not nics:
        found = f"TCP; {plugin.found}"
        return warning(found, plugin.advice) if plugin.level == ERROR else ok(found)
    reason = _why_tcp(nics, plugin)
    if reason is None:
        return ok(plugin.found if plugin.level == OK else "NCCL's own InfiniBand verbs")
    what, advice = reason
    judge = error if job.ranks.num_nodes > 1 else warning
    return judge(f"NCCL will use TCP and not {nics[0].kind}: {what}", advice)


def _why_tcp(nics: list[Nic], plugin: Finding) -> tuple[str, str] | None:
    """What keeps NCCL from the fast network, with advice; None if nothing does."""
    if os.environ.get("NCCL_NET", "").lower() == "socket":
        return "NCCL_NET=Socket", "unset NCCL_NET"
    if any(nic.kind == EFA for nic in nics):
        if plugin.level != OK:
            return plugin.found, plugin.advice
        provider = os.environ.get("FI_PROVIDER", "efa")
        if "efa" not in provider.split(","):
            return f"FI_PROVIDER={provider}", "unset FI_PROVIDER, or set it to efa"
        return None
    if plugin.level == OK:
        return None
    if os.environ.get("NCCL_IB_DISABLE", "0") != "0":
        return "NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "libibverbs.so.1 cannot be loaded", "install libibverbs1 in the image"
    return None


def load_plugin(wanted: str | None) -> Finding:
    """Load the network plugin that NCCL would load.

    Args:
        wanted: Value of NCCL_NET_PLUGIN: names or files separated by commas, or ``none``.

    Returns:
        ok with the file; skipped where there is none; an error for one that cannot be loaded.
    """
    if wanted == "none":
        return Finding(SKIPPED, "NCCL_NET_PLUGIN=none: no plugin", "unset NCCL_NET_PLUGIN")
    names = [name for part in (wanted or "libnccl-net.so").split(",") for name in spell_out(part)]
    completed = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=LOAD_TIMEOUT_S,
    )
    if completed.returncode != 0:
        return error(
            f"loading the plugin of NCCL ends with exit code {completed.returncode}",
            "install a plugin that fits this NCCL and this libfabric",
        )
    answer = json.loads(completed.stdout.splitlines()[-1])
    if answer["path"] is not None:
        return ok(f"plugin {answer['path']}")
    broken = {
        name: reason
        for name, reason in answer["errors"].items()
        if not reason.startswith(f"{name}: cannot open shared object file: No such file")
    }
    install = (
        "install aws-ofi-nccl and libfabric for EFA (AWS's EFA installer has both), and put their "
        "folders on LD_LIBRARY_PATH or into /etc/ld.so.conf.d"
    )
    if broken:
        return error(f"the plugin cannot be loaded ({next(iter(broken.values()))})", install)
    if wanted:
        return error(
            f"NCCL_NET_PLUGIN={wanted}, and the loader finds no {' or '.join(names)}",
            f"unset NCCL_NET_PLUGIN, or {install}",
        )
    return Finding(SKIPPED, "the loader finds no plugin libnccl-net.so", install)


def spell_out(name: str) -> list[str]:
    """The files that NCCL tries for a name of a plugin, in order (src/plugin/plugin_open.cc)."""
    if "/" in name or (name.startswith("lib") and name.endswith(".so")):
        return [name]
    return [name, f"libnccl-net-{name}.so"]


def check_limits(job: Job) -> Finding:
    """Whether the limits of a process are high enough for the network cards and the loaders."""
    return join([_check_locked_memory(), _check_open_files(job)])


def _check_locked_memory() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory unlimited")
    found = f"locked memory {limit // 1024} KiB"
    if not read_nics() or _may_lock_anyway():
        return ok(found)
    return error(
        f"{found}: network cards cannot be given memory to write to",
        "docker run --ulimit memlock=-1; in Slurm LimitMEMLOCK=infinity for slurmd; else `* - "
        "memlock unlimited` in /etc/security/limits.conf",
    )


def _may_lock_anyway() -> bool:
    """Whether this process has the capability that the limit does not bind."""
    capabilities = re.search(r"^CapEff:\s*(\w+)$", _read(Path("/proc/self/status")), re.MULTILINE)
    return capabilities is not None and bool(int(capabilities[1], 16) >> CAP_IPC_LOCK & 1)


def _check_open_files(job: Job) -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_batches = (job.model.num_workers if job.model else 0) * (job.prefetch_factor + 1)
    # gloo connects each rank with every other one.
    needed = OWN_OPEN_FILES + job.num_ranks + TENSORS_PER_BATCH * num_batches
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ok(
            "open files unlimited" if limit == resource.RLIM_INFINITY else f"{limit} open files"
        )
    return warning(
        f"{limit} open files, and a rank of this job may need {needed}",
        f"ulimit -n {max(needed, 4096)}; docker run --ulimit nofile=65536",
    )
