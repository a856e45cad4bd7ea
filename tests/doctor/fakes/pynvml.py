"""NVML's Python package on a machine with the GPUs that FAKE_GPUS lists.

FAKE_GPUS is a JSON list; each GPU is what it differs in from an idle H100.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

NVML_NVLINK_MAX_LINKS = 18
nvmlMemory_v2 = 0x02000028
GIB = 1024**3

IDLE = {
    "name": "NVIDIA H100 80GB HBM3",
    "total_gib": 79.6,
    "used_gib": 0.0,
    "num_processes": 0,
    "num_links": 18,
    "num_ecc_errors": 0,
    "throttle_reasons": 0,
    "is_split": 0,
    "is_persistent": 1,
}


class NVMLError(Exception):
    """As NVML tells that something is not there."""


def _gpu(handle: int) -> dict[str, Any]:
    return {**IDLE, **_gpus()[handle]}


def _gpus() -> list[dict[str, Any]]:
    return json.loads(os.environ.get("FAKE_GPUS", "[]"))


def nvmlInit() -> None:
    """There is a driver if there are GPUs."""
    if not _gpus():
        raise NVMLError("Driver Not Loaded")


def nvmlSystemGetDriverVersion() -> str:
    """Of a data centre branch."""
    return "570.133.20"


def nvmlSystemGetCudaDriverVersion() -> int:
    """12080 is CUDA 12.8."""
    return int(os.environ.get("FAKE_CUDA", "12080"))


def nvmlDeviceGetCount() -> int:
    """All of the machine."""
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    """A handle is the GPU's number here."""
    if index >= len(_gpus()):
        raise NVMLError("Invalid Argument")
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    """GPU i has the UUID GPU-i."""
    if uuid not in [f"GPU-{index}" for index in range(len(_gpus()))]:
        raise NVMLError("Not Found")
    return int(uuid.removeprefix("GPU-"))


def nvmlDeviceGetIndex(handle: int) -> int:
    """The GPU's number."""
    return handle


def nvmlDeviceGetName(handle: int) -> str:
    """Its model."""
    return _gpu(handle)["name"]


def nvmlDeviceGetMemoryInfo(handle: int, version: int | None = None) -> SimpleNamespace:
    """In bytes."""
    gpu = _gpu(handle)
    return SimpleNamespace(total=gpu["total_gib"] * GIB, used=gpu["used_gib"] * GIB)


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    """As seen from outside of containers."""
    return [SimpleNamespace(pid=pid) for pid in range(_gpu(handle)["num_processes"])]


def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
    """The first ones are active; a GPU without NVLink does not know the question."""
    num_links = _gpu(handle)["num_links"]
    if num_links is None:
        raise NVMLError("Not Supported")
    return int(link < num_links)


def nvmlDeviceGetTotalEccErrors(handle: int, error_type: int, counter: int) -> int:
    """Uncorrected (1) since the driver was loaded (0)."""
    assert (error_type, counter) == (1, 0)
    return _gpu(handle)["num_ecc_errors"]


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:
    """As bits."""
    return _gpu(handle)["throttle_reasons"]


def nvmlDeviceGetMigMode(handle: int) -> list[int]:
    """Now, and after the next reset."""
    return [_gpu(handle)["is_split"]] * 2


def nvmlDeviceGetPersistenceMode(handle: int) -> int:
    """1 is on."""
    return _gpu(handle)["is_persistent"]
