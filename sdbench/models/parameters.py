"""Counts the weights of each sub-model."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sdbench.models.architecture import Architecture
from sdbench.models.components import make_text_encoder, make_unet, make_vae


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
    unet, vae, text_encoder = (
        make(architecture) for make in (make_unet, make_vae, make_text_encoder)
    )
    num_unet = _num_parameters(unet)
    return [
        ParameterCount("unet", num_unet, num_unet),
        ParameterCount("vae", _num_parameters(vae), 0),
        ParameterCount("text_encoder", _num_parameters(text_encoder), 0),
    ]


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
