"""A new token of a text encoder, of which nothing else is trained.

As textual inversion has it (Gal et al. 2022, arXiv 2208.01618).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextModel

from sdbench.models.compat import change_class

# What diffusers' `load_textual_inversion` looks for in a folder.
LEARNED_FILE_NAME = "learned_embeds.safetensors"


class _OneTokenMore(nn.Embedding):
    """An embedding (V, D) with the token V, whose row `learned` (D,) is a weight of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Embed token ids of any shape (...) to (..., D)."""
        is_learned = input == self.num_embeddings
        known = functional.embedding(input.masked_fill(is_learned, 0), self.weight)
        return torch.where(is_learned[..., None], self.learned.to(known.dtype), known)


def add_learned_token(text_encoder: CLIPTextModel, *, initial_id: int) -> None:
    """Add a token to a text encoder in place, in fp32, and freeze all its weights.

    Args:
        text_encoder: Built, on its device.
        initial_id: The token that the new one begins as.
    """
    text_encoder.requires_grad_(False)
    embedding = text_encoder.get_input_embeddings()
    embedding.learned = nn.Parameter(embedding.weight[initial_id].detach().float().clone())
    change_class(embedding, _OneTokenMore)


def append_row(text_encoder: CLIPTextModel, row: Tensor) -> None:
    """Make a new token one of the text encoder's own, in place.

    Args:
        text_encoder: Without a learned token.
        row: Of the new token, (D,).
    """
    rows = torch.cat([text_encoder.get_input_embeddings().weight.detach(), row[None]])
    text_encoder.set_input_embeddings(nn.Embedding.from_pretrained(rows))
    text_encoder.config.vocab_size = len(rows)


def is_learned_row(name: str) -> bool:
    """Whether a weight is the row of a new token, by its name in a model."""
    return name.endswith(".token_embedding.learned")
