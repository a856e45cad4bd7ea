"""NVML's Python package on a machine with the GPUs that FAKE_GPUS lists.

FAKE_GPUS is a JSON list; each GPU is what it answers differently from an idle H100.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

NVML_NVLINK_MAX_LINKS = 18
GIB = 1024**3

# The answers of nvmlDeviceGet<name>; of memory and links that what they are made of.
IDLE = {
    "Name": "NVIDIA H100 80GB HBM3",
    "used_gib": 0.0,
    "ComputeRunningProcesses": [],
    "num_links": 18,
    "TotalEccErrors": 0,
    "CurrentClocksThrottleReasons": 0,
    "MigMode": [0, 0],
    "PersistenceMode": 1,
    "Serial": "1650922000007",
}


class NVMLError(Exception):
    """As NVML tells that something is not there."""


def _gpus() -> list[dict[str, Any]]:
    gpus = json.loads(os.environ.get("FAKE_GPUS", "[]"))
    return [{**IDLE, "Index": index, **gpu} for index, gpu in enumerate(gpus)]


def nvmlInit() -> None:
    """There is a driver if there are GPUs."""
    if not _gpus():
        raise NVMLError("Driver Not Loaded")


def nvmlSystemGetDriverVersion() -> str:
    """Of a data centre branch."""
    return "570.133.20"


def nvmlSystemGetCudaDriverVersion() -> int:
    """CUDA 12.8."""
    return 12080


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
    return nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-")))


def nvmlDeviceGetMemoryInfo(handle: int, version: int | None = None) -> SimpleNamespace:
    """In bytes."""
    return SimpleNamespace(total=79.6 * GIB, used=_gpus()[handle]["used_gib"] * GIB)


def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
    """The first ones are active; a GPU without NVLink does not know the question."""
    num_links = _gpus()[handle]["num_links"]
    if num_links is None:
        raise NVMLError("Not Supported")
    return int(link < num_links)


def __getattr__(name: str) -> Callable[..., Any]:
    field = name.removeprefix("nvmlDeviceGet")
    if field not in (*IDLE, "Index"):
        raise AttributeError(name)

    def answer(handle: int, *arguments: int) -> Any:
        # Uncorrected errors (1) since the driver was loaded (0).
        assert arguments == ((1, 0) if field == "TotalEccErrors" else ())
        return _gpus()[handle][field]

    return answer
