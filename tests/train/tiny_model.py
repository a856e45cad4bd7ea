"""The tiny model in a folder, as diffusers has it."""

from __future__ import annotations

from pathlib import Path

from sdbench.data.pipeline.tokenizer import CaptionTokenizer
from sdbench.models.architecture import resolve_architecture
from sdbench.models.export import export
from sdbench.models.stable_diffusion import build_stable_diffusion


def write_tiny_model(folder: Path) -> CaptionTokenizer:
    """Write it; returns its tokenizer."""
    architecture = resolve_architecture("tiny")
    built = build_stable_diffusion(
        architecture,
        seed=9,
        precision="fp32",
        encoder_dtype="fp32",
        memory_format="contiguous",
        attention="sdpa",
    )
    tokenizer = CaptionTokenizer(pad_token_id=0)
    export(built, folder, trained={}, tokenizer=tokenizer.for_diffusers(), card="")
    return tokenizer
