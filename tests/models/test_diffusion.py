"""The loss is that of the forward process with all options, by formulas written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.family import PREDICTION_TYPES
from sdbench.models.objective import Objective, min_snr_weights
from tests.refusals import refused

TINY = resolve_architecture("tiny")
SIZE = (2, 4, 8, 8)


def build(*, seed=3, **changes) -> DiffusionModel:
    return build_model(TINY, seed=seed, **changes)


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    return build()


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        "image": torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=generator),
        "input_ids": torch.randint(0, 49408, (2, 77), generator=generator),
    }


def loss_of(model: DiffusionModel, batch: dict[str, torch.Tensor], *, seed: int = 5) -> float:
    torch.manual_seed(seed)
    with torch.no_grad():
        return DiffusionModel.loss(*model(batch)).item()


def signal_power(*, zero_terminal_snr: bool = False) -> np.ndarray:
    power = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    if zero_terminal_snr:  # arXiv 2305.08891, algorithm 1
        scale = np.sqrt(power)
        power = ((scale - scale[-1]) * scale[0] / (scale[0] - scale[-1])) ** 2
    return power


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
        power = torch.tensor(signal_power()[steps], dtype=torch.float32).view(2, 1, 1, 1)
        noised = power.sqrt() * latents + (1 - power).sqrt() * noise
        predicted = model.unet(noised, steps, states).sample
    assert measured == pytest.approx(((predicted - noise) ** 2).mean().item(), rel=1e-4)


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


@pytest.mark.slow
def test_precisions_set_the_types() -> None:
    amp = build(precision="amp_bf16", encoder_dtype="bf16")
    assert (amp.unet.dtype, amp.autocast_dtype) == (torch.float32, torch.bfloat16)
    assert amp.vae.dtype == amp.text_encoder.dtype == torch.bfloat16
    assert build(precision="bf16").objective.signal_scale.dtype == torch.float32
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
    DiffusionModel.loss(*model(batch)).backward()
    for name in ("unet", "vae", "text_encoder"):
        module = getattr(model, name)
        assert module.training == (name in trained)
        parameters = list(module.parameters())
        assert {p.requires_grad for p in parameters} == {name in trained}
        assert any(p.grad is not None for p in parameters) == (name in trained)


@pytest.fixture(scope="module")
def latents() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        "latent": torch.randn(SIZE, generator=generator),
        "text_embedding": torch.randn((2, 77, 32), generator=generator),
    }


def run(objective: Objective, latents: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(5)
    with torch.no_grad():
        return build(encoders=False, objective=objective)(latents)


def draws() -> tuple[torch.Tensor, torch.Tensor]:
    """The time steps and the noise of `run`."""
    torch.manual_seed(5)
    return torch.randint(0, 1000, (2,)), torch.randn(SIZE)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_target_is_the_noise_the_velocity_or_the_latents(latents, prediction_type) -> None:
    _, target = run(Objective(prediction_type=prediction_type), latents)  # and no weights
    timesteps, noise = draws()
    power = torch.tensor(signal_power()[timesteps], dtype=torch.float32).view(2, 1, 1, 1)
    velocity = power.sqrt() * noise - (1 - power).sqrt() * latents["latent"]
    expected = {"epsilon": noise, "v_prediction": velocity, "sample": latents["latent"]}
    torch.testing.assert_close(target, expected[prediction_type])


def test_min_snr_weights_at_hand_picked_ratios() -> None:
    snr = torch.tensor([100.0, 5.0, 1.0, 0.25], dtype=torch.float64)
    expected = {
        "epsilon": [0.05, 1.0, 1.0, 1.0],
        "v_prediction": [5 / 101, 5 / 6, 0.5, 0.2],
        "sample": [5.0, 5.0, 1.0, 0.25],
    }
    for prediction_type, weights in expected.items():
        found = min_snr_weights(snr / (1 + snr), gamma=5.0, prediction_type=prediction_type)
        assert found.tolist() == pytest.approx(weights)


def test_min_snr_weights_act_on_the_samples_of_the_loss(latents) -> None:
    plain = run(Objective(), latents)
    weighted = run(Objective(min_snr_gamma=0.1), latents)
    timesteps, _ = draws()
    snr = signal_power() / (1 - signal_power())
    weights = (np.minimum(snr, 0.1) / snr)[timesteps]
    assert weighted[2].tolist() == pytest.approx(weights, rel=1e-5)
    errors = ((plain[0] - plain[1]) ** 2).mean((1, 2, 3)).numpy()
    loss = DiffusionModel.loss(*weighted).item()
    assert loss == pytest.approx((weights * errors).mean(), rel=1e-5)
    assert loss != pytest.approx(DiffusionModel.loss(*plain).item(), rel=1e-3)


def test_offset_noise_moves_whole_channels(latents) -> None:
    _, target = run(Objective(offset_noise=0.1), latents)
    _, noise = draws()
    offset = 0.1 * torch.randn(2, 4, 1, 1)
    torch.testing.assert_close(target, noise + offset)
    assert offset.std() > 0.01


def test_the_last_time_step_can_be_noise_alone() -> None:
    model = build(
        encoders=False, objective=Objective(prediction_type="v_prediction", zero_terminal_snr=True)
    )
    expected = signal_power(zero_terminal_snr=True)
    objective = model.objective
    assert objective.signal_scale[-1] == 0 and objective.noise_scale[-1] == 1
    assert objective.signal_scale.numpy() == pytest.approx(np.sqrt(expected), rel=1e-4, abs=1e-5)
    assert objective.config.timestep_spacing == "trailing"


@pytest.mark.parametrize("prediction_type", [None, "sample"])
def test_without_signal_only_v_can_be_predicted(prediction_type) -> None:
    objective = Objective(prediction_type=prediction_type, zero_terminal_snr=True)
    flags = "--prediction_type or --zero_terminal_snr"
    with refused(flags, value=prediction_type or "epsilon", allowed="v_prediction"):
        objective.schedule(TINY.parts["scheduler"])
