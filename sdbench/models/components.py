"""Makes U-Net, VAE and text encoder, with saved or random weights, and counts the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    XFormersAttnProcessor,
)
from torch.nn.attention import SDPBackend
from transformers import CLIPTextConfig, CLIPTextModel

from sdbench.models.architecture import Architecture, refuse_errors
from sdbench.models.blocks import ByShapeAttnProcessor, KernelAttnProcessor
from sdbench.models.weights import Weights, draw_weights


@dataclass(frozen=True)
class Attention:
    """Implementations of attention: diffusers' processors, and transformers' name of one.

    The VAE's one head is too wide, 512, for the kernels of flash attention and cuDNN.
    """

    unet: Callable[[], Any]
    vae: Callable[[], Any]
    text_encoder: str


def _by_kernel(kernel: SDPBackend) -> Attention:
    return Attention(functools.partial(KernelAttnProcessor, kernel), AttnProcessor2_0, "sdpa")


ATTENTION = {
    "eager": Attention(AttnProcessor, AttnProcessor, "eager"),
    "by_shape": Attention(ByShapeAttnProcessor, AttnProcessor2_0, "sdpa"),
    "sdpa": Attention(AttnProcessor2_0, AttnProcessor2_0, "sdpa"),
    "flash": _by_kernel(SDPBackend.FLASH_ATTENTION),
    "cudnn": _by_kernel(SDPBackend.CUDNN_ATTENTION),
    "efficient": _by_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "xformers": Attention(XFormersAttnProcessor, AttnProcessor2_0, "sdpa"),
}


# How weights are read from a folder.
SAFE = {"use_safetensors": True, "local_files_only": True}
PARTS = {"unet": UNet2DConditionModel, "vae": AutoencoderKL, "text_encoder": CLIPTextModel}


def make_part(
    part: str,
    architecture: Architecture,
    *,
    attention: str = "sdpa",
    weights: Weights | None = None,
) -> Any:
    """Make a sub-model, one of `PARTS`, with an attention of `ATTENTION`.

    Its weights are loaded from the folder of the architecture, or drawn if it has none; without a
    seed neither is done. Without `weights` it has shapes only, on the meta device.
    """
    implementation = getattr(ATTENTION[attention], part)
    folder = architecture.weights_folder_of(part)
    loads = weights is not None and weights.seed is not None and folder is not None
    is_text_encoder = part == "text_encoder"
    if loads:
        # low_cpu_mem_usage=True, diffusers' default, needs accelerate.
        options = {"torch_dtype": torch.float32, "low_cpu_mem_usage": False}
        if is_text_encoder:
            options = {"dtype": torch.float32, "attn_implementation": implementation}
        model = PARTS[part].from_pretrained(folder / part, **SAFE, **options)
    else:
        config = getattr(architecture, part)
        refusing = refuse_errors(
            f"no {part} can be made from the configuration of the model",
            value=architecture.name,
            allowed="a model whose config.json files are as they were saved",
        )
        with torch.device("meta"), refusing:
            if is_text_encoder:
                config = CLIPTextConfig(**config, attn_implementation=implementation)
                model = CLIPTextModel(config)
            else:
                model = PARTS[part].from_config(config)
    if not is_text_encoder:
        model.set_attn_processor(implementation())
    if loads:
        weights.place(model)
    elif weights is not None:
        initialize = model._init_weights if is_text_encoder else None
        draw_weights(model, weights, initialize=initialize)
    return model


def count_parameters(architecture: Architecture) -> dict[str, int]:
    """Count the weights of each sub-model by their shapes."""
    return {
        part: sum(weight.numel() for weight in make_part(part, architecture).parameters())
        for part in PARTS
    }
