"""Makes U-Net, VAE and text encoder, with saved or random weights, and counts the weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
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

from sdbench.base.errors import ConfigError
from sdbench.models.architecture import MODEL_FLAG, Architecture
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
PARTS = ("unet", "vae", "text_encoder")


def make_part(
    part: str,
    architecture: Architecture,
    *,
    attention: str = "sdpa",
    weights: Weights | None = None,
) -> Any:
    """Make a sub-model.

    Args:
        part: One of `PARTS`.
        architecture: With a weights folder its weights are loaded, else drawn.
        attention: One of `ATTENTION`.
        weights: None makes shapes only, on the meta device.
    """
    implementation = getattr(ATTENTION[attention], part)
    folder = architecture.weights_folder_of(part)
    loads = weights is not None and folder is not None
    if part == "text_encoder":
        model = _make_text_encoder(architecture, implementation, folder=folder if loads else None)
        initialize = model._init_weights
    else:
        model_class = {"unet": UNet2DConditionModel, "vae": AutoencoderKL}[part]
        if loads:
            # low_cpu_mem_usage=True, the default, needs accelerate.
            options = {"torch_dtype": torch.float32, "low_cpu_mem_usage": False}
            model = model_class.from_pretrained(folder / part, **SAFE, **options)
        else:
            with torch.device("meta"), _named(part, architecture):
                model = model_class.from_config(getattr(architecture, part))
        model.set_attn_processor(implementation())
        initialize = None
    if loads:
        weights.place(model)
    elif weights is not None:
        draw_weights(model, weights, initialize=initialize)
    return model


def _make_text_encoder(
    architecture: Architecture, implementation: str, *, folder: Path | None
) -> CLIPTextModel:
    if folder is not None:
        options = {"attn_implementation": implementation, "dtype": torch.float32}
        return CLIPTextModel.from_pretrained(folder / "text_encoder", **SAFE, **options)
    with torch.device("meta"), _named("text_encoder", architecture):
        config = CLIPTextConfig(**architecture.text_encoder, attn_implementation=implementation)
        return CLIPTextModel(config)


@contextlib.contextmanager
def _named(part: str, architecture: Architecture) -> Iterator[None]:
    """Refuse a configuration of which the block cannot make a sub-model."""
    try:
        yield
    except Exception as error:  # diffusers and transformers raise any kind
        raise ConfigError(
            f"no {part} can be made from the configuration of the model",
            value=str(error),
            allowed="a model whose config.json files are as they were saved",
            flag=MODEL_FLAG,
        ) from error


def count_parameters(architecture: Architecture) -> dict[str, int]:
    """Count the weights of each sub-model by their shapes."""
    return {
        part: sum(weight.numel() for weight in make_part(part, architecture).parameters())
        for part in PARTS
    }
