"""`StableDiffusion3`: a transformer with rectified flow beside two CLIP encoders and T5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from sdbench.base.conditions import CLIP, POOLED_EMBEDDING, T5, Captions, Condition
from sdbench.models.family import FLOW, Configured, Family, FlowSettings
from sdbench.models.original_names import OriginalNames, names_by_table
from sdbench.models.unsuitable import FROZEN_TEXT_ENCODERS, NOT_OF_TRANSFORMERS, T5_IN_FP16

# Tokens of T5 that it was trained with (arXiv 2403.03206) and that diffusers' example trains with.
NUM_T5_TOKENS = 77
# Width of the zeros that stand for T5's states in a model without T5, that of T5-XXL.
T5_WIDTH = 4096
# See `names_by_table`.
ORIGINAL_NAMES = {
    ("", ""): {
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        "final_layer.linear": "proj_out",
    },
    ("joint_blocks.*.", "transformer_blocks.*."): {
        "x_block.attn.qkv": "attn.to_q attn.to_k attn.to_v",
        "x_block.attn.proj": "attn.to_out.0",
        "x_block.attn2.qkv": "attn2.to_q attn2.to_k attn2.to_v",
        "x_block.attn2.proj": "attn2.to_out.0",
        "x_block.mlp.fc1": "ff.net.0.proj",
        "x_block.mlp.fc2": "ff.net.2",
        "x_block.adaLN_modulation.1": "norm1.linear",
        "context_block.attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
        "context_block.attn.proj": "attn.to_add_out",
        "context_block.mlp.fc1": "ff_context.net.0.proj",
        "context_block.mlp.fc2": "ff_context.net.2",
        "context_block.adaLN_modulation.1": "norm1_context.linear",
    },
}


class StableDiffusion3(Family):
    """Stable Diffusion 3; T5 may be left out, and its states are zeros then."""

    name = "sd3"
    title = "a Stable Diffusion 3 model"
    pipeline = "StableDiffusion3Pipeline"
    denoiser = "transformer"
    parts: ClassVar = {
        "transformer": "SD3Transformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
    }
    tokenizers: ClassVar = {"tokenizer": CLIP, "tokenizer_2": CLIP, "tokenizer_3": T5}
    objective = FLOW
    block_counts = ("num_layers",)
    guidance_scale = 7.0
    flow = FlowSettings(time_sampling="logit_normal")
    network = "sdbench.models.sd3.network:StableDiffusion3Network"
    optional = ("text_encoder_3", "tokenizer_3")
    unsuitable: ClassVar = {**FROZEN_TEXT_ENCODERS, **NOT_OF_TRANSFORMERS}
    too_wide_for_fp16 = T5_IN_FP16

    def widths(self, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, Any]]:
        """States of T5's width, pooled text of both CLIPs, and latents."""
        _, vae, first, second, t5 = (configs.get(part) for part in self.parts)
        latents = ("VAE's latents", vae.get("latent_channels"))
        t5_width = T5_WIDTH if t5 is None else t5.get("d_model")
        pooled = first.get("projection_dim", 0) + second.get("projection_dim", 0)
        return {
            "joint_attention_dim": ("third text encoder's states", t5_width),
            "pooled_projection_dim": ("first two text encoders' projections together", pooled),
            "in_channels": latents,
            "out_channels": latents,
        }

    def captions(self, architecture: Configured) -> tuple[Captions, ...]:
        """77 tokens of each tokenizer."""
        clips = (
            architecture.clip_captions("tokenizer"),
            architecture.clip_captions("tokenizer_2", name="input_ids_2"),
        )
        if "text_encoder_3" not in architecture.parts:
            return clips
        t5 = architecture.t5_captions("tokenizer_3", name="input_ids_3", num_tokens=NUM_T5_TOKENS)
        return (*clips, t5)

    def conditions(self, architecture: Configured) -> tuple[Condition, ...]:
        """States of CLIP's tokens, then T5's, which overflow in fp16; and CLIP's pooled text."""
        first, _, *t5 = self.captions(architecture)
        transformer = architecture.parts["transformer"]
        num_tokens = first.num_tokens + (t5[0].num_tokens if t5 else NUM_T5_TOKENS)
        states = (num_tokens, transformer["joint_attention_dim"])
        return (
            Condition(shape=states, dtype="float32" if t5 else "float16"),
            Condition(name=POOLED_EMBEDDING, shape=(transformer["pooled_projection_dim"],)),
        )

    def original_names(self, layers: Iterable[str]) -> OriginalNames:
        """Those of Stability's transformer."""
        return names_by_table(ORIGINAL_NAMES, layers)

    def size_multiple(self, architecture: Configured) -> int:
        """8 (VAE) x 2 (a patch of latents) = 16."""
        return architecture.latents.factor * architecture.parts["transformer"]["patch_size"]

    def max_image_size(self, architecture: Configured) -> int | None:
        """As many patches along a side as the transformer has positions: 192 x 16 = 3072."""
        positions = architecture.parts["transformer"]["pos_embed_max_size"]
        return positions * self.size_multiple(architecture)


FAMILY = StableDiffusion3()
