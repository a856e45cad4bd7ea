"""The loss is that of the forward process with all options; frozen sub-models get no gradients."""

from __future__ import annotations

import math

import pytest
import torch

from sdbench.models.architecture import resolve_architecture
from sdbench.models.stable_diffusion import StableDiffusion, build_stable_diffusion

TINY = resolve_architecture("tiny")


def build(*, seed=3, **changes) -> StableDiffusion:
    return build_stable_diffusion(TINY, seed=seed, **changes)


@pytest.fixture(scope="module")
def model() -> StableDiffusion:
    return build()


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        "image": torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=generator),
        "input_ids": torch.randint(0, 49408, (2, 77), generator=generator),
    }


def loss_of(model: StableDiffusion, batch: dict[str, torch.Tensor], *, seed: int = 5) -> float:
    torch.manual_seed(seed)
    with torch.no_grad():
        return StableDiffusion.loss(*model(batch)).item()


def signal_power_by_formula() -> list[float]:
    """Cumulative products of 1 - beta; the square roots of the betas are evenly spaced."""
    power, powers = 1.0, []
    for step in range(1000):
        root = math.sqrt(0.00085) + step / 999 * (math.sqrt(0.012) - math.sqrt(0.00085))
        power *= 1 - root**2
        powers.append(power)
    return powers


def test_loss_equals_the_forward_process_written_by_hand(model, batch) -> None:
    measured = loss_of(model, batch, seed=5)
    torch.manual_seed(5)
    with torch.no_grad():
        moments = model.vae.quant_conv(model.vae.encoder(batch["image"] / 127.5 - 1))
        mean, logvar = moments[:, :4], moments[:, 4:]
        latents = 0.18215 * (mean + (logvar / 2).exp() * torch.randn(2, 4, 8, 8))
        states = model.text_encoder(batch["input_ids"]).last_hidden_state
        steps = torch.randint(0, 1000, (2,))
        noise = torch.randn(2, 4, 8, 8)
        powers = signal_power_by_formula()
        total = 0.0
        for i, step in enumerate(steps.tolist()):
            alpha, sigma = math.sqrt(powers[step]), math.sqrt(1 - powers[step])
            noised = alpha * latents[i] + sigma * noise[i]
            predicted = model.unet(noised[None], step, states[i : i + 1]).sample[0]
            total += ((predicted - noise[i]) ** 2).sum().item()
    assert measured == pytest.approx(total / (2 * 4 * 8 * 8), rel=1e-4)


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_the_form_of_the_images_changes_nothing(batch, memory_format) -> None:
    """Bit for bit: the values are the same, and the model brings them to a layout of its own."""
    model, pixels = build(memory_format=memory_format), batch["image"]
    expected = loss_of(model, batch)
    for images in (pixels, pixels.float() / 127.5 - 1.0):
        for layout in (torch.contiguous_format, torch.channels_last):
            turned = {**batch, "image": images.contiguous(memory_format=layout)}
            assert loss_of(model, turned) == expected
    assert loss_of(model, batch, seed=6) != expected


def test_precisions_set_the_types() -> None:
    amp = build(precision="amp_bf16", encoder_dtype="bf16")
    assert (amp.unet.dtype, amp.autocast_dtype) == (torch.float32, torch.bfloat16)
    assert amp.vae.dtype == amp.text_encoder.dtype == torch.bfloat16
    pure = build(precision="bf16")
    assert (pure.unet.dtype, pure.autocast_dtype) == (torch.bfloat16, None)
    assert pure.signal_scale.dtype == torch.float32
    # Weights that are trained have the precision's type, encoders or not.
    both = build(precision="amp_bf16", encoder_dtype="bf16", trained=("unet", "text_encoder"))
    assert (both.vae.dtype, both.text_encoder.dtype) == (torch.bfloat16, torch.float32)


def test_seed_decides_the_weights_and_leaves_the_generator_alone(model) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again, other = build(seed=3).state_dict(), build(seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in again.items())
    changed = {name for name, value in other.items() if not torch.equal(weights[name], value)}
    assert {name.partition(".")[0] for name in changed} == {"unet", "vae", "text_encoder"}


@pytest.mark.parametrize("trained", [{"unet"}, {"text_encoder"}, {"unet", "text_encoder"}])
def test_the_sub_models_to_train_get_gradients_and_the_others_are_frozen(batch, trained) -> None:
    model = build(trained=trained)
    StableDiffusion.loss(*model(batch)).backward()
    for name in ("unet", "vae", "text_encoder"):
        module = getattr(model, name)
        assert module.training == (name in trained)
        parameters = list(module.parameters())
        assert {p.requires_grad for p in parameters} == {name in trained}
        assert any(p.grad is not None for p in parameters) == (name in trained)
