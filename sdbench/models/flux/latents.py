"""`FluxLatents`: the latents of Flux.1, which its transformer reads in squares of 2 x 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdbench.models.latent_space import LatentSpace

if TYPE_CHECKING:
    from torch import Tensor

# Side of the squares of latents that become one token.
PACK_SIZE = 2


def pack(latents: Tensor) -> Tensor:
    """Latents (B, C, H, W) as tokens (B, H/2 * W/2, 4 C), row by row."""
    squares = latents.unfold(2, PACK_SIZE, PACK_SIZE).unfold(3, PACK_SIZE, PACK_SIZE)
    return squares.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def unpack(tokens: Tensor, *, height: int, width: int) -> Tensor:
    """Tokens as latents (B, C, height, width)."""
    rows, columns = height // PACK_SIZE, width // PACK_SIZE
    squares = tokens.reshape(len(tokens), rows, columns, -1, PACK_SIZE, PACK_SIZE)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, height, width)


class FluxLatents(LatentSpace):
    """Latents that the pipeline takes as tokens."""

    pack = staticmethod(pack)
    unpack = staticmethod(unpack)
