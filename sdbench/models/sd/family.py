"""`StableDiffusion`: Stable Diffusion 1 and 2, a U-Net beside one text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sdbench.base.conditions import CLIP, Captions, Condition
from sdbench.models.family import DDPM, Fact, Family
from sdbench.models.objective import PREDICTION_TYPES

if TYPE_CHECKING:
    from sdbench.models.architecture import Architecture

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

    def facts(self, configs: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Fact]:
        """What has to hold for the configurations in a folder."""
        unet, vae = configs["unet"], configs["vae"]
        # Schedulers that were saved before the key existed mean "epsilon".
        prediction_type = configs["scheduler"].get("prediction_type", "epsilon")
        latent_channels = (vae.get("latent_channels"),)
        return [
            *super().facts(configs, folder),
            ("prediction type", prediction_type, PREDICTION_TYPES),
            *((f"unet's {key}", value, (width,)) for key, value, _, width in self.widths(configs)),
            # Nine in inpainting models.
            ("unet's out_channels", unet.get("out_channels"), latent_channels),
            # Inputs of U-Nets of other families, beside time and text.
            *((f"unet's {name}", unet.get(name), (None,)) for name in OTHER_CONDITIONS),
        ]

    def widths(self, configs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any, str, Any]]:
        """The U-Net reads text and latents of these widths."""
        unet, vae, text_encoder = (configs[part] for part in self.parts)
        return [
            (
                *("cross_attention_dim", unet.get("cross_attention_dim")),
                *("text encoder's states", text_encoder.get("hidden_size")),
            ),
            (
                *("in_channels", unet.get("in_channels")),
                *("VAE's latents", vae.get("latent_channels")),
            ),
        ]

    def captions(self, architecture: Architecture) -> tuple[Captions, ...]:
        """77 tokens of CLIP."""
        return (architecture.clip_captions("tokenizer"),)

    def conditions(self, architecture: Architecture) -> tuple[Condition, ...]:
        """The states of the text encoder."""
        (captions,) = self.captions(architecture)
        width = architecture.parts["unet"]["cross_attention_dim"]
        return (Condition(shape=(captions.num_tokens, width)),)

    def size_multiple(self, architecture: Architecture) -> int:
        """8 (VAE) x 8 (U-Net, four blocks) = 64 for SD."""
        num_blocks = len(architecture.parts["unet"]["block_out_channels"])
        return architecture.latent_factor * 2 ** (num_blocks - 1)

    def default_image_size(self, architecture: Architecture) -> int:
        """That of the U-Net's latents, 64 x 8 = 512 for SD2-base."""
        return architecture.parts["unet"]["sample_size"] * architecture.latent_factor


FAMILY = StableDiffusion()
