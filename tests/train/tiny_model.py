"""The tiny model, in memory and in a folder."""

from __future__ import annotations

from pathlib import Path

from sdbench.data.pipeline.tokenizer import CaptionTokenizer
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.export import export


def build_tiny(seed: int) -> DiffusionModel:
    """The tiny model with random weights in fp32."""
    return build_model(resolve_architecture("tiny"), seed=seed)


def write_tiny_model(folder: Path) -> CaptionTokenizer:
    """Write it as diffusers has it; returns its tokenizer."""
    tokenizer = CaptionTokenizer(pad_token_id=0)
    tokenizers = {"tokenizer": tokenizer.for_diffusers()}
    export(build_tiny(9), folder, trained={}, tokenizers=tokenizers, card="")
    return tokenizer
