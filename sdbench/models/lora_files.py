"""LoRA files, written and read by diffusers, which also reads files of kohya's sd-scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from safetensors import safe_open
from torch import Tensor, nn

from sdbench.models.architecture import Architecture, refuse_errors
from sdbench.models.components import make_part
from sdbench.models.diffusion import DiffusionModel
from sdbench.models.family import Family
from sdbench.models.lora import ADAPTER, Lora, lora_layers, merge_lora
from sdbench.models.quiet import quiet_diffusers
from sdbench.models.text_encoders import hub_name
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


def write_for_diffusers(weights: LoraWeights, file: Path, *, lora: Lora, family: Family) -> None:
    """Write a file as diffusers' training scripts do, by its pipeline; alpha is in its metadata."""
    arguments: dict[str, Any] = {}
    for part, layers in lora.layers:
        config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha)
        arguments |= {
            f"{part}_lora_layers": convert_state_dict_to_diffusers(dict(weights[part])),
            f"{part}_lora_adapter_metadata": config.to_dict() | {"target_modules": list(layers)},
        }
    pipeline = getattr(diffusers, family.pipeline)
    pipeline.save_lora_weights(file.parent, weight_name=file.name, **arguments)


def check_lora_files(files: Sequence[LoraFile], architecture: Architecture) -> None:
    """Raise a ConfigError unless files have LoRA for a model; its weights are not made."""
    for file in files:
        parts = _parts_with_lora(architecture.family)
        _load(file, {part: make_part(part, architecture) for part in parts}, architecture.family)


def fuse_lora_files(model: DiffusionModel, files: Sequence[LoraFile]) -> None:
    """Add LoRA from checked files to the weights of an fp32 model in place; several add up."""
    parts = {part: model.get_submodule(part) for part in _parts_with_lora(model.family)}
    for file in files:
        _load(file, parts, model.family)
        for part in parts.values():
            # A file may have other types. Not diffusers' `to`, which warns.
            nn.Module.to(part, torch.float32)
            merge_lora(part, weight=file.weight)
            part.requires_grad_(False)


def _parts_with_lora(family: Family) -> tuple[str, ...]:
    """The parts that a file may have LoRA for: denoiser and CLIP, but not T5."""
    clips = [part for part in family.text_encoders if family.parts[part].startswith("CLIP")]
    return (family.denoiser, *clips)


def _hub_name(name: str) -> str:
    """The name in a file, ``<sub-model>.<layer>.<matrix>``, as this suite's models have it."""
    part, _, rest = name.partition(".")
    return f"{part}.{hub_name(rest)}"


def _load(file: LoraFile, parts: Mapping[str, nn.Module], family: Family) -> None:
    refusing = refuse_errors(
        "this LoRA cannot be used",
        value=file.path,
        allowed="safetensors in diffusers' or kohya's format, trained on this kind of model",
        flag="--lora",
    )
    with quiet_diffusers(), refusing:
        _load_by_diffusers(Path(file.path), parts, family)


def _load_by_diffusers(path: Path, parts: Mapping[str, nn.Module], family: Family) -> None:
    with safe_open(path, "pt") as stored:
        names = list(stored.keys())
    if any("dora_scale" in name or "lora_magnitude_vector" in name for name in names):
        raise ValueError("it is DoRA, whose scales diffusers would leave out")
    pipeline = getattr(diffusers, family.pipeline)
    tensors, *alphas, metadata = pipeline.lora_state_dict(
        str(path.parent),
        weight_name=path.name,
        use_safetensors=True,  # a pickle is never loaded
        local_files_only=True,
        return_lora_metadata=True,
        return_alphas=True,
    )
    tensors = {_hub_name(name): tensor for name, tensor in tensors.items()}
    # kohya's scales; the pipeline of SD3 does not read its files, and has none.
    scales = {"network_alphas": alphas[0]} if alphas else {}
    strange = [
        name for name in tensors if "lora" not in name or name.partition(".")[0] not in parts
    ]
    if strange or not tensors:
        raise ValueError(f"it has weights that are no LoRA of this model: {strange[:1]}")
    for part, module in parts.items():
        own = [name for name in tensors if name.startswith(f"{part}.")]
        if own:
            options: dict[str, Any] = {"metadata": metadata, **scales}
            if part == family.denoiser:
                load = getattr(pipeline, f"load_lora_into_{part}")
                options[part] = module
            else:
                load = pipeline.load_lora_into_text_encoder
                options |= {"text_encoder": module, "prefix": part}
            load(tensors, adapter_name=ADAPTER, low_cpu_mem_usage=True, **options)
        num_layers = sum(".down." in name or ".lora_A." in name for name in own)
        num_found = len(lora_layers(module))
        if num_found != num_layers:
            # diffusers leaves out the layers that a model has not.
            raise ValueError(f"of {num_layers} layers of its {part}, this model has {num_found}")
