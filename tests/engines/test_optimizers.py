"""The suite's AdamW makes torch's update, without torch's copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from sdbench.base.errors import RunError
from sdbench.engines.job import TrainedModule
from sdbench.engines.optimizers import AdamW, make_optimizer, parameter_groups


def train(optimizer_class, *, fused, has_alike_gradients=True):
    """Two steps of a model with one layer of each layout."""
    torch.manual_seed(0)
    model = nn.ModuleList(
        [
            nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last),
            nn.Conv2d(8, 6, 3),
            nn.Conv2d(8, 6, 1).to(memory_format=torch.channels_last),
            nn.Linear(8, 6),
        ]
    )
    optimizer = optimizer_class(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        if not has_alike_gradients:
            model[0].weight.grad = model[0].weight.grad.contiguous()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            optimizer.step()
    operators = [event.key for event in profiler.key_averages()]
    return list(model.parameters()), optimizer.state_dict()["state"], operators


@pytest.mark.parametrize("has_alike_gradients", [True, False])
@pytest.mark.parametrize("fused", [True, None])
def test_weights_and_state_are_those_of_torch(fused, has_alike_gradients):
    options = {"fused": fused, "has_alike_gradients": has_alike_gradients}
    expected_weights, expected_state, _ = train(torch.optim.AdamW, **options)
    weights, state, _ = train(AdamW, **options)
    for weight, expected in zip(weights, expected_weights, strict=True):
        assert torch.equal(weight, expected) and weight.stride() == expected.stride()
    for index, expected in expected_state.items():
        for name, tensor in expected.items():
            assert torch.equal(state[index][name], tensor), name
            assert state[index][name].shape == tensor.shape


def test_nothing_is_copied():
    *_, torchs = train(torch.optim.AdamW, fused=True)
    assert "aten::clone" in torchs  # what this class is for
    *_, ours = train(AdamW, fused=True)
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
