"""The VAE's own training: its loss against diffusers' distribution, and that it falls."""

from __future__ import annotations

import pytest
import torch

from sdbench.models.architecture import resolve_architecture
from sdbench.models.autoencoder import Autoencoder, build_autoencoder

MINI = resolve_architecture("mini")
KL_WEIGHT = 0.01


def build(precision: str = "fp32") -> Autoencoder:
    return build_autoencoder(MINI, seed=3, precision=precision, kl_weight=KL_WEIGHT)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    flat = torch.randint(0, 256, (2, 3, 1, 1), dtype=torch.uint8, generator=generator)
    return flat.expand(2, 3, 32, 32).contiguous()


def test_the_loss_is_squared_error_plus_divergence(images) -> None:
    model = build()
    pixels = images.float() / 127.5 - 1
    with torch.no_grad():
        torch.manual_seed(7)
        loss = model.loss(*model({"image": images}))
        torch.manual_seed(7)
        distribution = model.vae.encode(pixels).latent_dist
        latents = distribution.mean + distribution.std * torch.randn(distribution.mean.shape)
        decoded = model.vae.decode(latents).sample
        divergence = distribution.kl() / latents[0].numel()  # kl() is a sum over the latents
    expected = (decoded - pixels).square().mean() + KL_WEIGHT * divergence.mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    first, second = (model.reconstruction_errors({"image": images}) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_the_loss_falls_and_reaches_every_weight(images, precision) -> None:
    torch.manual_seed(0)
    model = build(precision)
    # At twice this rate the loss jumps back to its first value at some steps, in fp32 too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        loss = model.loss(*model({"image": images}))
        loss.backward()
        assert all(weight.grad is not None for weight in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
