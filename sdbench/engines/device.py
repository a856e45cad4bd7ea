"""The device of this rank, and the peak of its memory."""

from __future__ import annotations

import torch

from sdbench.measure.hardware import BYTES_PER_GIB, peak_resident_memory_gib


def find_device() -> torch.device:
    """The GPU that this process was given when it joined the others, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def reset_peak_memory() -> None:
    """Start the peak of a GPU anew; that of a process on a CPU covers its whole life."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gib() -> float:
    """Peak memory in GiB: reserved by torch on a GPU, where it decides whether a run fits."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / BYTES_PER_GIB
    return peak_resident_memory_gib()
