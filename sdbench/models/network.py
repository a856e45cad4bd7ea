"""`Network`: what a family of models computes: encoded captions, predictions, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sdbench.base.conditions import POOLED_EMBEDDING, TEXT_EMBEDDING
from sdbench.models.low_bit import other_buffers

Conditions = Mapping[str, Tensor]
# How diffusers' pipelines name encoded captions.
ARGUMENTS = {TEXT_EMBEDDING: "prompt_embeds", POOLED_EMBEDDING: "pooled_prompt_embeds"}


class Network:
    """The work of a family in torch; a subclass for each.

    Attributes:
        sharded_blocks: Classes of the denoiser's blocks. FSDP gathers the weights of one at a time.
        compiled_blocks: Classes of blocks of all sub-models, which do not contain each other.
        casts_inputs: Whether FSDP may cast all inputs of sharded blocks to the type of weights. It
            may not where times or positions are among them, which bf16 would round.
        transformers: Classes of modules that hold the denoiser's transformer blocks and can
            recompute their activations.
    """

    sharded_blocks: tuple[type[nn.Module], ...]
    compiled_blocks: tuple[type[nn.Module], ...]
    casts_inputs = True
    transformers: tuple[type[nn.Module], ...]

    def encode_text(
        self, encoders: Sequence[nn.Module], ids: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Encode captions, given as the token ids (B, N) for each encoder, to conditions."""
        raise NotImplementedError

    def predict(
        self, denoiser: Any, noised: Tensor, *, times: Tensor, conditions: Conditions
    ) -> Tensor:
        """Call the denoiser.

        `noised` (B, C, H/8, W/8) has the type of the denoiser's weights, conditions any. `times`
        (B,) are those of the schedule, 0 to 1000. Returns a tensor of the shape of `noised`.
        """
        raise NotImplementedError

    def set_attention(self, denoiser: Any, kind: str) -> None:
        """Choose the attention of a denoiser, by a name of `components.ATTENTION`."""
        raise NotImplementedError

    def fill_buffers(self, denoiser: nn.Module) -> None:
        """Fill buffers of a denoiser that was made on the meta device; most have none."""
        names = list(other_buffers(denoiser))
        assert not names, f"the content of these buffers is not known: {names}"

    def pipeline_arguments(self, conditions: Conditions, negative: Conditions) -> dict[str, Any]:
        """Arguments of the pipeline of diffusers for encoded captions and negative captions.

        Both have the type of the denoiser's weights.
        """
        return {
            f"{prefix}{ARGUMENTS[name]}": tensor
            for prefix, encoded in (("", conditions), ("negative_", negative))
            for name, tensor in encoded.items()
        }

    def guidance_arguments(self, scale: float, *, told: float | None) -> dict[str, Any]:
        """Arguments of the pipeline for a scale of classifier-free guidance.

        `told` is the scale that a network with an input for it is told, `Noising.guidance`.
        """
        return {"guidance_scale": scale}
