"""`replace_parts`: puts parts from elsewhere into a model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.outside import refuse_errors
from sdbench.models.architecture import (
    PAD_TOKEN_IDS,
    PARTS_FLAG,
    Architecture,
    resolve_architecture,
)


def replace_parts(
    architecture: Architecture, parts: Mapping[str, Mapping[str, Any]]
) -> Architecture:
    """Put other parts into a model.

    `parts` has an entry for each part to replace: ``{"pretrained": model}`` gives it the
    configuration and weights of that model, ``{"params": configuration}`` random weights.
    """
    unknown = sorted(parts.keys() - architecture.parts.keys())
    if unknown:
        raise _refuse_part(unknown[0], architecture)
    for part, given in parts.items():
        folder = tokenizer_folder = None
        kind = architecture.family.tokenizers.get(part)
        if "params" in given:
            params = dict(given["params"])
            if kind is None:
                _check_params(part, params, architecture)
            else:
                params = _pad_token(params, kind=kind)
        else:
            source = resolve_architecture(given["pretrained"])
            if part not in source.parts:
                raise _refuse_part(part, source)
            kinds = [_kind_of_part(part, one) for one in (architecture, source)]
            if kinds[0] != kinds[1]:
                raise ConfigError(
                    f"the {part} of {source.name} is of another kind",
                    value=kinds[1],
                    allowed=kinds[0],
                    flag=PARTS_FLAG,
                )
            params = source.parts[part]
            folder, tokenizer_folder = source.weights_folder, source.tokenizer_folders.get(part)
        folders = {**architecture.part_folders, part: folder}
        tokenizer_folders = dict(architecture.tokenizer_folders)
        if kind is not None:
            tokenizer_folders.pop(part, None)
            if tokenizer_folder is not None:
                tokenizer_folders[part] = tokenizer_folder
        architecture = dataclasses.replace(
            architecture,
            parts={**architecture.parts, part: params},
            part_folders=folders,
            tokenizer_folders=tokenizer_folders,
        )
    _check_widths(architecture)
    return architecture


def _kind_of_part(part: str, architecture: Architecture) -> str:
    """The class of a sub-model, the kind of a tokenizer, or the objective of a scheduler."""
    family = architecture.family
    return {**family.parts, **family.tokenizers, "scheduler": family.objective}[part]


def _refuse_part(part: str, architecture: Architecture) -> ConfigError:
    return ConfigError(
        f"{architecture.name} has no such part",
        value=part,
        allowed=" | ".join(architecture.parts),
        flag=PARTS_FLAG,
    )


def _pad_token(params: Mapping[str, Any], *, kind: str) -> dict[str, Any]:
    known = PAD_TOKEN_IDS[kind]
    if params.keys() != {"pad_token"} or params["pad_token"] not in known:
        raise ConfigError(
            "a tokenizer is the one of this suite or comes from a folder",
            value=params,
            allowed=f"pad_token alone, {' or '.join(known)}",
            flag=PARTS_FLAG,
        )
    return {"pad_token_id": known[params["pad_token"]]}


def _check_params(part: str, params: Mapping[str, Any], architecture: Architecture) -> None:
    """Make the part on the meta device; diffusers itself ignores unknown parameters."""
    import diffusers
    import torch

    from sdbench.models.components import class_of_part

    part_class: Any
    if part == "scheduler":
        part_class = getattr(diffusers, architecture.family.scheduler)
    else:
        part_class = class_of_part(part, architecture.family)
        # Models of transformers take a configuration, which takes the parameters.
        if part in architecture.text_encoders:
            part_class = part_class.config_class
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
    """Check that the denoiser can read latents and text."""
    family = architecture.family
    denoiser = architecture.parts[family.denoiser]
    for key, (what, allowed) in family.widths(architecture.parts).items():
        value = denoiser.get(key)
        if value != allowed:
            raise ConfigError(
                f"the {family.denoiser}'s {key} is not the width of the {what}",
                value=value,
                allowed=str(allowed),
                flag=PARTS_FLAG,
            )
