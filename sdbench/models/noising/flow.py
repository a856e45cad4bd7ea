"""`Flow`: rectified flow, a straight line from latents to noise whose direction is predicted."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from sdbench.models.family import FlowSettings
from sdbench.models.noising.noising import Noising, draw_noise
from sdbench.models.objective import BY_RESOLUTION, COSMAP, LOGIT_NORMAL, NO_WEIGHTING

# Latents of an image token along a side, in SD3 and Flux.
PATCH = 2


class Flow(Noising):
    """Rectified flow as in Esser et al. 2024 (SD3, arXiv 2403.03206); times are s, from 0 to 1.

    Latents x become (1 - s) x + s noise, and noise - x is predicted.
    """

    def __init__(self, scheduler: Mapping[str, Any], settings: FlowSettings) -> None:
        """Take the configuration of a model's scheduler, and how the flow is trained.

        The scheduler's own shift is that of its samplers, and does not act on training.
        """
        super().__init__()
        # Not by an instance, which reads numbers from tensors: there are none in a replay.
        known = inspect.signature(FlowMatchEulerDiscreteScheduler.__init__).parameters
        defaults = {name: one.default for name, one in known.items() if name != "self"}
        self.config = defaults | dict(scheduler)
        self.guidance = settings.guidance_embedding
        self._settings = settings

    def draw(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Draw times, uniform or logit-normal, and shift them; then draw noise."""
        settings, size = self._settings, (len(latents),)
        if settings.time_sampling == LOGIT_NORMAL:
            normal = torch.randn(size, device=latents.device)
            times = torch.sigmoid(settings.time_mean + settings.time_std * normal)
        else:
            times = torch.rand(size, device=latents.device)
        return shift_times(times, self._shift(latents)), draw_noise(latents)

    def mix(self, latents: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Go from latents to noise by the share `times`; the target is the whole way."""
        share = times.view(-1, 1, 1, 1)
        return (1.0 - share) * latents + share * noise, noise - latents

    def weights(self, times: Tensor) -> Tensor | None:
        """Those of diffusers' `compute_loss_weighting_for_sd3`, if some are asked for.

        ``sigma_sqrt`` is s^-2, and ``cosmap`` 2 / (pi (1 - 2 s + 2 s^2)). s^-2 has no mean if s is
        uniform; it counts s below the first time of diffusers' schedule (1/1000) as that one.
        """
        weighting = self._settings.flow_weighting
        if weighting == NO_WEIGHTING:
            return None
        if weighting == COSMAP:
            return 2.0 / (math.pi * (1.0 - 2.0 * times + 2.0 * times**2))
        return times.clamp(min=1.0 / self.config["num_train_timesteps"]) ** -2.0

    def network_times(self, times: Tensor) -> Tensor:
        """1000 s, as samplers tell it."""
        return times * self.config["num_train_timesteps"]

    def validation_times(self, num: int, *, place: float = 0.5) -> list[float]:
        """A time in each of `num` equal parts of 0 to 1."""
        return [(part + place) / num for part in range(num)]

    def _shift(self, latents: Tensor) -> float:
        """The shift of times for latents of this size."""
        shift = self._settings.time_shift
        if shift != BY_RESOLUTION:
            return float(shift)
        num_tokens = latents.shape[2] * latents.shape[3] / PATCH**2
        return shift_of_resolution(num_tokens, self.config)


def shift_of_resolution(num_tokens: float, scheduler: Mapping[str, Any]) -> float:
    """The shift exp(mu) for a number of image tokens, as of Flux.1 when it draws.

    mu is on the line through `base_shift` at `base_image_seq_len` and `max_shift` at
    `max_image_seq_len` of the scheduler; 0.5 at 256 and 1.15 at 4096 tokens by default (diffusers'
    FlowMatchEulerDiscreteScheduler, and `calculate_shift` of its FluxPipeline).
    """
    few, many = scheduler["base_image_seq_len"], scheduler["max_image_seq_len"]
    low, high = scheduler["base_shift"], scheduler["max_shift"]
    return math.exp(low + (high - low) * (num_tokens - few) / (many - few))


def shift_times(times: Tensor, shift: float) -> Tensor:
    """Move times towards noise by a shift a > 1: a s / (1 + (a - 1) s)."""
    return shift * times / (1.0 + (shift - 1.0) * times)
