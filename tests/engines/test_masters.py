"""fp32 copies of bf16 weights, and their average, against closed forms, for every --sharding."""

from __future__ import annotations

import itertools

import pytest
import torch

from sdbench.engines import load_engine
from sdbench.engines.job import EmaSpec, TrainedModule
from sdbench.engines.optimizers import make_optimizer
from sdbench.ranks.distributed import Ranks
from tests.engines.linear import (
    NUM_STEPS,
    SCHEDULE,
    Hooks,
    LinearModel,
    average_by_hand,
    gather_average,
    make_config,
    make_parts,
    watch_with,
)
from tests.forked import run_in_group

# Two nodes of two ranks each, and one rank.
NUM_RANKS, NUM_NODES = 4, 2
SHARDINGS = ("none", "zero1", "grad_op", "full", "hybrid", "hybrid_grad_op", "hybrid_zero1")
# Five steps of it are less than half the distance of bf16 numbers near 1: without copies a weight
# of 1 would stay what it is.
LEARNING_RATE = 1e-4


class OnesModel(LinearModel):
    """Inputs of ones and no target: the gradient of each weight is 1, in any micro-batch."""

    def forward(self, batch):
        inputs = torch.ones_like(batch["input"]).to(self.unet.weight.dtype)
        return self.unet(inputs)


def train(sharding):
    """Copies and weights after each step, and the average, all whole."""
    ranks = Ranks.from_environment()
    config = make_config(
        sharding=sharding,
        precision="bf16",
        master_weights="fp32",
        optimizer="adamw_fused",
        device_train_microbatch_size=1,
    )
    model = OnesModel().bfloat16()
    job = make_parts(
        num_ranks=ranks.world_size,
        rank=ranks.rank,
        model=model,
        trained={"unet": TrainedModule(model.unet, lr=LEARNING_RATE, weight_decay=0.0)},
        loss=lambda prediction: prediction.float().mean(),
        make_optimizer=lambda groups: make_optimizer(groups, config=config),
        ema=EmaSpec("foreach", half_life_batches=2, interval_batches=2),
    )
    hooks = Hooks()
    load_engine("torch")(job, config, watch_with(), hooks)
    found = {
        prefix: [
            {n.removeprefix(prefix): one for n, one in tensors.items() if n.startswith(prefix)}
            for _, tensors in hooks.saved
        ]
        for prefix in ("fp32.", "model.")
    }
    return found | {"average": gather_average(hooks.state.averages)}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What each rank returns, by sharding."""
    folder = tmp_path_factory.mktemp("masters")

    def run(rank):
        found = {sharding: train(sharding) for sharding in SHARDINGS}
        torch.save(found, folder / f"{rank}.pt")

    load_engine("torch")
    run_in_group(run, folder, num_ranks=NUM_RANKS, num_nodes=NUM_NODES)
    found = [torch.load(folder / f"{rank}.pt") for rank in range(NUM_RANKS)]
    return {sharding: [one[sharding] for one in found] for sharding in SHARDINGS}


def copies_by_hand(name):
    """w_n = w_0 - rate x (s_1 + ... + s_n): the mean of equal gradients over their root is 1."""
    first = {"unet.weight": torch.linspace(-1, 1, 6)[None], "unet.bias": torch.tensor([0.5])}[name]
    first = first.bfloat16().double()
    return [first] + [
        first - LEARNING_RATE * total / (1 + 1e-8) for total in itertools.accumulate(SCHEDULE)
    ]


@pytest.mark.parametrize("sharding", ["alone", *SHARDINGS])
def test_copies_and_their_average_are_those_of_the_closed_forms(sharding, request):
    if sharding == "alone":
        found = [train("none")]
    else:
        found = request.getfixturevalue("of_ranks")[sharding]
    names = {"unet.weight", "unet.bias"}
    for name in names:
        expected = copies_by_hand(name)
        assert not torch.equal(expected[-1].bfloat16().double(), expected[-1])
        for of_rank in found:
            for step in range(NUM_STEPS):
                weight = of_rank["model."][step][name]
                assert weight.dtype == torch.bfloat16
                torch.testing.assert_close(
                    weight, expected[step + 1].bfloat16(), rtol=2**-8, atol=0
                )
                if name in of_rank["fp32."][step]:
                    copy = of_rank["fp32."][step][name]
                    assert torch.equal(weight, copy.bfloat16())
                    torch.testing.assert_close(copy.double(), expected[step + 1], rtol=0, atol=2e-7)
        average = average_by_hand(expected, half_life=2, interval=2)
        torch.testing.assert_close(found[0]["average"][name].double(), average, rtol=0, atol=2e-7)
    assert set().union(*(of_rank["fp32."][-1] for of_rank in found)) == names
