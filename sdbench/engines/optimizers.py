"""The optimizers that the settings offer: AdamW in torch's variants, and on fp32 copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdbench.engines.job import EngineConfig, TrainingHooks, TrainJob
from sdbench.ranks.distributed import Ranks
from sdbench.settings.parallel import FSDP, WITHIN_NODE, ZERO1


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
    # fused=None leaves torch its default: a foreach loop on a GPU, a loop over tensors on a CPU.
    settings = {
        "betas": betas,
        "eps": eps,
        "fused": None if config.optimizer == "adamw" else True,
        "capturable": config.cuda_graph,
    }
    # With FSDP a rank holds shards of the copies, see `shard_weights`.
    has_copies = config.master_weights == "fp32" and config.sharding not in FSDP
    optimizer_class = AdamWOfMasterWeights if has_copies else AdamW
    if config.sharding in ZERO1:
        from sdbench.engines.zero1 import Zero1

        group = None
        if config.sharding in WITHIN_NODE:  # all ranks make all groups
            group, _ = torch.distributed.new_subgroups(Ranks.from_environment().local_world_size)
        return Zero1(
            groups,
            optimizer_class=optimizer_class,
            process_group=group,
            parameters_as_bucket_view=False,
            **settings,
        )
    if config.optimizer == "adamw_one_pass":
        from sdbench.engines.one_pass_adamw import AdamWInOnePass

        return AdamWInOnePass(groups, **settings)
    return optimizer_class(groups, **settings)


def update_early(
    optimizer: torch.optim.Optimizer,
    job: TrainJob,
    config: EngineConfig,
    hooks: TrainingHooks | None,
) -> None:
    """Have `AdamWInOnePass` update each weight within the backward pass, if nothing forbids it.

    It needs one rank, one micro-batch, no clipping, and no hooks that read the gradients.
    """
    if not hasattr(optimizer, "update_in_backward"):
        return
    is_alone = Ranks.from_environment().world_size == 1
    is_one_microbatch = config.device_train_microbatch_size >= job.images_per_step
    if is_alone and is_one_microbatch and job.max_gradient_norm is None and hooks is None:
        optimizer.update_in_backward()


class AdamW(torch.optim.AdamW):
    """torch's AdamW, without copies of tensors that are channels_last.

    The fused CPU kernel copies tensors that are not contiguous. The update is elementwise, so a
    permuted view that is contiguous gives the same result. `_init_group`, a private method that
    lists a group's tensors for the kernel, is overridden to give it such views.
    """

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        is_complex = super()._init_group(group, *tensors)
        weights = tensors[0]
        # Gradients, first and second moments, and the largest second moments where they are kept;
        # the last list, the numbers of steps, is left out.
        alike = [of_one_kind for of_one_kind in tensors[:-1] if of_one_kind]
        for index in range(len(weights)):
            of_one_weight = [of_one_kind[index] for of_one_kind in alike]
            if all(map(_is_channels_last, of_one_weight)):
                for of_one_kind, tensor in zip(alike, of_one_weight, strict=True):
                    of_one_kind[index] = tensor.permute(0, 2, 3, 1)
        return is_complex


def _is_channels_last(tensor: Tensor) -> bool:
    """Return True for an unsharded CPU tensor with the channels last in memory."""
    if tensor.ndim != 4 or tensor.device.type != "cpu" or isinstance(tensor, DTensor):
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


class AdamWOfMasterWeights(torch.optim.Optimizer):
    """AdamW on fp32 copies of half-precision weights.

    Neighbouring bf16 numbers differ by 2^-8 of their value. Most updates are less than half of
    that: a bf16 weight would lose them, and the copies add them up. Checkpoints are made of
    `masters` and `state` by `TrainState`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        """Copy the trained weights; the settings are those of `torch.optim.AdamW`."""
        self._weights: list[Tensor] = []
        self._masters: list[Tensor] = []
        copied = []
        for group in groups:
            weights = [weight for weight in group["params"] if weight.requires_grad]
            masters = [weight.detach().float().requires_grad_() for weight in weights]
            copied.append({**group, "params": masters})
            self._weights += weights
            self._masters += masters
        self._adamw = AdamW(copied, **settings)
        # Groups without weights stay: other ranks may hold the state of all weights of a group.
        super().__init__(copied, self._adamw.defaults)
        # Shared, so that AdamW reads what a schedule sets here.
        self.param_groups, self.state = self._adamw.param_groups, self._adamw.state

    @property
    def masters(self) -> dict[int, Tensor]:
        """The fp32 copy of each weight, by the weight's id."""
        return {id(w): copy for w, copy in zip(self._weights, self._masters, strict=True)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the copies by the weights' gradients, and the weights from the copies."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self._adamw.step()
        self._adamw.zero_grad()
        if self._weights:  # torch's function takes no empty list
            torch._foreach_copy_(self._weights, self._masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients of the weights."""
        for weight in self._weights:
            weight.grad = None
