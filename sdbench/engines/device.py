"""The device of this rank."""

from __future__ import annotations

import torch


def find_device() -> torch.device:
    """This process's current GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def reset_peak_memory() -> None:
    """Reset the peak of a GPU. That of a CPU process cannot be reset: it is since its start."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
