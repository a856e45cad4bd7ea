"""What CLIP's text encoders give the families that do not read their last states."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def encode_by_clip(encoder: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The states (B, N, D) before the last layer, as SDXL and SD3 take them, and pooled text.

    The pooled text (B, P) is that of a model with a projection; of others it is not of use. The
    states are what the last layer gets: transformers 5 records hidden states by hooks that
    torch.compile cannot trace.
    """
    # A CLIPTextModel of transformers 5.6 and later lacks this level.
    last = getattr(encoder, "text_model", encoder).encoder.layers[-1]
    if not hasattr(last, "states"):
        last.states = None
        last.register_forward_pre_hook(_keep_states)
    pooled = encoder(ids)[0]
    states, last.states = last.states, None
    return states, pooled


def _keep_states(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    layer.states = inputs[0]
