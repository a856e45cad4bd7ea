"""Counts the weights of each sub-model."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sdbench.models.architecture import Architecture
from sdbench.models.components import MAKERS


class ParameterCount(NamedTuple):
    """Numbers of all and of trained weights of one sub-model."""

    sub_model: str
    total: int
    trainable: int


def count_parameters(architecture: Architecture) -> list[ParameterCount]:
    """Count the weights of each sub-model on the meta device, without allocating them.

    Args:
        architecture: The model.

    Returns:
        One row each for U-Net (all trained), VAE and text encoder (frozen).
    """
    counts = {part: _num_parameters(make(architecture)) for part, make in MAKERS.items()}
    return [
        ParameterCount(part, number, number if part == "unet" else 0)
        for part, number in counts.items()
    ]


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
