"""fp32 copies of bf16 weights, and their average, against closed forms.

Those that several ranks share are compared with one process in tests/launch/test_sharding.py.
"""

from __future__ import annotations

import itertools

import torch

from sdbench.engines import load_engine
from sdbench.engines.job import EmaSpec, TrainedModule
from sdbench.engines.optimizers import make_optimizer
from tests.engines.linear import (
    SCHEDULE,
    Hooks,
    LinearModel,
    average_by_hand,
    make_config,
    make_parts,
    watch_with,
)

# Five steps of it are less than half the distance of bf16 numbers near 1: without copies a weight
# of 1 would stay what it is.
LEARNING_RATE = 1e-4


class OnesModel(LinearModel):
    """Inputs of ones and no target: the gradient of each weight is 1, in any micro-batch."""

    def forward(self, batch):
        inputs = torch.ones_like(batch["input"]).to(self.unet.weight.dtype)
        return self.unet(inputs)


def copies_by_hand(name):
    """w_n = w_0 - rate x (s_1 + ... + s_n): the mean of equal gradients over their root is 1."""
    first = {"unet.weight": torch.linspace(-1, 1, 6)[None], "unet.bias": torch.tensor([0.5])}[name]
    first = first.bfloat16().double()
    return [first] + [
        first - LEARNING_RATE * total / (1 + 1e-8) for total in itertools.accumulate(SCHEDULE)
    ]


def test_copies_and_their_average_are_those_of_the_closed_forms():
    config = make_config(precision="bf16", master_weights="fp32", optimizer="adamw_fused")
    model, hooks = OnesModel().bfloat16(), Hooks()
    job = make_parts(
        model=model,
        trained={"unet": TrainedModule(model.unet, lr=LEARNING_RATE, weight_decay=0.0)},
        loss=lambda prediction: prediction.float().mean(),
        make_optimizer=lambda groups: make_optimizer(groups, config=config),
        ema=EmaSpec("foreach", half_life_batches=2, interval_batches=2),
    )
    load_engine("torch")(job, config, watch_with(), hooks)
    for name in ("unet.weight", "unet.bias"):
        expected = copies_by_hand(name)
        assert not torch.equal(expected[-1].bfloat16().double(), expected[-1])
        for (_, tensors), by_hand in zip(hooks.saved, expected[1:], strict=True):
            weight, copy = tensors[f"model.{name}"], tensors[f"fp32.{name}"]
            assert weight.dtype == torch.bfloat16 and torch.equal(weight, copy.bfloat16())
            torch.testing.assert_close(copy.double(), by_hand, rtol=0, atol=2e-7)
        average = average_by_hand(expected, half_life=2, interval=2)
        found = hooks.state.averages[name].double()
        torch.testing.assert_close(found, average, rtol=0, atol=2e-7)
