"""Targets, weights, noise and schedules of an objective, against formulas written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdbench.models.architecture import resolve_architecture
from sdbench.models.objective import PLAIN, PREDICTION_TYPES, Objective, min_snr_weights
from sdbench.models.stable_diffusion import StableDiffusion, build_stable_diffusion
from tests.refusals import refused

TINY = resolve_architecture("tiny")
SIZE = (2, 4, 8, 8)


def build(objective: Objective = PLAIN) -> StableDiffusion:
    return build_stable_diffusion(TINY, seed=3, encoders=False, objective=objective)


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        "latent": torch.randn(SIZE, generator=generator),
        "text_embedding": torch.randn((2, 77, 32), generator=generator),
    }


def run(objective: Objective, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(5)
    with torch.no_grad():
        return build(objective)(batch)


def signal_power(*, zero_terminal_snr: bool = False) -> np.ndarray:
    power = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    if zero_terminal_snr:  # arXiv 2305.08891, algorithm 1
        scale = np.sqrt(power)
        power = ((scale - scale[-1]) * scale[0] / (scale[0] - scale[-1])) ** 2
    return power


def draws() -> tuple[torch.Tensor, torch.Tensor]:
    """The time steps and the noise of `run`."""
    torch.manual_seed(5)
    return torch.randint(0, 1000, (2,)), torch.randn(SIZE)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_target_is_the_noise_the_velocity_or_the_latents(batch, prediction_type) -> None:
    _, target = run(Objective(prediction_type=prediction_type), batch)  # and no weights
    timesteps, noise = draws()
    power = torch.tensor(signal_power()[timesteps], dtype=torch.float32).view(2, 1, 1, 1)
    velocity = power.sqrt() * noise - (1 - power).sqrt() * batch["latent"]
    expected = {"epsilon": noise, "v_prediction": velocity, "sample": batch["latent"]}
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


def test_min_snr_weights_act_on_the_samples_of_the_loss(batch) -> None:
    plain = run(Objective(), batch)
    weighted = run(Objective(min_snr_gamma=0.1), batch)
    timesteps, _ = draws()
    snr = signal_power() / (1 - signal_power())
    weights = (np.minimum(snr, 0.1) / snr)[timesteps]
    assert weighted[2].tolist() == pytest.approx(weights, rel=1e-5)
    errors = ((plain[0] - plain[1]) ** 2).mean((1, 2, 3)).numpy()
    loss = StableDiffusion.loss(*weighted).item()
    assert loss == pytest.approx((weights * errors).mean(), rel=1e-5)
    assert loss != pytest.approx(StableDiffusion.loss(*plain).item(), rel=1e-3)


def test_offset_noise_moves_whole_channels(batch) -> None:
    _, target = run(Objective(offset_noise=0.1), batch)
    _, noise = draws()
    offset = 0.1 * torch.randn(2, 4, 1, 1)
    torch.testing.assert_close(target, noise + offset)
    assert offset.std() > 0.01


def test_the_last_time_step_can_be_noise_alone() -> None:
    model = build(Objective(prediction_type="v_prediction", zero_terminal_snr=True))
    expected = signal_power(zero_terminal_snr=True)
    assert model.signal_scale[-1] == 0 and model.noise_scale[-1] == 1
    assert model.signal_scale.numpy() == pytest.approx(np.sqrt(expected), rel=1e-4, abs=1e-5)
    assert model.scheduler.config.timestep_spacing == "trailing"


@pytest.mark.parametrize("prediction_type", [None, "sample"])
def test_without_signal_only_v_can_be_predicted(prediction_type) -> None:
    objective = Objective(prediction_type=prediction_type, zero_terminal_snr=True)
    flags = "--prediction_type or --zero_terminal_snr"
    with refused(flags, value=prediction_type or "epsilon", allowed="v_prediction"):
        objective.schedule(TINY.scheduler)
