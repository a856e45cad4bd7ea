"""`StableDiffusionXL`: a U-Net beside two text encoders, which is told the sizes of pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from sdbench.base.conditions import CLIP, NUM_SIZES, POOLED_EMBEDDING, Captions, Condition
from sdbench.models.family import DDPM, Configured, Fact, Family
from sdbench.models.original_names import OriginalNames, names_in_unet
from sdbench.models.unsuitable import FROZEN_TEXT_ENCODERS

# Conditioning inputs of a U-Net that SDXL does not have.
OTHER_CONDITIONS = ("class_embed_type", "num_class_embeds", "encoder_hid_dim", "time_cond_proj_dim")


class StableDiffusionXL(Family):
    """Stable Diffusion XL, the base model."""

    name = "sdxl"
    title = "a Stable Diffusion XL base model"
    pipeline = "StableDiffusionXLPipeline"
    denoiser = "unet"
    parts: ClassVar = {
        "unet": "UNet2DConditionModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "CLIPTextModelWithProjection",
    }
    tokenizers: ClassVar = {"tokenizer": CLIP, "tokenizer_2": CLIP}
    objective = DDPM
    guidance_scale = 5.0
    tells_sizes = True
    network = "sdbench.models.sdxl.network:StableDiffusionXLNetwork"
    unsuitable = FROZEN_TEXT_ENCODERS
    too_wide_for_fp16 = "the activations of SDXL's VAE are too large for fp16"
    may_zero_empty_prompt = True

    def own_facts(self, configs: Mapping[str, Mapping[str, Any]]) -> list[Fact]:
        """The U-Net is told pooled text and sizes, and nothing of other families."""
        unet = configs["unet"]
        return [
            ("unet's addition_embed_type", unet.get("addition_embed_type"), ("text_time",)),
            *((f"unet's {name}", unet.get(name), (None,)) for name in OTHER_CONDITIONS),
        ]

    def widths(self, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, Any]]:
        """The states of both text encoders side by side, pooled text and sizes, and latents."""
        unet, vae, first, second = (configs[part] for part in self.parts)
        states = first.get("hidden_size", 0) + second.get("hidden_size", 0)
        latents = ("VAE's latents", vae.get("latent_channels"))
        # Each of the six numbers becomes so many sines and cosines.
        added = second.get("projection_dim", 0)
        added += NUM_SIZES * (unet.get("addition_time_embed_dim") or 0)
        return {
            "cross_attention_dim": ("text encoders' states together", states),
            "projection_class_embeddings_input_dim": ("pooled text and sizes together", added),
            "in_channels": latents,
            "out_channels": latents,
        }

    def captions(self, architecture: Configured) -> tuple[Captions, ...]:
        """77 tokens of CLIP for each encoder, which differ in what fills a caption up."""
        return (
            architecture.clip_captions("tokenizer"),
            architecture.clip_captions("tokenizer_2", name="input_ids_2"),
        )

    def conditions(self, architecture: Configured) -> tuple[Condition, ...]:
        """The states of both text encoders side by side, and the pooled text of the second."""
        first, _ = self.captions(architecture)
        width = architecture.parts["unet"]["cross_attention_dim"]
        pooled = architecture.parts["text_encoder_2"]["projection_dim"]
        return (
            Condition(shape=(first.num_tokens, width)),
            Condition(name=POOLED_EMBEDDING, shape=(pooled,)),
        )

    def original_names(self, layers: Iterable[str]) -> OriginalNames:
        """Those of CompVis' U-Net, which Stability has kept."""
        return names_in_unet(layers)

    def size_multiple(self, architecture: Configured) -> int:
        """8 (VAE) x 4 (U-Net, three blocks) = 32 for SDXL."""
        num_blocks = len(architecture.parts["unet"]["block_out_channels"])
        return architecture.latents.factor * 2 ** (num_blocks - 1)


FAMILY = StableDiffusionXL()
