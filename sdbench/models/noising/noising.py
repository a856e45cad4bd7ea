"""`Noising`: the interface of the objectives, and the noise that they add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Noising(nn.Module):
    """Adds noise to latents at a time, and knows what is to be predicted; no trained weights.

    Times are (B,), latents and noise (B, C, H/8, W/8) in fp32.

    Attributes:
        config: Configuration of the scheduler of diffusers, for samplers.
        guidance: The scale of guidance that a network with an input for it is told.
    """

    config: Mapping[str, Any]
    guidance: float | None = None

    def draw(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a time for each of the latents, then their noise."""
        raise NotImplementedError

    def mix(self, latents: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Add noise to latents; return them and the target of the prediction."""
        raise NotImplementedError

    def weights(self, times: Tensor) -> Tensor | None:
        """Weights (B,) of the squared errors; None: all count the same."""
        raise NotImplementedError

    def network_times(self, times: Tensor) -> Tensor:
        """The times as the network is told them, 0 to 1000."""
        raise NotImplementedError

    def validation_times(self, num: int, *, place: float = 0.5) -> list[Any]:
        """A time in each of `num` equal parts of the schedule: 0 is its start, 0.5 its middle."""
        raise NotImplementedError


def draw_noise(like: Tensor) -> Tensor:
    """Standard normal fp32 noise; randn_like's would depend on the layout of `like`."""
    return torch.randn(like.shape, device=like.device)
