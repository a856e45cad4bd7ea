"""Which named recipes are there, and what does each of them set?

A preset sets the speed-ups and nothing else. A value may differ by device: `PerDevice` holds both
and sdbench/resolve.py takes the one for the machine at hand.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class PerDevice:
    """A preset's value for a GPU and for a CPU."""

    gpu: str
    cpu: str

    def __str__(self) -> str:
        return f"{self.gpu} on a GPU, {self.cpu} on a CPU"


# mosaicml/diffusion-benchmark @c7f3cff: precision is left to Composer, whose default is amp_fp16 on
# a GPU and fp32 on a CPU (composer/trainer/trainer.py, 0.32.1); encoders stay in fp32; AdamW gets
# the parameters of the frozen encoders too; images arrive as float32.
SEED: dict[str, Any] = {
    "precision": PerDevice(gpu="amp_fp16", cpu="fp32"),
    "encoder_dtype": "fp32",
    "memory_format": "contiguous",
    "optimizer": "adamw",
    "optimizer_params": "all",
    "ema_impl": "composer",
    "image_dtype": "float32",
    "cpu_allocator": "default",
}

FAST: dict[str, Any] = {
    "precision": "amp_bf16",
    "encoder_dtype": "bf16",
    "memory_format": "channels_last",
    "optimizer": "adamw_fused",
    "optimizer_params": "trainable",
    "ema_impl": "foreach",
    "image_dtype": "uint8",
    "cpu_allocator": PerDevice(gpu="default", cpu="keep"),
}

PRESETS: dict[str, dict[str, Any]] = {"fast": FAST, "seed": SEED}
