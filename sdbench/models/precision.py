"""Which number formats does each precision mean?"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NumberFormats:
    """Types of one precision.

    Attributes:
        weights: Of the U-Net's parameters, and so of its gradients and optimizer state.
        autocast: Type that autocast computes in; None computes in the weights' type.
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
