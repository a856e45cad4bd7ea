"""What CLIP's text encoders give the families that do not read their last states."""

from __future__ import annotations

from torch import Tensor, nn


def encode_by_clip(encoder: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The states (B, N, D) before the last layer, as SDXL and SD3 take them, and pooled text.

    The pooled text (B, P) is that of a model with a projection; of others it is not of use.
    """
    encoded = encoder(ids, output_hidden_states=True)
    return encoded.hidden_states[-2], encoded[0]
