"""Makes U-Net, VAE and text encoder, with saved or random weights, and counts the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    XFormersAttnProcessor,
)
from torch.nn.attention import SDPBackend
from transformers import CLIPTextConfig, CLIPTextModel

from sdbench.models.architecture import Architecture
from sdbench.models.blocks import ByShapeAttnProcessor, KernelAttnProcessor
from sdbench.models.weights import Weights, draw_weights


@dataclass(frozen=True)
class Attention:
    """Implementations of attention in each sub-model.

    Attributes:
        unet: diffusers' processor for the U-Net.
        vae: diffusers' processor for the VAE, whose one head is too wide, 512, for the kernels of
            flash attention and cuDNN.
        text: transformers' name of the implementation for the text encoder.
    """

    unet: Callable[[], Any]
    vae: Callable[[], Any]
    text: str


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


def make_unet(
    architecture: Architecture, *, attention: str = "sdpa", weights: Weights | None = None
) -> UNet2DConditionModel:
    """Make the U-Net.

    Args:
        architecture: With a weights folder its weights are loaded, else drawn.
        attention: One of `ATTENTION`.
        weights: None makes shapes only, on the meta device.
    """
    unet = _make_diffusers_model(UNet2DConditionModel, architecture, part="unet", weights=weights)
    unet.set_attn_processor(ATTENTION[attention].unet())
    return unet


def make_vae(
    architecture: Architecture, *, attention: str = "sdpa", weights: Weights | None = None
) -> AutoencoderKL:
    """Make the VAE, as `make_unet` makes the U-Net."""
    vae = _make_diffusers_model(AutoencoderKL, architecture, part="vae", weights=weights)
    vae.set_attn_processor(ATTENTION[attention].vae())
    return vae


def make_text_encoder(
    architecture: Architecture, *, attention: str = "sdpa", weights: Weights | None = None
) -> CLIPTextModel:
    """Make the text encoder, as `make_unet` makes the U-Net."""
    implementation = ATTENTION[attention].text
    config = CLIPTextConfig(**architecture.text_encoder, attn_implementation=implementation)
    return _make(
        architecture,
        part="text_encoder",
        weights=weights,
        load=functools.partial(
            CLIPTextModel.from_pretrained, attn_implementation=implementation, dtype=torch.float32
        ),
        make=lambda: CLIPTextModel(config),
        initialize=lambda text_encoder: text_encoder._init_weights,
    )


MAKERS: dict[str, Callable[..., torch.nn.Module]] = {
    "unet": make_unet,
    "vae": make_vae,
    "text_encoder": make_text_encoder,
}


def _make_diffusers_model(
    model_class: Any, architecture: Architecture, *, part: str, weights: Weights | None
) -> Any:
    # low_cpu_mem_usage=True, the default, needs accelerate.
    load = functools.partial(
        model_class.from_pretrained, torch_dtype=torch.float32, low_cpu_mem_usage=False
    )
    make = functools.partial(model_class.from_config, getattr(architecture, part))
    return _make(architecture, part=part, weights=weights, load=load, make=make)


def _make(
    architecture: Architecture,
    *,
    part: str,
    weights: Weights | None,
    load: Callable[..., Any],
    make: Callable[[], Any],
    initialize: Callable[[Any], Callable[..., object] | None] = lambda model: None,
) -> Any:
    """Load a sub-model from its folder, or make it on the meta device and draw its weights."""
    folder = architecture.weights_folder_of(part)
    if weights is not None and folder is not None:
        model = load(folder / part, use_safetensors=True, local_files_only=True)
        weights.place(model)
        return model
    with torch.device("meta"):
        model = make()
    if weights is not None:
        draw_weights(model, weights, initialize=initialize(model))
    return model


class ParameterCount(NamedTuple):
    """Numbers of all and of trained weights of one sub-model."""

    sub_model: str
    total: int
    trainable: int


def count_parameters(architecture: Architecture) -> list[ParameterCount]:
    """Count the weights of U-Net (all trained), VAE and text encoder (frozen), by their shapes."""
    counts = []
    for part, make in MAKERS.items():
        number = sum(parameter.numel() for parameter in make(architecture).parameters())
        counts.append(ParameterCount(part, number, number if part == "unet" else 0))
    return counts
