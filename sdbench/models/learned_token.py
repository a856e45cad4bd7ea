"""A new token as the only trained weight of a text encoder but LoRA: textual inversion.

Gal et al. 2022, arXiv 2208.01618.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextModel

from sdbench.models.lora import is_lora
from sdbench.models.weights import change_class

# What diffusers' `load_textual_inversion` looks for in a folder.
LEARNED_FILE_NAME = "learned_embeds.safetensors"


class _OneTokenMore(nn.Embedding):
    """An embedding (V, D) with a token V, whose row `learned` (D,) is a separate weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Embed token ids of any shape (...) to (..., D)."""
        is_learned = input == self.num_embeddings
        known = functional.embedding(input.masked_fill(is_learned, 0), self.weight)
        return torch.where(is_learned[..., None], self.learned.to(known.dtype), known)


def add_learned_token(text_encoder: CLIPTextModel, *, initial_id: int) -> None:
    """Add a token to a text encoder on its device, in place and in fp32; freeze all but LoRA.

    The new token begins with the row of `initial_id`.
    """
    for name, weight in text_encoder.named_parameters():
        weight.requires_grad_(is_lora(name))
    embedding = text_encoder.get_input_embeddings()
    embedding.learned = nn.Parameter(embedding.weight[initial_id].detach().float().clone())
    change_class(embedding, _OneTokenMore)


def append_row(text_encoder: CLIPTextModel, row: Tensor) -> None:
    """Append the row (D,) of a new token to a text encoder without a learned one, in place."""
    rows = torch.cat([text_encoder.get_input_embeddings().weight.detach(), row[None]])
    text_encoder.set_input_embeddings(nn.Embedding.from_pretrained(rows))
    text_encoder.config.vocab_size = len(rows)


def is_learned_row(name: str) -> bool:
    """Return True for the name of the row of a new token in a model."""
    return name.endswith(".token_embedding.learned")
