"""The device of this rank and its peak memory."""

from __future__ import annotations

import torch

from sdbench.base.units import BYTES_PER_GIB
from sdbench.measure.hardware import peak_resident_memory_gib


def find_device() -> torch.device:
    """This process's current GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def reset_peak_memory() -> None:
    """Reset the peak of a GPU. That of a CPU process cannot be reset: it is since its start."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gib() -> float:
    """Peak memory in GiB: what torch has reserved on a GPU, or resident memory on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / BYTES_PER_GIB
    return peak_resident_memory_gib()
