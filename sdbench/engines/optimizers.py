"""`make_optimizer`: the AdamW that the settings ask for, and updates in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdbench.engines.adamw import AdamW, AdamWOfMasterWeights
from sdbench.engines.job import TrainJob
from sdbench.ranks.distributed import Ranks
from sdbench.settings.parallel import FSDP, LOW_BIT_ADAMW, WITHIN_NODE, ZERO1
from sdbench.settings.recipe import EngineConfig


def parameter_groups(job: TrainJob, *, which: str) -> list[dict[str, Any]]:
    """The weights of a placed or sharded job as torch's parameter groups, one for each module.

    `which` is ``trainable``; or ``all``, which adds the frozen weights to the first group. They get
    no gradients, so that the optimizer leaves them alone.
    """
    groups = [
        {
            "params": [weight for weight in trained.module.parameters() if weight.requires_grad],
            "lr": trained.lr,
            "weight_decay": trained.weight_decay,
        }
        for trained in job.trained.values()
    ]
    if which == "all":
        groups[0]["params"] += [w for w in job.model.parameters() if not w.requires_grad]
    return groups


def make_optimizer(
    groups: list[dict[str, Any]],
    *,
    config: EngineConfig,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Make the AdamW that the config asks for."""
    settings: dict[str, Any] = {"betas": betas, "eps": eps}
    kind: Callable[..., torch.optim.Optimizer] = AdamW
    if config.optimizer in LOW_BIT_ADAMW:
        from sdbench.engines.low_bit_adamw import ADAMW_OF_BITS

        kind = ADAMW_OF_BITS[LOW_BIT_ADAMW[config.optimizer]]
    else:
        # None leaves torch its default: a foreach loop on a GPU, a loop over tensors on a CPU.
        settings["fused"] = None if config.optimizer == "adamw" else True
        settings["capturable"] = config.cuda_graph
    # With FSDP a rank holds shards of the copies, see `shard_weights`.
    if config.master_weights == "fp32" and config.sharding not in FSDP:
        kind = functools.partial(AdamWOfMasterWeights, kind=kind)
    if config.sharding in ZERO1:
        from sdbench.engines.zero1 import Zero1

        group = None
        if config.sharding in WITHIN_NODE:  # all ranks make all groups
            group, _ = torch.distributed.new_subgroups(Ranks.from_environment().local_world_size)
        return Zero1(
            groups,
            optimizer_class=kind,
            process_group=group,
            parameters_as_bucket_view=False,
            **settings,
        )
    return kind(groups, **settings)


def update_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Update each weight, and free its gradient, as soon as the gradient is complete.

    The optimizer then has this weight alone: it would look at all others for their gradients. The
    step after the backward pass finds no gradient.
    """
    groups = optimizer.param_groups
    weights = getattr(optimizer, "weights_of_masters", {})

    def update_from(held: Tensor, own: dict[str, Any]) -> Callable[[Tensor], None]:
        def update(weight: Tensor) -> None:
            all_held = [group["params"] for group in groups]
            for group in groups:
                group["params"] = [held] if group is own else []
            optimizer.step()
            weight.grad = None
            for group, several in zip(groups, all_held, strict=True):
                group["params"] = several

        return update

    for group in groups:
        for held in group["params"]:
            weight = weights.get(id(held), held)
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(update_from(held, group))
