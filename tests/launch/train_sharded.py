"""Trains a small model on a rank of two in each of CASES, with each engine, and saves the results.

The ranks train all cases in one process group: that is what keeps it short.
"""

from __future__ import annotations

import importlib

import torch
import torch.distributed.checkpoint
from torch.distributed.fsdp import FSDPModule

from sdbench.engines import ENGINES, training
from sdbench.engines.job import EmaSpec, TrainedModule
from sdbench.engines.optimizers import make_optimizer
from sdbench.ranks.distributed import Ranks
from tests.engines.linear import (
    NUM_FEATURES,
    gather_average,
    make_config,
    make_parts,
    watch_with,
    whole,
)

MASTERS = {"precision": "bf16", "master_weights": "fp32"}
# Name of a case to the settings in which it differs from plain DDP.
CASES: dict[str, dict[str, object]] = {
    "none": {},
    "zero1": {"sharding": "zero1"},
    "grad_op": {"sharding": "grad_op"},
    "grad_op-every": {"sharding": "grad_op", "grad_sync": "every"},
    "grad_op-ahead": {"sharding": "grad_op", "gather_ahead": True},
    "full": {"sharding": "full"},
    "full-every": {"sharding": "full", "grad_sync": "every"},
    "full-unfused": {"sharding": "full", "optimizer": "adamw"},
    "every": {"grad_sync": "every"},
    "bf16": {"grad_compression": "bf16"},
    "all_of_ddp": {
        "sharding": "zero1",
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "ddp_bucket_mib": 1,
    },
    "masters": MASTERS,
    "zero1-masters": {"sharding": "zero1", **MASTERS},
    "grad_op-masters": {"sharding": "grad_op", **MASTERS},
    "full-masters": {"sharding": "full", **MASTERS},
}
# Those of four ranks, two on each of two nodes; a rank has two images, each its own micro-batch.
CASES_OF_NODES: dict[str, dict[str, object]] = {
    name + suffix: {"sharding": name, "device_train_microbatch_size": 1, **precision}
    for name in ("hybrid", "hybrid_grad_op", "hybrid_zero1")
    for suffix, precision in (("", {}), ("-masters", MASTERS))
}
CASES_OF_NODES["hybrid_grad_op-ahead"] = {
    **CASES_OF_NODES["hybrid_grad_op"],
    "gather_ahead": True,
}


def make_model():
    """A trained part with a convolution in channels_last and two blocks, and a frozen part."""

    class Block(torch.nn.Sequential):
        """What FSDP gathers on its own."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.was_gathering = []
            self.encoder = torch.nn.Linear(NUM_FEATURES, NUM_FEATURES).requires_grad_(False)
            self.unet = torch.nn.Sequential(
                torch.nn.Conv2d(2, 8, (1, 3)).to(memory_format=torch.channels_last),
                torch.nn.Flatten(),
                Block(torch.nn.Linear(8, 7), torch.nn.Tanh()),  # 7 rows: uneven parts
                Block(torch.nn.Linear(7, 8), torch.nn.Tanh()),
                torch.nn.Linear(8, 1),
            )

        def forward(self, batch):
            self.was_gathering.append(is_gathering(self.unet))
            images = self.encoder(batch["input"]).view(-1, 2, 1, NUM_FEATURES // 2)
            dtype = next(self.unet.parameters()).dtype
            return self.unet(images.to(dtype)), batch["target"]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(), (Block,)


def make_case(case, *, num_ranks, rank):
    """TrainJob and settings of a case, and the list that will get the gradients of each step."""
    config = make_config(
        # Of the 4 or 8 images of a rank: also a smaller one at the end.
        device_train_microbatch_size=3,
        optimizer="adamw_fused",
        master_weights="none",
    )
    vars(config).update((CASES | CASES_OF_NODES)[case])
    model, blocks = make_model()
    if config.precision == "bf16":
        model.unet.bfloat16()
    gradients = []

    def make_optimizer_that_tells(groups):
        optimizer = make_optimizer(groups, config=config)
        # AdamW would do the same with gradients that are twice as large.
        optimizer.register_step_post_hook(
            lambda *_: gradients.append(
                {name: whole(weight.grad) for name, weight in model.unet.named_parameters()}
            )
        )
        return optimizer

    parts = make_parts(
        num_ranks=num_ranks,
        rank=rank,
        model=model,
        trained={"unet": TrainedModule(model.unet, lr=0.01, weight_decay=0.1)},
        make_optimizer=make_optimizer_that_tells,
        ema=EmaSpec("foreach", half_life_batches=2, interval_batches=2),
        sharded_blocks=blocks,
    )
    return parts, config, gradients


def is_gathering(module):
    """Whether weights are on their way to this rank, by FSDP's own account."""
    return any(
        isinstance(one, FSDPModule)
        and one._get_fsdp_state()._fsdp_param_group._all_gather_result is not None
        for one in module.modules()
    )


def shape_here(weight):
    """Of what this rank holds of a weight."""
    return tuple((weight.to_local() if hasattr(weight, "to_local") else weight).shape)


class WeightRecorder:
    """Keeps the whole weights before and after each step, and the shapes of this rank's parts.

    `held` has the weights that this rank updates and averages, or their copies in fp32.
    """

    def __init__(self, module):
        self.module = module
        self.weights, self.held = [], []
        self.shapes, self.updated = {}, {}

    def loop_begins(self):
        """Put together what the ranks hold; under DDP each holds all."""
        weights = dict(self.module.named_parameters())
        self.weights.append({name: whole(weight) for name, weight in weights.items()})
        self.held.append({name: whole(weight) for name, weight in self.updated.items()})
        self.shapes = {name: shape_here(weight) for name, weight in weights.items()}

    def step_ends(self, **_):
        """Record the weights again."""
        self.loop_begins()


def train(engine, case, *, folder):
    """Train a case with an engine, and save the state of the average in the folder.

    Returns what the rank has seen of each step; `held` has the weights that it updates.
    """
    module = importlib.import_module(f"sdbench.engines.{engine}")
    kept = []

    class Kept(training.ForeachEma):
        def __init__(self, weights, spec):
            super().__init__(weights, spec)
            kept.append(self)
            recorder.updated = {n.removeprefix("unet."): one for n, one in weights.items()}

    original, training.ForeachEma = training.ForeachEma, Kept
    ranks = Ranks.from_environment()
    parts, config, gradients = make_case(case, num_ranks=ranks.world_size, rank=ranks.rank)
    recorder = WeightRecorder(parts.model.unet)
    try:
        measurements = module.fit(parts, config, watch_with(recorder))
    finally:
        training.ForeachEma = original
    (ema,) = kept
    torch.distributed.checkpoint.save(ema.averages, checkpoint_id=folder / f"{engine}-{case}")
    return {
        "losses": [step.loss for step in measurements.timings.steps],
        "gradients": gradients,
        "weights": recorder.weights,
        "average": {
            n.removeprefix("unet."): average for n, average in gather_average(ema.averages).items()
        },
        "held": recorder.held,
        "was_gathering": parts.model.was_gathering,
        "shapes": recorder.shapes,
    }


def run_rank(rank, folder, *, engines=ENGINES, cases=CASES):
    """Train all cases."""
    results = {
        (engine, case): train(engine, case, folder=folder) for engine in engines for case in cases
    }
    torch.save(results, folder / f"rank{rank}.pt")
