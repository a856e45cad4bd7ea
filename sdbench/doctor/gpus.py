"""Checks of the GPUs by NVML, which opens no context: all processes on a GPU are others'."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.units import BYTES_PER_GIB
from sdbench.doctor.finding import ERROR, OK, SKIPPED, WARNING, Job, Seen, check
from sdbench.measure.gpu_monitor import CLOCK_REASONS, NORMAL_REASON
from sdbench.measure.host import ask, open_nvml

# The version of the running kernel's driver, which a container sees even without its GPUs.
KERNEL_DRIVER = Path("/sys/module/nvidia/version")
# Share of a GPU's memory that other processes may hold before a job that fills it does not fit.
MAX_SHARE_OF_OTHERS = 0.05
# A CUDA context alone takes about half of this.
MAX_IDLE_GIB = 1.0
# Values of CUDA_VISIBLE_DEVICES without a device; the last one is Slurm's.
NO_DEVICE = ("", "-1", "NoDevFiles")


class Gpu:
    """One GPU that this process may use."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.index: int = nvml.nvmlDeviceGetIndex(handle)
        self.name: str = nvml.nvmlDeviceGetName(handle)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer of ``nvmlDeviceGet<name>``, or None without one."""
        return ask(self._nvml, f"nvmlDeviceGet{name}", self._handle, *arguments)

    def read_memory_gib(self) -> tuple[float, float]:
        """Return used and total memory."""
        # The second version does not count what the driver keeps for itself.
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = self.ask("MemoryInfo", version) or self.ask("MemoryInfo")
        return memory.used / BYTES_PER_GIB, memory.total / BYTES_PER_GIB

    def bind_thread(self) -> None:
        """Let this thread run on the cores next to the GPU, where the system allows that."""
        ask(self._nvml, "nvmlDeviceSetCpuAffinity", self._handle)

    def count_links(self) -> int:
        """Return the number of active NVLink connections."""
        links = range(self._nvml.NVML_NVLINK_MAX_LINKS)
        return sum(bool(self.ask("NvLinkState", link)) for link in links)


def read_gpus() -> list[Gpu]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES; like CUDA, it stops at the first missing one."""
    nvml, gpus = open_nvml(), []
    if nvml is None:
        return []
    every = ",".join(map(str, range(ask(nvml, "nvmlDeviceGetCount") or 0)))
    for name in os.environ.get("CUDA_VISIBLE_DEVICES", every).split(","):
        by, key = ("Index", int(name)) if name.strip().isdecimal() else ("UUID", name.strip())
        handle = ask(nvml, f"nvmlDeviceGetHandleBy{by}", key)
        if handle is None:
            break
        gpus.append(Gpu(nvml, handle))
    return gpus


