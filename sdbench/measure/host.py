"""Asks the CPU and NVML, NVIDIA's library about GPUs, for facts that need no torch."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any


def read_cpu() -> tuple[str, tuple[str, ...]]:
    """Name of the CPU and flags that matter, from /proc/cpuinfo; elsewhere the name only."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine(), ()
    text = info.read_text()
    fields = dict(re.findall(r"^(model name|flags)\s*:\s*(.*)$", text, flags=re.MULTILINE))
    name = re.sub(r"\((R|TM)\)", "", fields.get("model name", platform.machine()))
    flags = set(fields.get("flags", "").split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")
    return " ".join(name.split()), tuple(flag for flag in wanted if flag in flags)


def open_nvml() -> Any | None:
    """The initialised module ``pynvml``, which opens no CUDA context; None without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """Call a function of NVML; None if the GPU, the driver or this pynvml does not support it."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, AttributeError, TypeError):
        return None
