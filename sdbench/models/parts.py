"""`replace_parts`: puts parts from elsewhere into a model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.models.architecture import (
    CONFIG_FILES,
    PAD_TOKEN_IDS,
    Architecture,
    refuse_errors,
    resolve_architecture,
)

PARTS_FLAG = "--model_parts"


def replace_parts(
    architecture: Architecture, parts: Mapping[str, Mapping[str, Any]]
) -> Architecture:
    """Put other parts into a model.

    `parts` has an entry for each part to replace: ``{"pretrained": model}`` gives it the
    configuration and weights of that model, ``{"params": configuration}`` random weights.
    """
    unknown = sorted(parts.keys() - CONFIG_FILES.keys())
    if unknown:
        raise ConfigError(
            "a model has no such part",
            value=unknown[0],
            allowed=" | ".join(CONFIG_FILES),
            flag=PARTS_FLAG,
        )
    for part, given in parts.items():
        if "params" in given:
            params = dict(given["params"])
            changes: dict[str, Any] = {part: _pad_token(params) if part == "tokenizer" else params}
            folder = tokenizer_folder = None
            if part != "tokenizer":
                _check_params(part, params)
        else:
            source = resolve_architecture(given["pretrained"])
            changes = {part: getattr(source, part)}
            folder, tokenizer_folder = source.weights_folder, source.tokenizer_folder
        if part == "tokenizer":
            changes["tokenizer_folder"] = tokenizer_folder
        folders = {**architecture.part_folders, part: folder}
        architecture = dataclasses.replace(architecture, part_folders=folders, **changes)
    _check_widths(architecture)
    return architecture


def _pad_token(params: Mapping[str, Any]) -> dict[str, Any]:
    if params.keys() != {"pad_token"} or params["pad_token"] not in PAD_TOKEN_IDS:
        raise ConfigError(
            "a tokenizer is CLIP's or comes from a folder",
            value=params,
            allowed=f"pad_token alone, {' or '.join(PAD_TOKEN_IDS)}",
            flag=PARTS_FLAG,
        )
    return {"pad_token_id": PAD_TOKEN_IDS[params["pad_token"]]}


def _check_params(part: str, params: Mapping[str, Any]) -> None:
    """Make the part on the meta device; diffusers itself ignores unknown parameters."""
    import torch
    from diffusers import DDPMScheduler
    from transformers import CLIPTextConfig

    from sdbench.models.components import PARTS

    classes = {**PARTS, "text_encoder": CLIPTextConfig, "scheduler": DDPMScheduler}
    part_class: Any = classes[part]
    known = inspect.signature(part_class.__init__).parameters
    unknown = sorted(params.keys() - known.keys())
    refusing = refuse_errors(
        f"no {part} can be made from these numbers",
        value=dict(params),
        allowed=f"parameters of {part_class.__name__} that fit together",
        flag=PARTS_FLAG,
    )
    with refusing, torch.device("meta"):
        if unknown:
            raise ValueError(f"no such parameter: {unknown[0]}")
        part_class(**params)


def _check_widths(architecture: Architecture) -> None:
    """Check that the U-Net can read latents and text."""
    unet = architecture.unet
    text_width = architecture.text_encoder.get("hidden_size")
    latent_width = architecture.vae.get("latent_channels")
    for part, key, allowed in (
        ("text encoder's states", "cross_attention_dim", text_width),
        ("VAE's latents", "in_channels", latent_width),
    ):
        if unet.get(key) != allowed:
            raise ConfigError(
                f"the U-Net's {key} is not the width of the {part}",
                value=unet.get(key),
                allowed=str(allowed),
                flag=PARTS_FLAG,
            )
