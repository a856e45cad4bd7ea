"""How is one sub-model (U-Net, VAE, text encoder) made from its configuration or its weights?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from transformers import CLIPTextConfig, CLIPTextModel

from sdbench.models.architecture import Architecture


@dataclass(frozen=True)
class Attention:
    """How attention is computed: diffusers' processor and transformers' name for the same."""

    processor: Callable[[], Any]
    text_implementation: str


ATTENTION = {
    "sdpa": Attention(AttnProcessor2_0, "sdpa"),
    "eager": Attention(AttnProcessor, "eager"),
}


def make_unet(architecture: Architecture, *, attention: str = "sdpa") -> UNet2DConditionModel:
    """Make the U-Net in fp32 on the default device, with loaded or freshly drawn weights."""
    unet = _make_diffusers_model(UNet2DConditionModel, architecture, part="unet")
    unet.set_attn_processor(ATTENTION[attention].processor())
    return unet


def make_vae(architecture: Architecture, *, attention: str = "sdpa") -> AutoencoderKL:
    """Make the VAE in fp32 on the default device, with loaded or freshly drawn weights."""
    vae = _make_diffusers_model(AutoencoderKL, architecture, part="vae")
    vae.set_attn_processor(ATTENTION[attention].processor())
    return vae


def make_text_encoder(architecture: Architecture, *, attention: str = "sdpa") -> CLIPTextModel:
    """Make the text encoder in fp32 on the default device, with loaded or drawn weights."""
    implementation = ATTENTION[attention].text_implementation
    if _loads_weights(architecture):
        return CLIPTextModel.from_pretrained(
            architecture.weights_folder / "text_encoder",
            attn_implementation=implementation,
            use_safetensors=True,
            local_files_only=True,
            torch_dtype=torch.float32,
        )
    config = CLIPTextConfig(**architecture.text_encoder, attn_implementation=implementation)
    return CLIPTextModel(config)


def _make_diffusers_model(model_class: Any, architecture: Architecture, *, part: str) -> Any:
    if _loads_weights(architecture):
        return model_class.from_pretrained(
            architecture.weights_folder / part,
            use_safetensors=True,
            local_files_only=True,
            torch_dtype=torch.float32,
        )
    return model_class.from_config(getattr(architecture, part))


def _loads_weights(architecture: Architecture) -> bool:
    """Not on the meta device, where only shapes are wanted."""
    on_meta = torch.get_default_device().type == "meta"
    return architecture.weights_folder is not None and not on_meta
