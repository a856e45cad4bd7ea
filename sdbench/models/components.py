"""Makes the sub-models of a model, with saved or random weights, and counts the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    XFormersAttnProcessor,
)
from torch.nn.attention import SDPBackend

from sdbench.base.errors import ConfigError
from sdbench.models.architecture import MODEL_FLAG, Architecture, refuse_errors
from sdbench.models.blocks import ByShapeAttnProcessor, KernelAttnProcessor
from sdbench.models.family import Family
from sdbench.models.quiet import without_progress_bars
from sdbench.models.text_encoders import KEY_MAPPING, class_of_text_encoder
from sdbench.models.weights import Weights, draw_weights, initialize_text_encoder

# diffusers' attention processors of a U-Net. The one head of the VAE is too wide, 512, for flash
# attention and cuDNN: VAE and text encoder have eager attention, or the kernel that torch chooses.
ATTENTION: dict[str, Callable[[], Any]] = {
    "eager": AttnProcessor,
    "by_shape": ByShapeAttnProcessor,
    "sdpa": AttnProcessor2_0,
    "flash": functools.partial(KernelAttnProcessor, SDPBackend.FLASH_ATTENTION),
    "cudnn": functools.partial(KernelAttnProcessor, SDPBackend.CUDNN_ATTENTION),
    "efficient": functools.partial(KernelAttnProcessor, SDPBackend.EFFICIENT_ATTENTION),
    "xformers": XFormersAttnProcessor,
}
# How weights are read from a folder.
SAFE = {"use_safetensors": True, "local_files_only": True}


def class_of_part(part: str, family: Family) -> Any:
    """The class of a sub-model, of diffusers or transformers."""
    name = family.parts[part]
    is_text_encoder = part in family.text_encoders
    return class_of_text_encoder(name) if is_text_encoder else getattr(diffusers, name)


def make_part(
    part: str,
    architecture: Architecture,
    *,
    attention: str = "sdpa",
    weights: Weights | None = None,
) -> Any:
    """Make a sub-model, one of `Architecture.modules`, with an attention of `ATTENTION`.

    Its weights are loaded from the folder of the architecture, or drawn if it has none; without a
    seed neither is done. Without `weights` it has shapes only, on the meta device.
    """
    folder = architecture.weights_folder_of(part)
    loads = weights is not None and weights.seed is not None and folder is not None
    is_denoiser = part == architecture.family.denoiser
    is_text_encoder = part in architecture.text_encoders
    kind = attention if is_denoiser or attention == "eager" else "sdpa"
    model_class = class_of_part(part, architecture.family)
    options: dict[str, Any] = {}
    if is_text_encoder:
        # T5 adds a bias to the scores, and transformers has it in eager attention alone.
        options["attn_implementation"] = kind if model_class._supports_sdpa else "eager"
    if loads:
        if is_text_encoder:
            options |= {"dtype": torch.float32, "key_mapping": KEY_MAPPING}
        else:
            # low_cpu_mem_usage=True, diffusers' default, needs accelerate.
            options |= {"torch_dtype": torch.float32, "low_cpu_mem_usage": False}
        with without_progress_bars():
            model, report = model_class.from_pretrained(
                folder / part, **SAFE, **options, output_loading_info=True
            )
        _check_names(report, part=part, folder=folder)
    else:
        config = architecture.parts[part]
        refusing = refuse_errors(
            f"no {part} can be made from the configuration of the model",
            value=architecture.name,
            allowed="a model whose config.json files are as they were saved",
        )
        with torch.device("meta"), refusing:
            if is_text_encoder:
                model = model_class(model_class.config_class(**config, **options))
            else:
                model = model_class.from_config(config)
    network = architecture.family.load_network()
    if is_denoiser:
        network.set_attention(model, kind)
    elif not is_text_encoder:
        model.set_attn_processor(ATTENTION[kind]())
    if loads:
        weights.place(model)
    elif weights is not None:
        initialize = initialize_text_encoder(model) if is_text_encoder else None
        fill_buffers = network.fill_buffers if is_denoiser else None
        draw_weights(model, weights, initialize=initialize, fill_buffers=fill_buffers)
    return model


def _check_names(report: Mapping[str, Iterable[str]], *, part: str, folder: Path) -> None:
    """Raise a ConfigError if a folder lacks weights, which would stay random, or has others."""
    for kind in ("missing", "unexpected"):
        names = sorted(report[f"{kind}_keys"])
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            raise ConfigError(
                f"the weights of the {part} are not those of its configuration: {kind} are "
                f"{', '.join(names[:2])}{more}",
                value=str(folder / part),
                allowed="weights and config.json as they were saved together",
                flag=MODEL_FLAG,
            )


def count_parameters(architecture: Architecture) -> dict[str, int]:
    """Count the weights of each sub-model by their shapes."""
    return {
        part: sum(weight.numel() for weight in make_part(part, architecture).parameters())
        for part in architecture.modules
    }
