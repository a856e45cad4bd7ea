"""Access to NVML, NVIDIA's library about the GPUs of a machine, which opens no CUDA context."""

from __future__ import annotations

from typing import Any


def open_nvml() -> Any | None:
    """The initialised module ``pynvml``; None without the package or without a driver."""
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
    """Call a function of NVML; None where a GPU, the driver or this pynvml has no answer."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, AttributeError, TypeError):
        return None
