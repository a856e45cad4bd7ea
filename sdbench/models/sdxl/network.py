"""`StableDiffusionXLNetwork`: what a Stable Diffusion XL computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sdbench.base.conditions import POOLED_EMBEDDING, SIZES, TEXT_EMBEDDING
from sdbench.models.network import Conditions
from sdbench.models.sd.network import StableDiffusionNetwork


def encode_by_clip(encoder: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The states (B, N, D) before the last layer, as SDXL and SD3 take them, and pooled text.

    The pooled text (B, P) is that of a model with a projection; of others it is not of use.
    """
    encoded = encoder(ids, output_hidden_states=True)
    return encoded.hidden_states[-2], encoded[0]


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
            "text_embeds": conditions[POOLED_EMBEDDING].to(denoiser.dtype),
            # Numbers of up to 1024 and more, which bf16 would round.
            "time_ids": conditions[SIZES].float(),
        }
        states = conditions[TEXT_EMBEDDING].to(denoiser.dtype)
        return denoiser(noised, times, states, added_cond_kwargs=added).sample

    def pipeline_arguments(self, conditions: Conditions, negative: Conditions) -> dict[str, Any]:
        """States and pooled text of captions and negative captions; the sizes are the picture's."""
        return {
            **super().pipeline_arguments(conditions, negative),
            "pooled_prompt_embeds": conditions[POOLED_EMBEDDING],
            "negative_pooled_prompt_embeds": negative[POOLED_EMBEDDING],
        }
