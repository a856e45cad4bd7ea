"""Noised latents, targets, weights and times of both objectives, by formulas written out here."""

from __future__ import annotations

import math
from types import SimpleNamespace

import diffusers
import pytest
import torch

from sdbench.models.architecture import resolve_architecture
from sdbench.models.drawing import make_sampler
from sdbench.models.family import DDPM, FLOW, FlowSettings
from sdbench.models.noising import make_objective
from sdbench.models.noising.ddpm import Ddpm
from sdbench.models.noising.flow import Flow
from sdbench.models.objective import CHANGES, LOGIT_NORMAL, Objective, check_objective
from sdbench.models.samplers import (
    SAMPLERS,
    check_num_steps,
    check_sampler,
    default_sampler,
    sampler_names,
)
from tests.refusals import refused

SD2 = resolve_architecture("tiny").parts["scheduler"]
# The scheduler of Flux.1 dev, without its class: as in a built-in model.
FLUX_DEV = {"num_train_timesteps": 1000, "shift": 3.0, "use_dynamic_shifting": True}
SIZE = (3, 4, 8, 6)
# Phi^-1 of these shares is -1.281552, 0 and 0.841621.
SHARES, NORMAL_QUANTILES = (0.1, 0.5, 0.8), (-1.281552, 0.0, 0.841621)


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(11))


def make_ddpm(**changes) -> Ddpm:
    return make_objective(DDPM, SD2, Objective(**changes))


def make_flow(*, own: FlowSettings | None = None, **changes) -> Flow:
    return make_objective(FLOW, FLUX_DEV, Objective(**changes), flow=own)


