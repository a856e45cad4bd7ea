"""`Autoencoder`: a VAE with the loss that trains it to give back images from small latents."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from sdbench.models.architecture import Architecture
from sdbench.models.components import make_part
from sdbench.models.diffusion import MEMORY_FORMATS, encode_images, sample_latents, to_pixels
from sdbench.models.weights import PRECISIONS, Weights, autocast


class Autoencoder(nn.Module):
    """The VAE of a diffusion model, alone.

    The loss is the mean squared error of the pixels in [-1, 1], plus `kl_weight` times the mean
    over latents of their divergence from a standard normal distribution. The divergence brings the
    latents to about unit variance, so that a scaling factor of 1 suits them.
    """

    def __init__(
        self,
        vae: AutoencoderKL,
        *,
        kl_weight: float,
        autocast_dtype: torch.dtype | None,
        memory_format: torch.memory_format,
    ) -> None:
        super().__init__()
        self.vae = vae
        self._kl_weight = kl_weight
        self._autocast_dtype = autocast_dtype
        self._memory_format = memory_format

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Encode images, draw latents, and decode them.

        The batch has `image`, as `to_pixels` takes it. Returns the squared errors (B,) and the
        divergences (B,), both in fp32.
        """
        mean, logvar = self._encode(batch["image"])
        noise = torch.randn(mean.shape, device=mean.device)
        latents = sample_latents(mean, logvar, noise=noise)
        divergence = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar)
        return self._errors(latents, batch["image"]), divergence.flatten(1).mean(1)

    def loss(self, errors: Tensor, divergences: Tensor) -> Tensor:
        """The loss of what `forward` returns, a scalar."""
        return errors.mean() + self._kl_weight * divergences.mean()

    @torch.no_grad()
    def reconstruction_errors(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean squared errors (B,) of the images of a batch, by the means of their latents."""
        mean, _ = self._encode(batch["image"])
        return self._errors(mean, batch["image"])

    def _encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(images.device, self._autocast_dtype):
            return encode_images(self.vae, images, memory_format=self._memory_format)

    def _errors(self, latents: Tensor, images: Tensor) -> Tensor:
        with autocast(images.device, self._autocast_dtype):
            decoded = self.vae.decode(latents.to(self.vae.dtype)).sample
        return (decoded.float() - to_pixels(images, torch.float32)).square().mean((1, 2, 3))


def build_autoencoder(
    architecture: Architecture,
    *,
    seed: int | None,
    precision: str = "fp32",
    memory_format: str = "contiguous",
    attention: str = "sdpa",
    kl_weight: float,
    device: str | torch.device = "cpu",
) -> Autoencoder:
    """Build a VAE that is ready to train; arguments are as for `build_model`."""
    numbers, layout = PRECISIONS[precision], MEMORY_FORMATS[memory_format]
    weights = Weights(seed=seed, device=device, dtype=numbers.weights, memory_format=layout)
    model = Autoencoder(
        make_part("vae", architecture, attention=attention, weights=weights),
        kl_weight=kl_weight,
        autocast_dtype=numbers.autocast,
        memory_format=layout,
    )
    return model.train()
