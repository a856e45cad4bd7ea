"""Settings that several families cannot have: allowed values and a reason, by setting."""

from __future__ import annotations

from typing import Any

Unsuitable = dict[str, tuple[tuple[Any, ...], str]]

FROZEN_TEXT_ENCODERS: Unsuitable = {
    "train_text_encoder": ((False,), "the text encoders of this kind of model stay frozen"),
    "learned_token": ((None,), "the text encoders of this kind of model stay frozen"),
}
NOT_OF_TRANSFORMERS: Unsuitable = {
    "keep_layout": ((False,), "a transformer without a U-Net has no images to keep a layout of"),
    "convolution": (("torch",), "a transformer without a U-Net has no convolutions to replace"),
    "attention": (
        ("eager", "by_shape", "sdpa", "flash", "cudnn", "efficient"),
        "diffusers has no attention of xformers over pixels and text together",
    ),
}
T5_IN_FP16 = "T5's states are too large for fp16"
