"""The tokenizer of a model, for its prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdbench.data.pipeline.tokenizer import CaptionTokenizer
    from sdbench.models.architecture import Architecture


def make_tokenizer(architecture: Architecture, *, new_token: str | None = None) -> CaptionTokenizer:
    """The tokenizer of a model, with the learned word if there is one."""
    from sdbench.data.pipeline.tokenizer import CaptionTokenizer

    return CaptionTokenizer(
        folder=architecture.tokenizer_folder,
        pad_token_id=architecture.tokenizer["pad_token_id"],
        new_token=new_token,
    )
