"""How many tokens of T5 a model reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdbench.base.conditions import Captions

if TYPE_CHECKING:
    from sdbench.models.architecture import Architecture


def read_by_t5(
    architecture: Architecture, tokenizer: str, *, name: str, num_tokens: int
) -> Captions:
    """Captions of `num_tokens`, or fewer if the tokenizer's configuration has a `num_tokens`."""
    own = architecture.parts[tokenizer].get("num_tokens", num_tokens)
    return architecture.t5_captions(tokenizer, name=name, num_tokens=min(own, num_tokens))
