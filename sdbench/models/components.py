"""Makes the sub-models of a model, with saved or random weights, and counts the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    XFormersAttnProcessor,
)
from torch import nn
from torch.nn.attention import SDPBackend

from sdbench.base.errors import ConfigError
from sdbench.base.outside import refuse_errors
from sdbench.models.architecture import MODEL_FLAG, PARTS_FLAG, Architecture
from sdbench.models.blocks import ByShapeAttnProcessor, KernelAttnProcessor
from sdbench.models.family import Family
from sdbench.models.stored import FLOATS, StoredWeight, compare_weights
from sdbench.models.text_encoders import class_of_text_encoder
from sdbench.models.weights import (
    Weights,
    draw_weights,
    initialize_text_encoder,
    load_weights,
    own_weights,
)

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
    seed neither is done. Without `weights` it has shapes only, on the meta device. In any case the
    files in the folder have all its weights and no others, or a ConfigError says how they differ.
    """
    is_denoiser = part == architecture.family.denoiser
    is_text_encoder = part in architecture.text_encoders
    kind = attention if is_denoiser or attention == "eager" else "sdpa"
    model_class = class_of_part(part, architecture.family)
    config = architecture.parts[part]
    refusing = refuse_errors(
        f"no {part} can be made from the configuration of the model",
        value=architecture.name,
        allowed="a model whose config.json files are as they were saved",
        flag=MODEL_FLAG,
    )
    with torch.device("meta"), refusing:
        if is_text_encoder:
            # T5 adds a bias to the scores, and transformers has it in eager attention alone.
            own_kind = kind if model_class._supports_sdpa else "eager"
            options = {"attn_implementation": own_kind, "dtype": torch.float32}
            model = model_class(model_class.config_class(**{**config, **options}))
        else:
            model = model_class.from_config(config)
    folder = architecture.weights_folder_of(part)
    stored = architecture.stored_weights(part)
    flag = PARTS_FLAG if part in architecture.part_folders else MODEL_FLAG
    if folder is not None:
        _check_stored(stored, model, part=part, place=str(folder / part), flag=flag)
    network = architecture.family.load_network()
    if is_denoiser:
        network.set_attention(model, kind)
    elif not is_text_encoder:
        model.set_attn_processor(ATTENTION[kind]())
    if folder is not None and weights is not None and weights.seed is not None:
        load_weights(model, weights, stored, flag=flag)
    elif weights is not None:
        initialize = initialize_text_encoder(model) if is_text_encoder else None
        fill_buffers = network.fill_buffers if is_denoiser else None
        draw_weights(model, weights, initialize=initialize, fill_buffers=fill_buffers)
    return model


def _check_stored(
    stored: Mapping[str, StoredWeight], model: nn.Module, *, part: str, place: str, flag: str
) -> None:
    """Raise a ConfigError unless files have the weights of a model, as numbers."""
    compare_weights(
        {name: tuple(weight.shape) for name, weight in own_weights(model).items()},
        {name: one.shape for name, one in stored.items()},
        what=f"the weights of the {part} are not those of its config.json",
        value=place,
        allowed="weights and config.json as they were saved together",
        flag=flag,
    )
    integers = [name for name, one in stored.items() if one.dtype not in FLOATS]
    if integers:
        raise ConfigError(
            f"{len(integers)} of {len(stored)} weights of the {part} are no floating-point numbers",
            value=f"{place}: {integers[0]} is {stored[integers[0]].dtype}",
            allowed="weights of a model that is not quantized",
            flag=flag,
        )


def check_folders(architecture: Architecture) -> None:
    """Raise a ConfigError unless all parts that come from folders have exactly their weights."""
    for part in architecture.modules:
        if part not in architecture.random_parts:
            make_part(part, architecture)


def count_parameters(architecture: Architecture) -> dict[str, int]:
    """Count the weights of each sub-model by their shapes."""
    return {
        part: sum(weight.numel() for weight in make_part(part, architecture).parameters())
        for part in architecture.modules
    }
