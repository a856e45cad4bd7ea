"""The number formats of each precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NumberFormats:
    """Types of one precision.

    Attributes:
        weights: Type of trained weights, their gradients and optimizer state; with LoRA, which is
            in fp32, of the frozen weights beside it.
        autocast: Type that autocast computes in; None: no autocast.
    """

    weights: torch.dtype
    autocast: torch.dtype | None


PRECISIONS = {
    "fp32": NumberFormats(torch.float32, None),
    "tf32": NumberFormats(torch.float32, None),
    "amp_fp16": NumberFormats(torch.float32, torch.float16),
    "amp_bf16": NumberFormats(torch.float32, torch.bfloat16),
    "bf16": NumberFormats(torch.bfloat16, None),
}
ENCODER_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
