"""Attention of a transformer over pixels and text together, with a choice of torch's kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdbench.base.errors import ConfigError
from sdbench.models.blocks import MAX_EAGER_SCORES

BY_SHAPE = "by_shape"
# torch's MATH is matrix products; None: torch chooses.
KERNELS = {
    "eager": SDPBackend.MATH,
    BY_SHAPE: SDPBackend.MATH,
    "sdpa": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class JointAttnProcessor:
    """A processor of diffusers whose attention runs on one of torch's kernels."""

    def __init__(self, processor: Any, kind: str) -> None:
        """Wrap a processor; `kind` is a key of `KERNELS`."""
        self._processor = processor
        self._kernel = KERNELS[kind]
        self._max_scores = MAX_EAGER_SCORES if kind == BY_SHAPE else None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Compute attention; a RuntimeError if the kernel does not support these inputs."""
        length = hidden_states.shape[1]
        if encoder_hidden_states is not None:
            length += encoder_hidden_states.shape[1]
        with self._kernels(length):
            return self._processor(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )

    def _kernels(self, length: int) -> AbstractContextManager[Any]:
        """The context of attention among so many tokens."""
        is_long = self._max_scores is not None and length * length > self._max_scores
        return nullcontext() if self._kernel is None or is_long else sdpa_kernel(self._kernel)


def set_joint_attention(denoiser: Any, processor: Any, kind: str) -> None:
    """Give all attention of a transformer a processor of diffusers, with a kernel of `KERNELS`."""
    if kind not in KERNELS:
        raise ConfigError(
            "a transformer over pixels and text has no such attention",
            value=kind,
            allowed=" | ".join(KERNELS),
            flag="--attention",
        )
    denoiser.set_attn_processor(JointAttnProcessor(processor, kind))
