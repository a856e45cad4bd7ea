"""`LatentSpace`: the latents that a denoiser is trained on, made of those of the VAE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdbench.base.conditions import SCALING_FACTOR

if TYPE_CHECKING:
    from torch import Tensor


class LatentSpace:
    """Latents (B, C, H/f, W/f) of about zero mean and unit variance: (the VAE's - shift) * scale.

    A family whose VAE has other statistics, or whose pipeline packs latents, has a subclass.

    Attributes:
        num_channels: Channels of the VAE's latents.
        factor: Pixels per latent along a side: the VAE halves between blocks, 2^3 = 8 with four.
        scale: What brings latents to about unit variance.
        shift: Their mean; None: none is taken off.
    """

    def __init__(self, vae: Mapping[str, Any]) -> None:
        """Read the configuration of a VAE, as diffusers saves it."""
        self.num_channels: int = vae["latent_channels"]
        self.factor = 2 ** (len(vae["block_out_channels"]) - 1)
        self.scale: float = vae.get("scaling_factor", SCALING_FACTOR)
        self.shift: float | None = vae.get("shift_factor")

    def normalize(self, latents: Tensor) -> Tensor:
        """The VAE's latents as the denoiser takes them."""
        return (latents if self.shift is None else latents - self.shift) * self.scale

    def restore(self, latents: Tensor) -> Tensor:
        """The denoiser's latents as the VAE takes them."""
        unscaled = latents / self.scale
        return unscaled if self.shift is None else unscaled + self.shift

    def pack(self, latents: Tensor) -> Tensor:
        """The denoiser's latents as the pipeline of diffusers takes them."""
        return latents

    def unpack(self, latents: Tensor, *, height: int, width: int) -> Tensor:
        """The pipeline's latents as (B, C, height, width)."""
        return latents
