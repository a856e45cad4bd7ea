"""The suite's AdamW makes torch's update, without copies of tensors; on fp32 copies too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from sdbench.base.errors import RunError
from sdbench.engines.adamw import AdamW, AdamWOfMasterWeights
from sdbench.engines.job import TrainedModule
from sdbench.engines.optimizers import make_optimizer, parameter_groups, update_in_backward

NUM_STEPS = 3


def make_job():
    """Two groups; layers of each layout, one with more weights than a thread takes."""
    torch.manual_seed(0)
    one = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last),
        nn.Conv2d(8, 64, 3, padding=1),
        nn.Conv2d(64, 64, 1).to(memory_format=torch.channels_last),
        nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last),
    )
    model = nn.Sequential(one, nn.Flatten(1), nn.Linear(64 * 16, 5)).bfloat16()
    trained = {"one": TrainedModule(one, 0.01, 0.1), "two": TrainedModule(model[2], 0.002, 0.0)}
    return SimpleNamespace(model=model, trained=trained, images_per_step=2, max_gradient_norm=None)


def train(optimizer_class, *, fused, has_alike_gradients=True):
    model = make_job().model.float()
    optimizer = optimizer_class(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        if not has_alike_gradients:
            first = model[0][0].weight
            first.grad = first.grad.contiguous()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            optimizer.step()
    operators = [event.key for event in profiler.key_averages()]
    return list(model.parameters()), optimizer.state_dict()["state"], operators


@pytest.mark.parametrize("has_alike_gradients", [True, False])
@pytest.mark.parametrize("fused", [True, None])
def test_weights_and_state_are_those_of_torch(fused, has_alike_gradients):
    options = {"fused": fused, "has_alike_gradients": has_alike_gradients}
    expected_weights, expected_state, torchs = train(torch.optim.AdamW, **options)
    weights, state, ours = train(AdamW, **options)
    for weight, expected in zip(weights, expected_weights, strict=True):
        assert torch.equal(weight, expected) and weight.stride() == expected.stride()
    for index, expected in expected_state.items():
        for name, tensor in expected.items():
            assert torch.equal(state[index][name], tensor), name
            assert state[index][name].shape == tensor.shape
    if fused and has_alike_gradients:
        assert "aten::clone" in torchs  # what this class is for
        assert "aten::_fused_adamw_" in ours and "aten::clone" not in ours


@pytest.mark.parametrize("master_weights", ["none", "fp32"])
@pytest.mark.parametrize("which", ["trainable", "all"])
def test_each_group_has_its_own_rate_and_decay(master_weights, which):
    model = nn.ModuleDict({name: nn.Linear(3, 1, bias=False) for name in ("one", "two", "frozen")})
    model["frozen"].requires_grad_(False)
    for weight in model.parameters():
        nn.init.ones_(weight)
    job = SimpleNamespace(
        model=model,
        trained={
            "one": TrainedModule(model["one"], lr=0.5, weight_decay=0.5),
            "two": TrainedModule(model["two"], lr=0.25, weight_decay=0.25),
        },
    )
    config = SimpleNamespace(
        optimizer="adamw", cuda_graph=False, sharding="none", master_weights=master_weights
    )
    optimizer = make_optimizer(parameter_groups(job, which=which), config=config)
    for name in job.trained:
        model[name].weight.grad = torch.zeros(1, 3)
    optimizer.step()
    # Without gradients a step is the decay alone: 1 - rate x decay.
    left = {name: float(module.weight[0, 0]) for name, module in model.items()}
    assert left == {"one": 0.75, "two": 0.9375, "frozen": 1.0}


def test_a_torch_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", lambda self, group: False)
    with pytest.raises(RunError) as caught:
        AdamW([torch.zeros(1)])
    assert caught.value.status == "failed"


def backward(model, *, step):  # whose gradients do not depend on the weights
    torch.manual_seed(step)
    sum((weight * torch.randn_like(weight)).sum() for weight in model.parameters()).backward()


def train_copies(*, early):
    """A few steps with fp32 copies; the weights, the copies and their state afterwards."""
    job = make_job()
    weights = list(job.model.parameters())
    optimizer = AdamWOfMasterWeights(parameter_groups(job, which="trainable"), fused=True)
    if early:
        update_in_backward(optimizer)
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] *= 0.5  # as a schedule does
        backward(job.model, step=step)
        assert sum(weight.grad is not None for weight in weights) == (0 if early else len(weights))
        optimizer.step()
        optimizer.zero_grad()
    masters = list(optimizer.masters.values())
    state = [value for master in masters for value in optimizer.state[master].values()]
    return [*weights, *masters, *state]


def test_updates_of_copies_within_the_backward_pass_are_those_after_it():
    for early, late in zip(train_copies(early=True), train_copies(early=False), strict=True):
        assert torch.equal(early, late)
        assert early.stride() == late.stride()


def test_the_first_update_is_the_closed_form_and_rounds_as_torch_does():
    weight = nn.Parameter(torch.randn(1000).bfloat16())
    before = weight.detach().double()
    optimizer = AdamWOfMasterWeights([{"params": [weight]}], lr=0.25, weight_decay=0.5, fused=True)
    weight.grad = torch.randn(1000).bfloat16()
    weight.grad[0] = torch.nan
    optimizer.step()
    gradient = weight.grad.double()
    # The first means are the gradient and its square.
    expected = before * (1 - 0.25 * 0.5) - 0.25 * gradient / (gradient.abs() + 1e-8)
    (master,) = optimizer.masters.values()
    torch.testing.assert_close(master.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert weight[0].isnan() and weight[1:].isfinite().all()
    torch.testing.assert_close(weight, master.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def without_compiling():
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def low_bit(weights, *, bits, **settings):
    from sdbench.engines.low_bit_adamw import ADAMW_OF_BITS

    return ADAMW_OF_BITS[bits](weights, **settings)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.4)])
def test_a_state_of_few_bits_moves_weights_nearly_as_torchs_adamw(bits, error, without_compiling):
    torch.manual_seed(5)
    plain = [torch.randn(64, 64), torch.randn(16, 32, 3, 3), torch.randn(7)]
    layouts = (torch.contiguous_format, torch.channels_last, torch.contiguous_format)
    ours, torchs = (
        [nn.Parameter(w.clone(memory_format=one)) for w, one in zip(plain, layouts, strict=True)]
        for _ in range(2)
    )
    settings = {"lr": 0.01, "weight_decay": 0.1}
    optimizers = low_bit(ours, bits=bits, **settings), torch.optim.AdamW(torchs, **settings)
    gradients = [torch.randn_like(weight) for weight in plain]
    for step in range(6):
        for weights, optimizer in zip((ours, torchs), optimizers, strict=True):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient * (1 + step)
            optimizer.step()
        if step == 0:  # the first means are not rounded yet when they are used
            for one, other in zip(ours, torchs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for weight, one, other in zip(plain, ours, torchs, strict=True):
        change = (other - weight).norm()
        assert (one - other).norm() < error * change
        assert one.stride() == other.stride()
    assert torch.allclose(ours[2], torchs[2], atol=1e-6)  # too small for blocks
    # 4,096 and 4,608 numbers, 16 and 18 blocks of 256, or 32 and 36 of 128.
    state = [optimizers[0].state[weight]["exp_avg"] for weight in ours[:2]]
    assert [one.codes.nbytes for one in state] == [4096 * bits // 8, 4608 * bits // 8]
    assert [one.scale.numel() for one in state] == [128 // bits, 144 // bits]


def test_updates_below_the_resolution_of_bf16_are_not_lost(without_compiling):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.full((256, 256), 1.0).bfloat16())
    # 2^-8 is the distance of bf16 numbers below 1; each of 16 updates is a sixteenth of it.
    optimizer = low_bit([weight], bits=8, lr=2.0**-12, weight_decay=0.0)
    for _ in range(16):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    # Of 65,536 numbers each moved by 2^-8 with a standard deviation of less: the mean to 1 %.
    assert float(1 - weight.float().mean()) == pytest.approx(2.0**-8, rel=0.05)
