"""Are the GPUs there, free, linked to each other, and can torch use them?

NVML answers, which opens no context on a GPU: what is seen on it belongs to others.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sdbench.doctor.finding import (
    BYTES_PER_GIB,
    ERROR,
    OK,
    Finding,
    error,
    join,
    number_of,
    ok,
    skipped,
    warning,
)

if TYPE_CHECKING:
    from sdbench.doctor.job import Job

# Of the running kernel, which a container sees even if it was not given the GPUs.
KERNEL_DRIVER = Path("/sys/module/nvidia/version")
# Others' share of a GPU's memory from which on a job that fills it does not fit.
MAX_SHARE_OF_OTHERS = 0.05
# More than this is taken by somebody, even if no process is seen: a context alone takes about half.
MAX_IDLE_GIB = 1.0
# How CUDA_VISIBLE_DEVICES says that there is none; the last one is Slurm's.
NO_DEVICE = ("", "-1", "NoDevFiles")
# nvml.h, NVML_GPU_FABRIC_STATE_*: what the fabric manager of NVSwitches has not finished.
UNFINISHED_FABRIC = {1: "not started", 2: "in progress"}
# GB/s in one direction, half of what the data sheets of V100, A100, H100, H200 and B200 state as
# the total of both: 300, 600, 900, 900 and 1800 GB/s.
NVLINK_GB_PER_S = {
    "Tesla V100-SXM2-16GB": 150.0,
    "Tesla V100-SXM2-32GB": 150.0,
    "NVIDIA A100-SXM4-40GB": 300.0,
    "NVIDIA A100-SXM4-80GB": 300.0,
    "NVIDIA H100 80GB HBM3": 450.0,
    "NVIDIA H200": 450.0,
    "NVIDIA B200": 900.0,
}


class Gpu(NamedTuple):
    """One GPU that this process may use.

    Attributes:
        index: Its number as nvidia-smi counts.
        name: Its model.
        memory_gib: Its memory.
        used_gib: What of it is taken.
        num_processes: Processes that compute on it; none are seen from inside most containers.
        num_links: Active NVLink connections; None where it has no NVLink.
        fabric_state: Of the fabric manager, as NVML numbers it; None where there is none.
    """

    index: int
    name: str
    memory_gib: float
    used_gib: float
    num_processes: int
    num_links: int | None
    fabric_state: int | None


def open_nvml() -> Any | None:
    """NVML, ready to be asked; None without its Python package, without a driver or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml if pynvml.nvmlDeviceGetCount() else None
    except pynvml.NVMLError:
        return None


def count_gpus() -> int:
    """GPUs that this process may use."""
    nvml = open_nvml()
    return 0 if nvml is None else len(_visible_handles(nvml))


def describe_gpus() -> str:
    """The GPUs that this process may use, e.g. ``8 x NVIDIA H200``."""
    nvml = open_nvml()
    if nvml is None:
        return "no GPU"
    counts = Counter(nvml.nvmlDeviceGetName(handle) for handle in _visible_handles(nvml))
    return ", ".join(f"{number} x {name}" for name, number in counts.items()) or "no GPU"


def nvlink_gb_per_s() -> float | None:
    """Nominal speed of NVLink in GB/s and one direction; None where it is not known or not used."""
    gpus = _read_gpus(open_nvml())
    if not gpus or not all(gpu.num_links for gpu in gpus):
        return None
    return NVLINK_GB_PER_S.get(gpus[0].name)


def check_driver(job: Job) -> Finding:
    """Whether torch and the driver go together."""
    nvml = open_nvml()
    if nvml is None:
        return _explain_missing_driver()
    import torch

    driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion()
    found = (
        f"NVIDIA driver {driver} for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}, "
        f"torch {torch.__version__} built for {torch.version.cuda or 'the CPU'}"
    )
    if torch.cuda.is_available():
        return ok(found)
    if torch.version.cuda is None:
        advice = "install the build of torch for CUDA: pip install -r requirements.txt"
    elif int(torch.version.cuda.split(".")[0]) > cuda // 1000:
        advice = "install a newer driver, or torch built for the driver's CUDA"
    else:
        advice = "run nvidia-smi, and look into dmesg for Xid errors: a GPU may have to be reset"
    return error(f"torch cannot use the GPUs: {found}", advice)


def _explain_missing_driver() -> Finding:
    if not KERNEL_DRIVER.exists():
        return skipped("no NVIDIA driver: training runs on the CPU")
    return error(
        f"the kernel has NVIDIA's driver {KERNEL_DRIVER.read_text().strip()}, and no GPU can be "
        "asked about from here",
        "start the container with its GPUs (docker run --gpus all, a limit nvidia.com/gpu in the "
        "pod, --gpus-per-node in Slurm), and install nvidia-ml-py",
    )


