"""The number formats of each precision, and autocast to one of them."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class NumberFormats:
    """Types of trained weights, their gradients and state, and of autocast, if there is one.

    LoRA is in fp32; the frozen weights beside it have the type of weights.
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


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Torch's autocast to a type; None: no autocast."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)
