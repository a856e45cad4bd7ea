"""`FluxNetwork`: what a Flux.1 computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_flux import (
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.t5.modeling_t5 import T5Block

from sdbench.base.conditions import GUIDANCE, POOLED_EMBEDDING, TEXT_EMBEDDING
from sdbench.models.flux.latents import PACK_SIZE, pack, unpack
from sdbench.models.joint_attention import set_joint_attention
from sdbench.models.network import Conditions, Network

# The transformer takes times and scales in thousandths of what it makes sines and cosines of.
NUM_TIMES = 1000
# Coordinates of a token: one without a use, the row and the column.
NUM_COORDINATES = 3


class FluxNetwork(Network):
    """The work of Flux.1."""

    sharded_blocks = (FluxTransformerBlock, FluxSingleTransformerBlock)
    casts_inputs = False
    compiled_blocks = (*sharded_blocks, ResnetBlock2D, CLIPEncoderLayer, T5Block)
    transformers = (FluxTransformer2DModel,)

    def encode_text(
        self, encoders: Sequence[nn.Module], ids: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """T5's last states (B, N, 4096), and CLIP's state at the end of the caption (B, 768)."""
        pooled = encoders[0](ids[0]).pooler_output
        return {TEXT_EMBEDDING: encoders[1](ids[1])[0], POOLED_EMBEDDING: pooled}

    def predict(
        self, denoiser: Any, noised: Tensor, *, times: Tensor, conditions: Conditions
    ) -> Tensor:
        """Predict by the transformer, from packs of 2 x 2 latents."""
        states = conditions[TEXT_EMBEDDING].to(noised.dtype)
        height, width = noised.shape[-2:]
        predicted = denoiser(
            hidden_states=pack(noised),
            encoder_hidden_states=states,
            pooled_projections=conditions[POOLED_EMBEDDING].to(noised.dtype),
            timestep=times / NUM_TIMES,
            guidance=_guidance(denoiser, times, conditions),
            img_ids=_places(height // PACK_SIZE, width // PACK_SIZE, device=noised.device),
            txt_ids=torch.zeros(states.shape[1], NUM_COORDINATES, device=noised.device),
        ).sample
        return unpack(predicted, height=height, width=width)

    def set_attention(self, denoiser: Any, kind: str) -> None:
        """Set the attention of all blocks."""
        set_joint_attention(denoiser, FluxAttnProcessor(), kind)

    def guidance_arguments(self, scale: float, *, told: float | None) -> dict[str, Any]:
        """Guidance from a negative caption, and the scale that dev is told."""
        return {"true_cfg_scale": scale, "guidance_scale": 1.0 if told is None else told}


def _places(num_rows: int, num_columns: int, *, device: torch.device) -> Tensor:
    """The coordinates (rows * columns, 3) of the tokens of a picture: 0, row, column."""
    rows, columns = (
        torch.arange(number, device=device, dtype=torch.float32)
        for number in (num_rows, num_columns)
    )
    grid = torch.cartesian_prod(rows, columns)
    return nn.functional.pad(grid, (NUM_COORDINATES - grid.shape[1], 0))


def _guidance(denoiser: Any, times: Tensor, conditions: Conditions) -> Tensor | None:
    """The scales of guidance (B,) that the transformer is told: 1 unless a batch has others."""
    if not denoiser.config.guidance_embeds:
        return None
    scales = conditions.get(GUIDANCE)
    return torch.ones_like(times, dtype=torch.float32) if scales is None else scales
