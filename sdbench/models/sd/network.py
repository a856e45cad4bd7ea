"""`StableDiffusionNetwork`: what a Stable Diffusion 1 or 2 computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from sdbench.base.conditions import TEXT_EMBEDDING
from sdbench.models.components import ATTENTION
from sdbench.models.network import Conditions, Network


class StableDiffusionNetwork(Network):
    """The work of Stable Diffusion 1 and 2."""

    # Of up to 60 million weights.
    sharded_blocks = (BasicTransformerBlock, ResnetBlock2D)
    compiled_blocks = (*sharded_blocks, CLIPEncoderLayer)
    transformers = (Transformer2DModel,)

    def encode_text(
        self, encoders: Sequence[nn.Module], ids: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """The last hidden states (B, 77, D)."""
        return {TEXT_EMBEDDING: encoders[0](ids[0])[0]}

    def predict(
        self, denoiser: Any, noised: Tensor, *, times: Tensor, conditions: Conditions
    ) -> Tensor:
        """Predict by the U-Net."""
        states = conditions[TEXT_EMBEDDING].to(noised.dtype)
        return denoiser(noised, times, states).sample

    def set_attention(self, denoiser: Any, kind: str) -> None:
        """Set the attention of the U-Net's transformers."""
        denoiser.set_attn_processor(ATTENTION[kind]())