def find_gpu(uuid: str) -> Gpu | None:
    """Return the GPU with torch's UUID; torch and NVML may count GPUs in another order."""
    nvml = open_nvml()
    handle = None if nvml is None else ask(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    return None if handle is None else Gpu(nvml, handle)


def describe_gpus(gpus: Sequence[Gpu]) -> str:
    """Describe GPUs by model, e.g. ``8 x NVIDIA H200``."""
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{number} x {name}" for name, number in counts.items()) or "no GPU"


@check(
    "driver",
    "start the container with its GPUs (docker run --gpus all, a limit nvidia.com/gpu in the "
    "pod, --gpus-per-node in Slurm); install nvidia-ml-py, and torch for a CUDA that the "
    "driver knows; look into dmesg for Xid errors: a GPU may have to be reset",
)
def check_driver(job: Job) -> Seen:
    """Check that torch can use the driver."""
    nvml = open_nvml()
    if nvml is None and KERNEL_DRIVER.exists():
        version = KERNEL_DRIVER.read_text().strip()
        yield ERROR, f"the kernel has driver {version}, but NVML finds no GPU here"
        return
    if nvml is None:
        yield SKIPPED, "no NVIDIA driver: training runs on the CPU"
        return
    import torch

    if not torch.cuda.is_available():
        yield ERROR, "torch cannot use the GPUs"
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    found = (
        f"NVIDIA driver {nvml.nvmlSystemGetDriverVersion()} for CUDA up to "
        f"{cuda // 1000}.{cuda % 1000 // 10}, torch {torch.__version__} built for "
        f"{torch.version.cuda or 'the CPU'}"
    )
    yield OK, found


@check(
    "GPUs",
    "name GPUs that nvidia-smi lists, start a rank for each, end other processes (from inside "
    "a container only the host sees them), or drain the node if a GPU has been lost",
)
def check_gpus(job: Job) -> Seen:
    """Check that all GPUs are present and free of other processes."""
    gpus = read_gpus()
    yield OK if gpus else SKIPPED, describe_gpus(gpus)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        source = f"CUDA_VISIBLE_DEVICES={chosen}"
        num_given = sum(name.strip() not in NO_DEVICE for name in chosen.split(","))
    else:
        given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
        source, num_given = f"SLURM_GPUS_ON_NODE={given}", int(given) if given.isdecimal() else 0
    if num_given > len(gpus):
        yield ERROR, f"{source} gives the job {num_given} GPUs, and {len(gpus)} can be seen"
    # With a single one, the launcher may have bound each rank to a GPU of its own.
    if 1 < len(gpus) < job.ranks.local_world_size:
        yield ERROR, f"{job.ranks.local_world_size} ranks for {len(gpus)} GPUs"
    for gpu in gpus:
        used_gib, memory_gib = gpu.read_memory_gib()
        # Most containers hide other processes.
        num_others = len(gpu.ask("ComputeRunningProcesses") or ())
        is_full = used_gib > MAX_SHARE_OF_OTHERS * memory_gib
        if is_full or num_others or used_gib > MAX_IDLE_GIB:
            found = (
                f"GPU {gpu.index} has {used_gib:.1f} of {memory_gib:.1f} GiB in use by "
                f"{num_others or 'unseen'} other processes"
            )
            yield ERROR if is_full else WARNING, found


@check(
    "GPU health",
    "errors: reset the GPU, or drain the node (nvidia-smi -q -d ECC); slowed down: look at "
    "cooling and power; nvidia-smi -mig 0 and -pm 1 set the modes, on the host",
)
def check_gpu_health(job: Job) -> Seen:
    """Check memory errors, clocks, MIG and persistence mode of the GPUs."""
    gpus = read_gpus()
    yield OK if gpus else SKIPPED, "ECC errors, clocks, MIG, persistence" if gpus else "no GPU"
    for gpu in gpus:
        # nvml.h: NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC.
        if num_errors := gpu.ask("TotalEccErrors", 1, 0):
            yield ERROR, f"GPU {gpu.index} has {num_errors} uncorrected memory errors"
        reasons = gpu.ask("CurrentClocksThrottleReasons") or 0
        names = [name for bit, name in CLOCK_REASONS.items() if reasons & bit]
        if set(names) - {NORMAL_REASON}:
            yield WARNING, f"GPU {gpu.index} is slowed down: {', '.join(names)}"
        if (gpu.ask("MigMode") or [0])[0]:
            yield WARNING, f"GPU {gpu.index} is split by MIG"
        if gpu.ask("PersistenceMode") == 0:
            yield WARNING, f"GPU {gpu.index} is not in persistence mode: each run loads the driver"


@check(
    "NVLink",
    "run nvidia-smi nvlink --status, start nvidia-fabricmanager, of the driver's version, on "
    "the host, or drain the node",
)
def check_nvlink(job: Job) -> Seen:
    """Check that all GPUs of this node have the same number of NVLink connections."""
    gpus = read_gpus()
    if len(gpus) < 2:
        yield SKIPPED, "fewer than two GPUs"
        return
    links = {gpu.index: gpu.count_links() for gpu in gpus}
    most = max(links.values())
    yield OK, f"{most} connections active on each GPU" if most else "none: gradients go over PCIe"
    fewer = [str(index) for index, number in links.items() if number < most]
    if fewer:
        yield ERROR, f"fewer NVLink connections on GPU {', '.join(fewer)}"