def check_gpus(job: Job) -> Finding:
    """Whether all GPUs are there, and nobody else is on them."""
    nvml = open_nvml()
    if nvml is None:
        number = _check_number(0, job)
        return number if number.level == ERROR else skipped("no GPU is seen")
    gpus = _read_gpus(nvml)
    if not gpus:
        return error(
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')} leaves none of the "
            f"{nvml.nvmlDeviceGetCount()} GPUs",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi lists",
        )
    findings = [_check_number(len(gpus), job), *map(_check_free, gpus)]
    bad = [finding for finding in findings if finding.level != OK]
    return join([*bad, ok(describe_gpus())]) if bad else ok(f"{describe_gpus()}, all free")


def _check_number(num_gpus: int, job: Job) -> Finding:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if chosen is not None:
        names = [name for name in chosen.split(",") if name.strip() not in NO_DEVICE]
        source, num_given = f"CUDA_VISIBLE_DEVICES={chosen}", len(names)
    else:
        source = f"SLURM_GPUS_ON_NODE={given}"
        num_given = int(given) if given.isdecimal() else 0
    if num_given > num_gpus:
        return error(
            f"{source} gives the job {number_of(num_given, 'GPU')}, and {num_gpus} can be seen",
            "drain the node if a GPU has been lost (nvidia-smi, dmesg)",
        )
    # A single one is what a launcher shows to each rank that it binds to a GPU of its own.
    if 1 < num_gpus < job.ranks.local_world_size:
        return error(
            f"{job.ranks.local_world_size} ranks for {num_gpus} GPUs",
            f"start {num_gpus} ranks on each node",
        )
    return ok("")


def _check_free(gpu: Gpu) -> Finding:
    taken = f"GPU {gpu.index} has {gpu.used_gib:.1f} of {gpu.memory_gib:.1f} GiB taken"
    by = f" by {number_of(gpu.num_processes, 'other process')}" if gpu.num_processes else ""
    if gpu.used_gib > MAX_SHARE_OF_OTHERS * gpu.memory_gib:
        return error(
            taken + by,
            "end the other processes (nvidia-smi lists them; from inside a container only the "
            "host sees them), or use other GPUs (CUDA_VISIBLE_DEVICES)",
        )
    if gpu.num_processes or gpu.used_gib > MAX_IDLE_GIB:
        return warning(
            taken + by, "end the other processes: they would share the GPU with what is measured"
        )
    return ok("")


def check_nvlink(job: Job) -> Finding:
    """Whether the GPUs of this node are linked alike."""
    gpus = _read_gpus(open_nvml())
    if len(gpus) < 2:
        return skipped("fewer than two GPUs")
    unfinished = [gpu for gpu in gpus if gpu.fabric_state in UNFINISHED_FABRIC]
    if unfinished:
        state = UNFINISHED_FABRIC[unfinished[0].fabric_state]
        return error(
            f"the NVSwitch fabric is {state} on {_name_gpus(unfinished)}",
            "start the service nvidia-fabricmanager, of the driver's version, on the host",
        )
    most = max(gpu.num_links or 0 for gpu in gpus)
    fewer = [gpu for gpu in gpus if (gpu.num_links or 0) < most]
    if fewer:
        return error(
            f"fewer NVLink connections than the {most} of the others: {_name_gpus(fewer)}",
            "run nvidia-smi nvlink --status, and drain the node",
        )
    if not most:
        return ok("none: the GPUs exchange gradients over PCIe")
    return ok(f"{most} connections active on each GPU")


def _name_gpus(gpus: list[Gpu]) -> str:
    return f"GPU {', '.join(str(gpu.index) for gpu in gpus)}"


def _read_gpus(nvml: Any | None) -> list[Gpu]:
    return [] if nvml is None else [_read_gpu(nvml, handle) for handle in _visible_handles(nvml)]


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    # The second version does not count what the driver keeps for itself.
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, getattr(nvml, "nvmlMemory_v2", None))
    memory = memory or nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=nvml.nvmlDeviceGetIndex(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_gib=memory.total / BYTES_PER_GIB,
        used_gib=memory.used / BYTES_PER_GIB,
        num_processes=len(_ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()),
        num_links=_count_links(nvml, handle),
        fabric_state=_read_fabric_state(nvml, handle),
    )


def _count_links(nvml: Any, handle: Any) -> int | None:
    states = [
        _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
    ]
    known = [state for state in states if state is not None]
    return sum(known) if known else None


def _read_fabric_state(nvml: Any, handle: Any) -> int | None:
    import ctypes

    if not hasattr(nvml, "c_nvmlGpuFabricInfo_t"):
        return None
    info = nvml.c_nvmlGpuFabricInfo_t()
    answer = _ask(nvml, "nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info))
    return None if answer is None else info.state


def _visible_handles(nvml: Any) -> list[Any]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; like CUDA, none behind one that is not there."""
    num_gpus = nvml.nvmlDeviceGetCount()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(num_gpus)]
    handles = []
    for name in chosen.split(","):
        if name.strip().isdecimal() and int(name) < num_gpus:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        else:
            handle = _ask(nvml, "nvmlDeviceGetHandleByUUID", name.strip())
            if handle is None:
                break
            handles.append(handle)
    return handles


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """An answer of NVML, or None from a GPU, a driver or a version of pynvml without it."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, AttributeError, TypeError):
        return None
