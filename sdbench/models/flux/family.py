"""`Flux`: Flux.1, a transformer with rectified flow that reads T5's states and pooled CLIP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from sdbench.base.conditions import CLIP, POOLED_EMBEDDING, T5, Captions, Condition
from sdbench.models.family import FLOW, Configured, Fact, Family
from sdbench.models.flux.latents import PACK_SIZE, FluxLatents
from sdbench.models.original_names import OriginalNames, names_by_table
from sdbench.models.unsuitable import FROZEN_TEXT_ENCODERS, NOT_OF_TRANSFORMERS, T5_IN_FP16

# Tokens of T5 that schnell and dev read.
NUM_T5_TOKENS, NUM_T5_TOKENS_WITH_GUIDANCE = 256, 512
# See `names_by_table`.
ORIGINAL_NAMES = {
    ("", ""): {
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        "final_layer.linear": "proj_out",
    },
    ("double_blocks.*.", "transformer_blocks.*."): {
        "img_attn.qkv": "attn.to_q attn.to_k attn.to_v",
        "img_attn.proj": "attn.to_out.0",
        "img_mlp.0": "ff.net.0.proj",
        "img_mlp.2": "ff.net.2",
        "img_mod.lin": "norm1.linear",
        "txt_attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
        "txt_attn.proj": "attn.to_add_out",
        "txt_mlp.0": "ff_context.net.0.proj",
        "txt_mlp.2": "ff_context.net.2",
        "txt_mod.lin": "norm1_context.linear",
        "processor.qkv_lora1": "attn.to_q attn.to_k attn.to_v",
        "processor.proj_lora1": "attn.to_out.0",
        "processor.qkv_lora2": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
        "processor.proj_lora2": "attn.to_add_out",
    },
    ("single_blocks.*.", "single_transformer_blocks.*."): {
        "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
        "linear2": "proj_out",
        "modulation.lin": "norm.linear",
        "processor.qkv_lora": "attn.to_q attn.to_k attn.to_v",
        "processor.proj_lora": "proj_out",
    },
}


class Flux(Family):
    """Flux.1 schnell and dev."""

    name = "flux"
    title = "a Flux.1 schnell or dev model"
    pipeline = "FluxPipeline"
    denoiser = "transformer"
    parts: ClassVar = {
        "transformer": "FluxTransformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
    }
    tokenizers: ClassVar = {"tokenizer": CLIP, "tokenizer_2": T5}
    objective = FLOW
    latent_space = FluxLatents
    block_counts = ("num_layers", "num_single_layers")
    # schnell and dev are distilled: they draw without it.
    guidance_scale = 1.0
    network = "sdbench.models.flux.network:FluxNetwork"
    unsuitable: ClassVar = {**FROZEN_TEXT_ENCODERS, **NOT_OF_TRANSFORMERS}
    too_wide_for_fp16 = T5_IN_FP16

    def own_facts(self, configs: Mapping[str, Mapping[str, Any]]) -> list[Fact]:
        """It predicts what it reads; models that vary a picture read its latents too."""
        transformer = configs["transformer"]
        allowed = (None, transformer.get("in_channels"))
        return [("transformer's out_channels", transformer.get("out_channels"), allowed)]

    def widths(self, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, Any]]:
        """T5's states, pooled CLIP and packs of latents."""
        _, vae, clip, t5 = (configs[part] for part in self.parts)
        packed = PACK_SIZE**2 * vae.get("latent_channels", 0)
        return {
            "joint_attention_dim": ("second text encoder's states", t5.get("d_model")),
            "pooled_projection_dim": ("first text encoder's states", clip.get("hidden_size")),
            "in_channels": ("packs of 2 x 2 latents", packed),
        }

    def captions(self, architecture: Configured) -> tuple[Captions, ...]:
        """77 tokens of CLIP, and 256 (schnell) or 512 (dev) of T5."""
        has_guidance = self.takes_guidance(architecture)
        num_tokens = NUM_T5_TOKENS_WITH_GUIDANCE if has_guidance else NUM_T5_TOKENS
        return (
            architecture.clip_captions("tokenizer"),
            architecture.t5_captions("tokenizer_2", name="input_ids_2", num_tokens=num_tokens),
        )

    def conditions(self, architecture: Configured) -> tuple[Condition, ...]:
        """T5's states, which overflow in fp16, and CLIP's pooled text."""
        _, t5 = self.captions(architecture)
        transformer = architecture.parts["transformer"]
        states = (t5.num_tokens, transformer["joint_attention_dim"])
        pooled = (transformer["pooled_projection_dim"],)
        return (
            Condition(shape=states, dtype="float32"),
            Condition(name=POOLED_EMBEDDING, shape=pooled),
        )

    def takes_guidance(self, architecture: Configured) -> bool:
        """Whether the transformer is told a scale of guidance, as that of dev is."""
        return bool(architecture.parts["transformer"].get("guidance_embeds"))

    def original_names(self, layers: Iterable[str]) -> OriginalNames:
        """Those of Black Forest Labs' transformer, and of XLabs' LoRA beside it."""
        return names_by_table(ORIGINAL_NAMES, layers)

    def size_multiple(self, architecture: Configured) -> int:
        """8 (VAE) x 2 (a pack of latents) = 16."""
        return architecture.latents.factor * PACK_SIZE

    def default_image_size(self, architecture: Configured) -> int:
        """That of the VAE, 1024; the transformer's configuration has none."""
        return architecture.parts["vae"].get("sample_size", 1024)


FAMILY = Flux()
