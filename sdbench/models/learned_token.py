"""`LearnedToken`: a row more in a text encoder's token embedding, of which nothing else is trained.

As textual inversion has it (Gal et al. 2022, arXiv 2208.01618).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import CLIPTextModel

EMBEDDING = "text_model.embeddings.token_embedding"


class LearnedToken(nn.Module):
    """A token embedding (V, D) with one token more, V, whose row is a weight of its own.

    Attributes:
        embedding: The frozen rows.
        learned: The row of the new token (D,), in fp32.
    """

    def __init__(self, embedding: nn.Embedding, *, initial_id: int) -> None:
        """Add the token.

        Args:
            embedding: It is frozen.
            initial_id: The token whose row the new one begins with.
        """
        super().__init__()
        self.embedding = embedding.requires_grad_(False)
        self.learned = nn.Parameter(embedding.weight[initial_id].detach().float().clone())

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed token ids of any shape (...) to (..., D)."""
        is_learned = input_ids == self.embedding.num_embeddings
        known = self.embedding(input_ids.masked_fill(is_learned, 0))
        return torch.where(is_learned[..., None], self.learned.to(known.dtype), known)


def add_learned_token(text_encoder: CLIPTextModel, *, initial_id: int) -> None:
    """Add a token to a text encoder in place, and freeze all its other weights.

    Args:
        text_encoder: Built, on its device.
        initial_id: The token that the new one begins as.
    """
    text_encoder.requires_grad_(False)
    embedding = text_encoder.get_submodule(EMBEDDING)
    text_encoder.set_submodule(EMBEDDING, LearnedToken(embedding, initial_id=initial_id))


def take_learned_row(weights: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Take the row of a new token out of the trained weights of a run.

    Args:
        weights: By the name ``<module>.<parameter>``.

    Returns:
        The row (D,), None where there is none, and the other weights.
    """
    name = f"text_encoder.{EMBEDDING}.learned"
    others = {other: weight for other, weight in weights.items() if other != name}
    return weights.get(name), others


def append_row(text_encoder: CLIPTextModel, row: Tensor) -> None:
    """Give the token embedding of a text encoder a row more, in place.

    Args:
        text_encoder: Without a learned token.
        row: Of the new token, (D,).
    """
    embedding = text_encoder.get_submodule(EMBEDDING)
    rows = torch.cat([embedding.weight.detach(), row[None].to(embedding.weight)])
    text_encoder.set_submodule(EMBEDDING, nn.Embedding.from_pretrained(rows))
    text_encoder.config.vocab_size = len(rows)
