"""Reads facts of the machine and its device: names, memory, peak rates, driver."""

from __future__ import annotations

import dataclasses
import platform
import re
import resource
from typing import Any

import sdbench
from sdbench.base.errors import ConfigError
from sdbench.base.units import BYTES_PER_GIB
from sdbench.measure.host import ask, open_nvml, read_cpu
from sdbench.record.formulas import peak_tflops

# torch.cuda.mem_get_info opens a CUDA context, about half a GiB on Hopper.
CUDA_CONTEXT_GIB = 0.5


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hardware of a machine, without its host name, since records are public. Unknown is None.

    Attributes:
        device_type: ``cuda`` or ``cpu``.
        num_devices: GPUs of this machine, or 1 for the CPU.
        device_memory_gib: Memory of one GPU, or of the whole machine on a CPU.
        free_memory_gib: Device memory that no process uses.
        held_memory_gib: Device memory that this process uses.
        num_cpu_cores: Cores that this process may run on.
        cpu_flags: Vector instruction sets that matter to training.
        cudnn_version: 91501 is 9.15.1. None on a CPU.
    """

    device_type: str
    device_name: str
    num_devices: int
    device_memory_gib: float
    free_memory_gib: float
    held_memory_gib: float
    num_cpu_cores: int
    cpu_name: str
    memory_gib: float
    cpu_flags: tuple[str, ...]
    platform: str
    compute_capability: str | None = None
    driver: str | None = None
    cudnn_version: int | None = None

    @property
    def slug(self) -> str:
        """The hardware as part of a file name, e.g. ``8x-nvidia-h100-80gb-hbm3``."""
        count = (
            f"{self.num_cpu_cores}-core" if self.device_type == "cpu" else f"{self.num_devices}x"
        )
        return f"{count}-{re.sub(r'[^a-z0-9]+', '-', self.device_name.lower()).strip('-')}"

    def supported_precisions(self) -> tuple[str, ...]:
        """Values of --precision that this device supports."""
        if self.device_type == "cpu":
            return ("fp32", "amp_bf16", "bf16")
        # bf16 and tf32 came to NVIDIA GPUs with compute capability 8.0 (Ampere).
        is_ampere = self.compute_capability is None or float(self.compute_capability) >= 8.0
        return ("fp32", "amp_fp16", *(("tf32", "amp_bf16", "bf16") if is_ampere else ()))

    @property
    def has_fast_bf16(self) -> bool:
        """Whether the device has instructions for bf16 matrix products."""
        if self.device_type == "cpu":
            return bool({"avx512_bf16", "amx_bf16"} & set(self.cpu_flags))
        return "amp_bf16" in self.supported_precisions()

    def fast_dtype(self, device_type: str, *, on_ray: bool) -> str:
        """The smallest type in which encoders are known to be fast on ``cpu`` or ``cuda``.

        `on_ray`: they may run on other machines of a cluster, whose GPUs are unknown but all have
        fp16, and whose CPUs are taken to be like this one's.
        """
        is_known = device_type == self.device_type and not (on_ray and device_type == "cuda")
        if is_known and self.has_fast_bf16:
            return "bf16"
        return "fp16" if device_type == "cuda" else "fp32"

    def peak_tflops(self, precision: str) -> float | None:
        """Peak TFLOP/s of dense matrix products on one device, if it is known."""
        return peak_tflops(self.device_name, precision)


def inspect_machine(*, local_rank: int = 0) -> Machine:
    """Inspect the machine that this process runs on."""
    import psutil
    import torch

    memory = psutil.virtual_memory()
    cpu_name, cpu_flags = read_cpu()
    facts: dict[str, Any] = {
        "device_type": "cpu",
        "device_name": cpu_name,
        "num_devices": 1,
        "device_memory_gib": memory.total / BYTES_PER_GIB,
        "free_memory_gib": memory.available / BYTES_PER_GIB,
        "held_memory_gib": psutil.Process().memory_info().rss / BYTES_PER_GIB,
        "num_cpu_cores": sdbench.NUM_CPUS,
        "cpu_name": cpu_name,
        "memory_gib": memory.total / BYTES_PER_GIB,
        "cpu_flags": cpu_flags,
        "platform": f"{platform.system()}-{platform.machine()}",
    }
    if torch.cuda.is_available():
        free_bytes, total_bytes = torch.cuda.mem_get_info(local_rank)
        nvml = open_nvml()
        facts |= {
            "device_type": "cuda",
            "device_name": torch.cuda.get_device_name(local_rank),
            "num_devices": torch.cuda.device_count(),
            "device_memory_gib": total_bytes / BYTES_PER_GIB,
            "free_memory_gib": free_bytes / BYTES_PER_GIB,
            "held_memory_gib": CUDA_CONTEXT_GIB,
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(local_rank))),
            "driver": None if nvml is None else ask(nvml, "nvmlSystemGetDriverVersion"),
            "cudnn_version": torch.backends.cudnn.version(),
        }
    return Machine(**facts)


def check_gpu_code(machine: Machine) -> None:
    """Raise ConfigError for a GPU that the installed torch has no code for.

    Code for sm_XY runs on GPUs of the same X with this Y or a larger one, sm_XYa on sm_XY alone;
    compute_XY is compiled by the driver for any GPU from sm_XY on.
    """
    import torch

    built_for = torch.cuda.get_arch_list() if machine.device_type == "cuda" else []
    code = re.findall(r"(sm|compute)_(\d+)(\d)(a?)", " ".join(built_for))
    if machine.compute_capability is None or not code:  # as with AMD's gfx942
        return
    gpu = tuple(map(int, machine.compute_capability.split(".")))
    for kind, major, minor, is_of_one_gpu in code:
        built = (int(major), int(minor))
        is_later = built <= gpu and (kind == "compute" or built[0] == gpu[0])
        if built == gpu or (is_later and not is_of_one_gpu):
            return
    raise ConfigError(
        "this torch has no code for the GPU",
        value=f"{machine.device_name} (sm_{gpu[0]}{gpu[1]})",
        allowed=f"{', '.join(built_for)} with torch {torch.__version__}; "
        "TORCH=2.7 installs sm_50 to sm_90, TORCH=2.11 sm_75 to sm_120",
        flag=f"`make benchmark TORCH={'2.11' if gpu >= (7, 5) else '2.7'}`",
    )


def peak_memory_gib() -> float:
    """Peak memory in GiB: what torch has reserved on a GPU, or resident memory on a CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / BYTES_PER_GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / BYTES_PER_GIB  # KiB on Linux


def as_dict(machine: Machine) -> dict[str, Any]:
    """The machine for a record, sizes rounded to a hundredth of a GiB."""
    return {
        key: round(value, 2) if isinstance(value, float) else value
        for key, value in dataclasses.asdict(machine).items()
    } | {"slug": machine.slug}
