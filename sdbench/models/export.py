"""Writes a trained model as a folder that diffusers' StableDiffusionPipeline loads: safetensors."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizerFast

from sdbench.base.errors import RunError
from sdbench.base.files import check_folder, refused_unless_written, replace_file
from sdbench.base.secrets import redact_values
from sdbench.models.drawing import make_sampler
from sdbench.models.learned_token import LEARNED_FILE_NAME
from sdbench.models.stable_diffusion import StableDiffusion
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
from diffusers import StableDiffusionPipeline

{loading}
pipeline("a prompt").images[0].save("picture.png")
```
"""


def export(
    model: StableDiffusion,
    folder: Path,
    *,
    trained: Mapping[str, Tensor],
    tokenizer: CLIPTokenizerFast,
    dtype: str = "fp32",
    sampler: str = "ddim",
    card: str,
    learned: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model for diffusers atomically: the folder is whole or not there.

    The model must have its encoders and not be sharded; it is not changed. `trained` replaces
    weights, by the name ``<module>.<parameter>``; `learned` has the rows (D,) of learned tokens, by
    token, for a separate file. A weight that is not finite in `dtype` (fp32, fp16 or bf16) is a
    RunError.
    `sampler`, a key of `objective.SAMPLERS`, becomes diffusers' default; `card` is README.md.
    """
    assert model.vae is not None and model.text_encoder is not None
    check_folder(folder)
    weights = model.state_dict() | trained
    # Made from the configurations, without what training has changed in the modules.
    with torch.device("meta"):
        modules: dict[str, nn.Module] = {
            "unet": UNet2DConditionModel.from_config(model.unet.config),
            "vae": AutoencoderKL.from_config(model.vae.config),
            "text_encoder": CLIPTextModel(model.text_encoder.config),
        }
    for part, module in modules.items():
        own = {
            name.removeprefix(f"{part}."): convert(name, weight, dtype=dtype)
            for name, weight in weights.items()
            if name.startswith(f"{part}.")
        }
        module.load_state_dict(own, assign=True)
    pipeline = StableDiffusionPipeline(
        **modules,
        scheduler=make_sampler(sampler, model.scheduler.config),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    with in_one_piece(folder, card=card) as partial:
        pipeline.save_pretrained(partial, safe_serialization=True)
        if learned:
            rows = {token: convert(token, row, dtype=dtype) for token, row in learned.items()}
            save_file(rows, partial / LEARNED_FILE_NAME)


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
    lora_file: str | None = None,
) -> str:
    """The model card: where a model comes from, in Markdown without secrets.

    `sections` has facts by heading (Data, Settings, Figures); `commit` is that of the suite that
    trained. With `lora_file` the folder has only LoRA, else a whole model with `sampler`.
    """
    trained = f"trained by sdbench at commit {commit or 'unknown'}"
    told = (
        f"A Stable Diffusion model {trained}, with the sampler {sampler}. It has no safety checker."
    )
    loading = 'pipeline = StableDiffusionPipeline.from_pretrained("{}"{})'
    if lora_file is None:
        loading = loading.format("THIS_FOLDER", ", local_files_only=True")
    else:
        told = f"LoRA for a Stable Diffusion model, {trained}."
        loading = loading.format("THE_MODEL", "")
        loading += f'\npipeline.load_lora_weights("THIS_FOLDER", weight_name="{lora_file}")'
    tables = ""
    for heading, facts in redact_values(sections).items():
        rows = [f"| {_cell(what)} | {_cell(value)} |\n" for what, value in facts.items()]
        tables += f"\n## {heading}\n\n| what | value |\n|---|---|\n{''.join(rows)}"
    return CARD.format(name=name, told=told, loading=loading) + tables


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
