"""LoRA files, written and read by diffusers, which also reads files of kohya's sd-scripts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from safetensors import safe_open
from torch import Tensor, nn

from sdbench.models.architecture import Architecture, refuse_errors
from sdbench.models.components import make_part
from sdbench.models.lora import ADAPTER, LAYERS_FLAGS, Lora, lora_layers, merge_lora
from sdbench.models.stable_diffusion import StableDiffusion
from sdbench.settings.lora import LoraFile

# diffusers' own name.
DIFFUSERS_NAME = "pytorch_lora_weights.safetensors"

# Weights by sub-model, and by name: that of the layer with `.lora_A.weight` or `.lora_B.weight`.
LoraWeights = Mapping[str, Mapping[str, Tensor]]


def lora_weights(weights: Mapping[str, Tensor], lora: Lora) -> dict[str, dict[str, Tensor]]:
    """The weights of a training run, by ``<sub-model>.<parameter>``, as peft stores its LoRA."""
    return {
        part: {
            name.removeprefix(f"{part}.").replace(f".{ADAPTER}.", "."): weight
            for name, weight in weights.items()
            if name.startswith(f"{part}.")
        }
        for part, _ in lora.layers
    }


def write_for_diffusers(weights: LoraWeights, file: Path, *, lora: Lora) -> None:
    """Write a file as diffusers' training scripts do, by its pipeline; alpha is in its metadata."""
    arguments: dict[str, Any] = {}
    for part, layers in lora.layers:
        config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha)
        arguments |= {
            f"{part}_lora_layers": convert_state_dict_to_diffusers(dict(weights[part])),
            f"{part}_lora_adapter_metadata": config.to_dict() | {"target_modules": list(layers)},
        }
    StableDiffusionPipeline.save_lora_weights(file.parent, weight_name=file.name, **arguments)


def check_lora_files(files: Sequence[LoraFile], architecture: Architecture) -> None:
    """Raise a ConfigError unless files have LoRA for a model; its weights are not made."""
    for file in files:
        _load(file, {part: make_part(part, architecture) for part in LAYERS_FLAGS})


def fuse_lora_files(model: StableDiffusion, files: Sequence[LoraFile]) -> None:
    """Add LoRA from checked files to the weights of an fp32 model in place; several add up."""
    assert model.text_encoder is not None
    parts = {"unet": model.unet, "text_encoder": model.text_encoder}
    for file in files:
        _load(file, parts)
        for part in parts.values():
            # A file may have other types. Not diffusers' `to`, which warns.
            nn.Module.to(part, torch.float32)
            merge_lora(part, weight=file.weight)
            part.requires_grad_(False)


def _load(file: LoraFile, parts: Mapping[str, nn.Module]) -> None:
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # errors are reported in one sentence
    refusing = refuse_errors(
        "this LoRA cannot be used",
        value=file.path,
        allowed="safetensors in diffusers' or kohya's format, trained on this kind of model",
        flag="--lora",
    )
    try:
        with refusing:
            _load_by_diffusers(Path(file.path), parts)
    finally:
        logger.setLevel(level)


def _load_by_diffusers(path: Path, parts: Mapping[str, nn.Module]) -> None:
    with safe_open(path, "pt") as stored:
        names = list(stored.keys())
    if any("dora_scale" in name or "lora_magnitude_vector" in name for name in names):
        raise ValueError("it is DoRA, whose scales diffusers would leave out")
    tensors, alphas, metadata = StableDiffusionPipeline.lora_state_dict(
        str(path.parent),
        weight_name=path.name,
        use_safetensors=True,  # a pickle is never loaded
        local_files_only=True,
        return_lora_metadata=True,
    )
    strange = [
        name for name in tensors if "lora" not in name or name.partition(".")[0] not in parts
    ]
    if strange or not tensors:
        raise ValueError(f"it has weights that are no LoRA of this model: {strange[:1]}")
    loaders = {
        "unet": StableDiffusionPipeline.load_lora_into_unet,
        "text_encoder": StableDiffusionPipeline.load_lora_into_text_encoder,
    }
    for part, module in parts.items():
        own = [name for name in tensors if name.startswith(f"{part}.")]
        if own:
            options = {part: module, "network_alphas": alphas, "metadata": metadata}
            loaders[part](tensors, adapter_name=ADAPTER, low_cpu_mem_usage=True, **options)
        num_layers = sum(".down." in name or ".lora_A." in name for name in own)
        num_found = len(lora_layers(module))
        if num_found != num_layers:
            # diffusers leaves out the layers that a model has not.
            raise ValueError(f"of {num_layers} layers of its {part}, this model has {num_found}")
