"""Which device does this rank train on, and how much of its memory did it take?"""

from __future__ import annotations

import torch

from sdbench.measure.hardware import BYTES_PER_GIB, peak_resident_memory_gib


def find_device() -> torch.device:
    """The GPU that this process was given when it joined the others, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def reset_peak_memory() -> None:
    """Begin anew to look for the peak of a GPU; that of a CPU process is for its whole life."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gib() -> float:
    """On a GPU what torch's allocator reserved at most: that decides whether a run fits."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / BYTES_PER_GIB
    return peak_resident_memory_gib()
