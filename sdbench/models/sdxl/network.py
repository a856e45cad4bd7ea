"""`StableDiffusionXLNetwork`: what a Stable Diffusion XL computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.base.conditions import POOLED_EMBEDDING, SIZES, TEXT_EMBEDDING
from sdbench.models.clip_states import encode_by_clip
from sdbench.models.network import Conditions
from sdbench.models.sd.network import StableDiffusionNetwork


class StableDiffusionXLNetwork(StableDiffusionNetwork):
    """The work of Stable Diffusion XL; blocks and attention are those of SD's U-Net."""

    def encode_text(
        self, encoders: Sequence[nn.Module], ids: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """The states of both encoders side by side (B, 77, 2048), and the second's pooled text."""
        first, _ = encode_by_clip(encoders[0], ids[0])
        second, pooled = encode_by_clip(encoders[1], ids[1])
        return {TEXT_EMBEDDING: torch.cat([first, second], dim=-1), POOLED_EMBEDDING: pooled}

    def predict(
        self, denoiser: Any, noised: Tensor, *, times: Tensor, conditions: Conditions
    ) -> Tensor:
        """Predict by the U-Net, which is told pooled text and sizes beside the states."""
        added = {
            "text_embeds": conditions[POOLED_EMBEDDING].to(noised.dtype),
            # Whole numbers of up to 1024 and more: FSDP casts no integers to bf16.
            "time_ids": conditions[SIZES].long(),
        }
        states = conditions[TEXT_EMBEDDING].to(noised.dtype)
        return denoiser(noised, times, states, added_cond_kwargs=added).sample