def alphas_cumprod() -> torch.Tensor:
    """As DDPMScheduler has it for the betas of Stable Diffusion, in fp32."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float32) ** 2
    return torch.cumprod(1.0 - betas, dim=0)


@pytest.mark.parametrize("offset_noise", [0.0, 0.1])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_ddpm_is_bit_for_bit_what_stable_diffusion_was(latents, prediction_type, offset_noise):
    objective = make_ddpm(
        prediction_type=prediction_type, offset_noise=offset_noise, min_snr_gamma=5.0
    )
    torch.manual_seed(5)
    times, noise = objective.draw(latents)
    noised, target = objective.mix(latents, noise, times)
    after = torch.rand(1)

    torch.manual_seed(5)
    steps, plain = torch.randint(0, 1000, (3,)), torch.randn(SIZE)
    moved = plain + offset_noise * torch.randn(3, 4, 1, 1) if offset_noise else plain
    assert torch.equal(torch.rand(1), after)  # nothing else is drawn
    power = alphas_cumprod().double()
    signal = power.sqrt().float()[steps].view(3, 1, 1, 1)
    share = (1.0 - power).sqrt().float()[steps].view(3, 1, 1, 1)
    targets = {"epsilon": moved, "v_prediction": signal * moved - share * latents}
    assert torch.equal(times, steps) and torch.equal(noise, moved)
    assert torch.equal(noised, signal * latents + share * moved)
    assert torch.equal(target, targets.get(prediction_type, latents))
    snr = power / (1.0 - power)
    divisors = {"epsilon": snr, "v_prediction": snr + 1.0, "sample": torch.ones(1000)}
    weights = (snr.clamp(max=5.0) / divisors[prediction_type]).float()[steps]
    assert torch.equal(objective.weights(times), weights)


def test_ddpm_tells_the_network_its_time_steps():
    objective = make_ddpm()
    times = torch.tensor([0, 999])
    assert torch.equal(objective.network_times(times), times)
    assert objective.weights(times) is None and objective.guidance is None
    assert objective.validation_times(8) == [62, 187, 312, 437, 562, 687, 812, 937]
    assert objective.validation_times(4, place=0.0) == [0, 250, 500, 750]
    assert objective.state_dict() == {} and not list(objective.parameters())
    assert objective.config["beta_end"] == 0.012


def test_the_last_step_of_ddpm_can_be_noise_alone(latents):
    objective = make_ddpm(prediction_type="v_prediction", zero_terminal_snr=True)
    noise, last = torch.randn(SIZE), torch.full((3,), 999)
    noised, target = objective.mix(latents, noise, last)
    assert torch.equal(noised, noise) and torch.equal(target, -latents)
    assert objective.config["timestep_spacing"] == "trailing"


def test_flow_by_numbers_worked_out_by_hand():
    x, noise = torch.tensor([2.0, 8.0]).view(2, 1, 1, 1), torch.tensor([6.0, 0.0]).view(2, 1, 1, 1)
    objective, times = make_flow(), torch.tensor([0.25, 0.5])
    noised, target = objective.mix(x, noise, times)
    assert noised.flatten().tolist() == [3.0, 4.0]
    assert target.flatten().tolist() == [4.0, -8.0]
    assert objective.network_times(times).tolist() == [250.0, 500.0]
    assert objective.weights(times) is None and objective.guidance == 1.0
    assert objective.validation_times(4) == [0.125, 0.375, 0.625, 0.875]
    assert make_flow(guidance_embedding=3.5).guidance == 3.5


def test_flow_noises_as_the_scheduler_of_diffusers(latents):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    times, noise = scheduler.sigmas[[900, 500, 20]], torch.randn(SIZE)
    objective = make_flow()
    expected = scheduler.scale_noise(latents, scheduler.timesteps[[900, 500, 20]], noise)
    torch.testing.assert_close(objective.mix(latents, noise, times)[0], expected)
    told = objective.network_times(times)
    torch.testing.assert_close(told, scheduler.timesteps[[900, 500, 20]])


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("sigma_sqrt", [16.0, 4.0, 1.0, 1e6]),  # s below 1/1000 counts as 1/1000
        ("cosmap", [3.2 / math.pi, 4 / math.pi, 2 / math.pi, 2 / math.pi]),
    ],
)
def test_weights_of_flow_by_hand(weighting, expected):
    weights = make_flow(flow_weighting=weighting).weights(torch.tensor([0.25, 0.5, 1.0, 0.0]))
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SHARES),
        ({"time_sampling": "logit_normal"}, NORMAL_QUANTILES),
        (
            {"time_sampling": "logit_normal", "time_mean": 0.5, "time_std": 2.0},
            [0.5 + 2.0 * quantile for quantile in NORMAL_QUANTILES],
        ),
        # 3 s / (1 + 2 s)
        ({"time_shift": 3.0}, [0.3 / 1.2, 1.5 / 2.0, 2.4 / 2.6]),
    ],
    ids=str,
)
def test_times_have_the_quantiles_of_their_distribution(changes, expected):
    """Shares of times below an exact quantile; their standard error is at most 0.0008."""
    if "time_sampling" in changes:
        expected = [1.0 / (1.0 + math.exp(-logit)) for logit in expected]
    torch.manual_seed(5)
    times, _ = make_flow(**changes).draw(torch.zeros(400_000, 1, 1, 1))
    assert times.min() >= 0.0 and times.max() <= 1.0
    below = [(times < quantile).double().mean().item() for quantile in expected]
    assert below == pytest.approx(SHARES, abs=0.004)


@pytest.mark.parametrize(
    ("side", "shift"),
    # mu = 0.5 + 0.65 (N - 256) / 3840 for N = 256, 4096 and 1024 image tokens.
    [(32, math.exp(0.5)), (128, math.exp(1.15)), (64, math.exp(0.63))],
)
def test_times_are_shifted_by_the_resolution_as_flux_draws(side, shift):
    latents = torch.zeros(5, 1, side, side)
    drawn = []
    for changes in ({}, {"time_shift": "resolution"}):
        torch.manual_seed(5)
        drawn.append(make_flow(**changes).draw(latents))
    (plain, noise), (shifted, same_noise) = drawn
    torch.testing.assert_close(shifted, shift * plain / (1.0 + (shift - 1.0) * plain))
    assert torch.equal(noise, same_noise)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    torch.testing.assert_close(shifted, scheduler.time_shift(math.log(shift), 1.0, plain))


def test_the_choice_of_a_family_holds_where_the_run_says_nothing(latents):
    own = FlowSettings(time_sampling="logit_normal", time_mean=1.0)
    torch.manual_seed(5)
    times, noise = make_flow(own=own, time_std=0.5).draw(latents)
    torch.manual_seed(5)
    assert torch.equal(times, torch.sigmoid(1.0 + 0.5 * torch.randn(3)))
    assert torch.equal(noise, torch.randn(SIZE))
    torch.manual_seed(5)
    times, _ = make_flow(own=own, time_sampling="uniform").draw(latents)
    torch.manual_seed(5)
    assert torch.equal(times, torch.rand(3))


@pytest.mark.parametrize(
    ("kind", "changes", "takes_guidance"),
    [
        *((FLOW, {name: 1}, True) for name in CHANGES[DDPM]),
        *((DDPM, {name: 1}, True) for name in CHANGES[FLOW]),
        (FLOW, {"guidance_embedding": 1}, False),
    ],
    ids=str,
)
def test_what_an_objective_does_not_have_is_refused(kind, changes, takes_guidance):
    (name,) = changes
    unchanged = CHANGES[DDPM] | CHANGES[FLOW]
    check_objective(kind, SimpleNamespace(**unchanged))
    check_objective(kind, SimpleNamespace())  # a program without these settings
    with refused(f"--{name} or --model_name", value=1) as caught:
        check_objective(
            kind, SimpleNamespace(**{**unchanged, **changes}), takes_guidance=takes_guidance
        )
    assert f"no --{name}" in caught.value.allowed


@pytest.mark.parametrize("kind", [DDPM, FLOW])
def test_an_objective_has_its_own_changes(kind):
    values = dict.fromkeys(CHANGES[kind], 1)
    if kind == FLOW:
        values["time_sampling"] = LOGIT_NORMAL
    check_objective(kind, SimpleNamespace(**values), takes_guidance=True)


def test_uniform_times_have_neither_mean_nor_deviation():
    for name in ("time_mean", "time_std"):
        changed = SimpleNamespace(**{name: 0.5})
        with refused(f"--{name} or --time_sampling", value=0.5):
            check_objective(FLOW, changed)
        check_objective(FLOW, changed, flow=FlowSettings(time_sampling=LOGIT_NORMAL))


@pytest.mark.parametrize(
    ("schedule", "own", "other"),
    [
        (SD2, "ddim", "flow_euler"),
        (FLUX_DEV, "flow_euler", "dpm"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, "flow_euler", "ddim"),
    ],
)
def test_samplers_follow_their_kind_of_schedule_only(schedule, own, other):
    assert default_sampler(schedule) == own
    check_sampler(own, schedule)
    assert {own, other} <= set(sampler_names())
    fitting = "flow_euler" if own == "flow_euler" else "ddim | pndm | euler | dpm"
    with refused("--scheduler", value=other, allowed=fitting):
        check_sampler(other, schedule)
    with refused("--scheduler", value=other):
        make_sampler(other, schedule)


def test_a_schedule_that_a_sampler_was_saved_with_keeps_its_kind():
    """diffusers' DPM solver has keys of rectified flow, too."""
    saved = make_sampler("dpm", make_ddpm().config).config
    assert "use_dynamic_shifting" in saved and default_sampler(saved) == "ddim"
    assert default_sampler({**saved, "_class_name": "DPMSolverMultistepScheduler"}) == "ddim"
    assert default_sampler(make_flow().config) == "flow_euler"


def test_the_sampler_of_flow_has_the_shift_of_the_model():
    sampler = make_sampler(None, make_flow().config)
    assert isinstance(sampler, diffusers.FlowMatchEulerDiscreteScheduler)
    assert (sampler.config["shift"], sampler.config["use_dynamic_shifting"]) == (3.0, True)
    assert isinstance(make_sampler(None, SD2), diffusers.DDIMScheduler)


@pytest.mark.parametrize("sampler", SAMPLERS[DDPM])
@pytest.mark.parametrize("num_steps", [999, 1000])
def test_as_many_steps_are_refused_as_a_sampler_of_diffusers_fails_at(sampler, num_steps):
    scheduler = make_sampler(sampler, SD2)
    scheduler.set_timesteps(num_steps)
    state = torch.zeros(1, 4, 8, 8)
    options = {"sampler": sampler, "schedule": SD2, "flag": "--num_steps"}
    try:
        first = scheduler.timesteps[0]
        scheduler.step(state, first, scheduler.scale_model_input(state, first))
    except IndexError:
        assert num_steps == 1000
        with refused("--num_steps", value=1000, allowed="1 to 999"):
            check_num_steps(num_steps, **options)
    else:
        check_num_steps(num_steps, **options)
