"""`StableDiffusion`: Stable Diffusion 1 and 2, a U-Net beside one text encoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from sdbench.base.conditions import CLIP, Captions, Condition
from sdbench.models.family import DDPM, Configured, Fact, Family
from sdbench.models.original_names import OriginalNames, names_in_unet

# Conditioning inputs of a U-Net that Stable Diffusion 1 and 2 do not have.
OTHER_CONDITIONS = (
    "class_embed_type",
    "num_class_embeds",
    "addition_embed_type",
    "encoder_hid_dim",
)


class StableDiffusion(Family):
    """Stable Diffusion 1 and 2."""

    name = "sd"
    title = "a Stable Diffusion 1 or 2 model"
    pipeline = "StableDiffusionPipeline"
    denoiser = "unet"
    parts: ClassVar = {
        "unet": "UNet2DConditionModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
    }
    tokenizers: ClassVar = {"tokenizer": CLIP}
    objective = DDPM
    is_default = True
    network = "sdbench.models.sd.network:StableDiffusionNetwork"
    pipeline_options: ClassVar = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }

    def own_facts(self, configs: Mapping[str, Mapping[str, Any]]) -> list[Fact]:
        """Conditions of other families' U-Nets, beside time and text, are not there."""
        unet = configs["unet"]
        return [(f"unet's {name}", unet.get(name), (None,)) for name in OTHER_CONDITIONS]

    def widths(self, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, Any]]:
        """Text and latents."""
        latents = ("VAE's latents", configs["vae"].get("latent_channels"))
        return {
            "cross_attention_dim": (
                "text encoder's states",
                configs["text_encoder"].get("hidden_size"),
            ),
            "in_channels": latents,  # nine in inpainting models
            "out_channels": latents,
        }

    def captions(self, architecture: Configured) -> tuple[Captions, ...]:
        """77 tokens of CLIP."""
        return (architecture.clip_captions("tokenizer"),)

    def conditions(self, architecture: Configured) -> tuple[Condition, ...]:
        """The states of the text encoder."""
        (captions,) = self.captions(architecture)
        width = architecture.parts["unet"]["cross_attention_dim"]
        return (Condition(shape=(captions.num_tokens, width)),)

    def original_names(self, layers: Iterable[str]) -> OriginalNames:
        """Those of CompVis' U-Net, which Stability has kept."""
        return names_in_unet(layers)

    def size_multiple(self, architecture: Configured) -> int:
        """8 (VAE) x 8 (U-Net, four blocks) = 64 for SD."""
        num_blocks = len(architecture.parts["unet"]["block_out_channels"])
        return architecture.latents.factor * 2 ** (num_blocks - 1)


FAMILY = StableDiffusion()
