"""`StableDiffusion3Network`: what a Stable Diffusion 3 computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.embeddings import get_1d_sincos_pos_embed_from_grid
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.t5.modeling_t5 import T5Block

from sdbench.base.conditions import POOLED_EMBEDDING, TEXT_EMBEDDING
from sdbench.models.clip_states import encode_by_clip
from sdbench.models.joint_attention import set_joint_attention
from sdbench.models.network import Conditions, Network
from sdbench.models.sd3.family import NUM_T5_TOKENS, T5_WIDTH


class StableDiffusion3Network(Network):
    """The work of Stable Diffusion 3."""

    sharded_blocks = (JointTransformerBlock,)
    casts_inputs = False
    compiled_blocks = (*sharded_blocks, ResnetBlock2D, CLIPEncoderLayer, T5Block)
    transformers = (SD3Transformer2DModel,)

    def encode_text(
        self, encoders: Sequence[nn.Module], ids: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """States (B, 77 + N, 4096) of both CLIPs side by side, then T5's, and pooled text.

        Zeros fill CLIP's states up to T5's width, and stand for T5's states without T5.
        """
        clips = [encode_by_clip(*pair) for pair in zip(encoders[:2], ids[:2], strict=True)]
        states, pooled = (torch.cat(both, dim=-1) for both in zip(*clips, strict=True))
        if len(encoders) > len(clips):
            t5_states = encoders[2](ids[2])[0]
        else:
            t5_states = states.new_zeros(len(states), NUM_T5_TOKENS, T5_WIDTH)
        padded = nn.functional.pad(states, (0, t5_states.shape[-1] - states.shape[-1]))
        return {
            TEXT_EMBEDDING: torch.cat([padded, t5_states], dim=-2),
            POOLED_EMBEDDING: pooled,
        }

    def predict(
        self, denoiser: Any, noised: Tensor, *, times: Tensor, conditions: Conditions
    ) -> Tensor:
        """Predict by the transformer."""
        return denoiser(
            hidden_states=noised,
            encoder_hidden_states=conditions[TEXT_EMBEDDING].to(noised.dtype),
            pooled_projections=conditions[POOLED_EMBEDDING].to(noised.dtype),
            timestep=times,
        ).sample

    def set_attention(self, denoiser: Any, kind: str) -> None:
        """Set the attention of all blocks."""
        set_joint_attention(denoiser, JointAttnProcessor2_0(), kind)

    def fill_buffers(self, denoiser: nn.Module) -> None:
        """Fill the positions of patches, sines and cosines of rows and columns.

        As diffusers' get_2d_sincos_pos_embed, which takes 1.5 GiB for it in double precision.
        """
        embed: Any = denoiser.pos_embed
        size, width = embed.pos_embed_max_size, embed.pos_embed.shape[-1]
        axis = torch.arange(size, dtype=torch.float32) / (size / embed.base_size)
        axis = axis / embed.interpolation_scale
        positions = get_1d_sincos_pos_embed_from_grid(width // 2, axis, output_type="pt")
        of_columns, of_rows = embed.pos_embed.view(size, size, width).chunk(2, dim=-1)
        of_columns.copy_(positions.unsqueeze(0))
        of_rows.copy_(positions.unsqueeze(1))
