"""Writes a trained model as a folder that a pipeline of diffusers loads: safetensors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from sdbench.base.errors import RunError
from sdbench.base.files import check_folder, refused_unless_written, replace_file
from sdbench.base.secrets import redact_values
from sdbench.models.components import class_of_part
from sdbench.models.diffusion import DiffusionModel
from sdbench.models.drawing import make_pipeline, make_sampler
from sdbench.models.family import Family
from sdbench.models.learned_token import LEARNED_FILE_NAME
from sdbench.models.quiet import quiet_diffusers, quiet_transformers
from sdbench.models.weights import ENCODER_DTYPES

CARD_NAME = "README.md"
CARD = """\
---
library_name: diffusers
pipeline_tag: text-to-image
---

# {name}

{told}

```python
from diffusers import {pipeline}

{loading}
pipeline({call}).images[0].save("picture.png")
```
"""


def export(
    model: DiffusionModel,
    folder: Path,
    *,
    trained: Mapping[str, Tensor],
    tokenizers: Mapping[str, Any],
    dtype: str = "fp32",
    sampler: str | None = None,
    card: str,
    learned: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model for diffusers atomically: the folder is whole or not there.

    The model must have its encoders and not be sharded; it is not changed. `trained` replaces
    weights, by the name ``<module>.<parameter>``; `tokenizers` are those of transformers, by their
    names in the folder; `learned` has the rows (D,) of learned tokens, by token, for a separate
    file. A weight that is not finite in `dtype` (fp32, fp16 or bf16) is a RunError.
    `sampler`, one of `samplers.sampler_names`, becomes diffusers' default; `card` is README.md.
    """
    assert model.vae is not None and model.text_encoders
    check_folder(folder)
    weights = model.state_dict() | trained
    family = model.family
    with torch.device("meta"):
        modules = {
            name: _make_alike(module, name, family)
            for name, module in model.named_children()
            if name in family.parts
        }
    for part, module in modules.items():
        own = {
            name.removeprefix(f"{part}."): convert(name, weight, dtype=dtype)
            for name, weight in weights.items()
            if name.startswith(f"{part}.")
        }
        module.load_state_dict(own, assign=True)
    scheduler = make_sampler(sampler, model.objective.config)
    pipeline = make_pipeline(model, {**modules, **tokenizers}, sampler=scheduler)
    with in_one_piece(folder, card=card) as partial:
        # diffusers warns of each part that the model lacks.
        with quiet_diffusers(), quiet_transformers():
            pipeline.save_pretrained(partial, safe_serialization=True)
        for file in partial.glob("*/tokenizer_config.json"):
            _name_tokens_as_hub(file)
        if learned:
            rows = {token: convert(token, row, dtype=dtype) for token, row in learned.items()}
            save_file(rows, partial / LEARNED_FILE_NAME)


def _make_alike(module: Any, part: str, family: Family) -> nn.Module:
    """The module as its configuration says, without what training has changed in it."""
    kind = class_of_part(part, family)
    return kind(module.config) if part in family.text_encoders else kind.from_config(module.config)


def _name_tokens_as_hub(file: Path) -> None:
    """Name the further tokens of a tokenizer as the hub does; transformers 4 reads no other name.

    transformers 5 saves them under a name that is that of a mapping in transformers 4.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
        replace_file(file, json.dumps(config, indent=2) + "\n")


@contextlib.contextmanager
def in_one_piece(folder: Path, *, card: str) -> Iterator[Path]:
    """Yield a hidden folder, which becomes `folder`, new or empty, when it is whole."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        with refused_unless_written(folder, what="the model folder", flag="--folder"):
            partial.mkdir(parents=True)
            try:
                yield partial
            except SafetensorError as error:  # of its own even if the disk is full
                raise OSError(str(error)) from None
            replace_file(partial / CARD_NAME, card)
            partial.replace(folder)  # or an empty folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def convert(name: str, weight: Tensor, *, dtype: str) -> Tensor:
    """Convert a weight to a type, contiguous on the CPU; a RunError if it is not finite there."""
    converted = weight.detach().to("cpu", ENCODER_DTYPES[dtype]).contiguous()
    if not torch.isfinite(converted).all():
        raise RunError(f"the weight {name} is not finite in {dtype}")
    return converted


def make_card(
    name: str,
    *,
    sections: Mapping[str, Mapping[str, Any]],
    commit: str | None,
    sampler: str | None,
    family: Family,
    lora_file: str | None = None,
    absent: Sequence[str] = (),
    num_t5_tokens: int | None = None,
) -> str:
    """The model card: where a model comes from, in Markdown without secrets.

    `sections` has facts by heading (Data, Settings, Figures); `commit` is that of the suite that
    trained. With `lora_file` the folder has only LoRA, else a whole model with `sampler`. A
    pipeline has to be told the optional parts that are `absent`, and with T5 `num_t5_tokens`, those
    of training.
    """
    trained = f"trained by sdbench at commit {commit or 'unknown'}"
    told = (
        f"{family.title[0].upper()}{family.title[1:]} {trained}, with the sampler {sampler}. "
        "It has no safety checker."
    )
    without = "".join(f", {part}=None" for part in absent)
    loading = 'pipeline = {}.from_pretrained("{}"{})'
    if lora_file is None:
        options = f", local_files_only=True{without}"
        loading = loading.format(family.pipeline, "THIS_FOLDER", options)
    else:
        told = f"LoRA for {family.title}, {trained}."
        loading = loading.format(family.pipeline, "THE_MODEL", without)
        loading += f'\npipeline.load_lora_weights("THIS_FOLDER", weight_name="{lora_file}")'
    tables = ""
    for heading, facts in redact_values(sections).items():
        rows = [f"| {_cell(what)} | {_cell(value)} |\n" for what, value in facts.items()]
        tables += f"\n## {heading}\n\n| what | value |\n|---|---|\n{''.join(rows)}"
    call = '"a prompt"'
    if num_t5_tokens is not None:
        call += f", max_sequence_length={num_t5_tokens}"
    card = CARD.format(name=name, told=told, pipeline=family.pipeline, loading=loading, call=call)
    return card + tables


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
