"""The smallest model, in memory and in a folder."""

from __future__ import annotations

from pathlib import Path

from sdbench.data.batches.tokenizer import CaptionTokenizer, CaptionTokenizers
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.export import export
from sdbench.models.samplers import default_sampler


def build_smallest(seed: int) -> DiffusionModel:
    """The smallest model with random weights in fp32."""
    return build_model(resolve_architecture("nano"), seed=seed)


def write_model(folder: Path, *, name: str = "nano") -> CaptionTokenizer:
    """Write it, or another model, as diffusers has it; returns its first tokenizer."""
    architecture = resolve_architecture(name)
    tokenize = CaptionTokenizers.of(architecture)
    for_diffusers = (tokenizer.for_diffusers() for tokenizer in tokenize.tokenizers)
    export(
        build_model(architecture, seed=9),
        folder,
        trained={},
        tokenizers=dict(zip(architecture.tokenizers, for_diffusers, strict=True)),
        sampler=default_sampler(architecture.parts["scheduler"]),
        card="",
    )
    return tokenize.tokenizers[0]
