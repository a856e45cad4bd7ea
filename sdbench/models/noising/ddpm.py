"""`Ddpm`: noise of a schedule with discrete time steps; noise, v or the sample is predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from sdbench.models.noising.noising import Noising, draw_noise
from sdbench.models.objective import EPSILON, SAMPLE, VELOCITY, Objective, min_snr_weights


class Ddpm(Noising):
    """The forward process of Ho et al. 2020 (arXiv 2006.11239); times are whole numbers (int64)."""

    signal_scale: Tensor
    noise_scale: Tensor
    loss_weights: Tensor | None

    def __init__(self, scheduler: Mapping[str, Any], objective: Objective) -> None:
        """Take the configuration of a model's scheduler, and what the run changes in it."""
        super().__init__()
        schedule = DDPMScheduler.from_config(objective.schedule(scheduler))
        self.config = schedule.config
        self.prediction_type: str = schedule.config.prediction_type
        self.offset_noise = objective.offset_noise
        # In fp64: 1 - alphas_cumprod is small, and inaccurate in fp32, at the first time steps.
        power = schedule.alphas_cumprod.double()
        weights = None
        if objective.min_snr_gamma is not None:
            weights = min_snr_weights(
                power, gamma=objective.min_snr_gamma, prediction_type=self.prediction_type
            ).float()
        # Not persistent: the schedule is configuration and does not belong in a checkpoint.
        self.register_buffer("signal_scale", power.sqrt().float(), persistent=False)
        self.register_buffer("noise_scale", (1.0 - power).sqrt().float(), persistent=False)
        self.register_buffer("loss_weights", weights, persistent=False)

    def draw(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Draw time steps that are equally likely, then noise, then offset noise if it is added."""
        times = torch.randint(0, len(self.signal_scale), (len(latents),), device=latents.device)
        noise = draw_noise(latents)
        if self.offset_noise:
            noise = noise + self.offset_noise * draw_noise(latents[:, :, :1, :1])
        return times, noise

    def mix(self, latents: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and add; the target is what the schedule says is predicted."""
        signal_scale = self.signal_scale[times].view(-1, 1, 1, 1)
        noise_scale = self.noise_scale[times].view(-1, 1, 1, 1)
        noised = signal_scale * latents + noise_scale * noise
        if self.prediction_type == VELOCITY:
            # Salimans and Ho 2022 (arXiv 2202.00512): v = alpha eps - sigma x.
            target = signal_scale * noise - noise_scale * latents
        else:
            target = {EPSILON: noise, SAMPLE: latents}[self.prediction_type]
        return noised, target

    def weights(self, times: Tensor) -> Tensor | None:
        """Those of min-SNR, if it is asked for."""
        return None if self.loss_weights is None else self.loss_weights[times]

    def network_times(self, times: Tensor) -> Tensor:
        """The time steps."""
        return times

    def validation_times(self, num: int, *, place: float = 0.5) -> list[int]:
        """A time step in each of `num` equal parts of the schedule."""
        return [int((part + place) / num * len(self.signal_scale)) for part in range(num)]
