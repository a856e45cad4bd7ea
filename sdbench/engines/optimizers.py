"""The optimizers that the settings offer: AdamW in torch's variants, and on fp32 copies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdbench.base.errors import RunError
from sdbench.engines.job import EngineConfig, TrainingHooks, TrainJob
from sdbench.ranks.distributed import Ranks
from sdbench.settings.parallel import FSDP, LOW_BIT_ADAMW, ONE_PASS, WITHIN_NODE, ZERO1

# Parameters of AdamW._init_group in the releases of torch that the suite was tried with.
INIT_GROUP = (
    *("group", "params_with_grad", "grads"),
    *("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
)


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
    if config.optimizer in ONE_PASS:
        from sdbench.engines.one_pass_adamw import AdamWInOnePass

        return AdamWInOnePass(groups, **settings)
    return kind(groups, **settings)


def update_early(
    optimizer: torch.optim.Optimizer,
    job: TrainJob,
    config: EngineConfig,
    hooks: TrainingHooks | None,
) -> None:
    """Have each weight updated within the backward pass, with --update_in_backward.

    `AdamWInOnePass` does so without being asked where nothing forbids it: in steps of one rank and
    one micro-batch, without clipping and without hooks that read the gradients.
    """
    is_alone = Ranks.from_environment().world_size == 1
    is_one_microbatch = config.device_train_microbatch_size >= job.images_per_step
    reads_gradients = job.max_gradient_norm is not None or hooks is not None
    is_free = is_alone and is_one_microbatch and not reads_gradients
    if config.update_in_backward or (config.optimizer in ONE_PASS and is_free):
        _update_in_backward(optimizer)


def _update_in_backward(optimizer: torch.optim.Optimizer) -> None:
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


class AdamW(torch.optim.AdamW):
    """torch's AdamW, whose state is there from the start, without copies of channels_last tensors.

    torch makes the state in the first step, between gradients that come and go; a CPU's heap then
    keeps the rest in pieces: 1.2 GiB for four blocks of Flux.1 with updates in the backward pass.
    The fused CPU kernel copies tensors that are not contiguous. The update is elementwise, so a
    permuted view that is contiguous gives the same result. `_init_group`, a private method that
    lists a group's tensors for the kernel, is overridden to give it such views.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        if (found := tuple(inspect.signature(super()._init_group).parameters)) != INIT_GROUP:
            raise RunError(
                f"torch {torch.__version__} is not known to this suite: its AdamW lists the "
                f"tensors {found}, and not {INIT_GROUP}; requirements.txt has a torch that is known"
            )
        super().__init__(*args, **settings)
        for group in self.param_groups:
            on_device = group["fused"] or group["capturable"]
            for weight in group["params"]:
                if weight.requires_grad:
                    self.state[weight] = {
                        "step": torch.zeros((), device=weight.device if on_device else "cpu"),
                        "exp_avg": torch.zeros_like(weight),
                        "exp_avg_sq": torch.zeros_like(weight),
                    }

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


class Updating:
    """An optimizer's `step`, as torch has it, around `_update`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError


class AdamWOfMasterWeights(Updating, torch.optim.Optimizer):
    """AdamW on fp32 copies of half-precision weights.

    Neighbouring bf16 numbers differ by 2^-8 of their value. Most updates are less than half of
    that: a bf16 weight would lose them, and the copies add them up. Checkpoints are made of
    `masters` and `state` by `TrainState`.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        kind: Callable[..., torch.optim.Optimizer] = AdamW,
        **settings: Any,
    ) -> None:
        """Copy the trained weights; the settings are those of `kind`, which updates the copies."""
        self._weights: list[Tensor] = []
        self._masters: list[Tensor] = []
        copied = []
        for group in groups:
            weights = [weight for weight in group["params"] if weight.requires_grad]
            masters = [weight.detach().float().requires_grad_() for weight in weights]
            copied.append({**group, "params": masters})
            self._weights += weights
            self._masters += masters
        self._adamw = kind(copied, **settings)
        # Groups without weights stay: other ranks may hold the state of all weights of a group.
        super().__init__(copied, self._adamw.defaults)
        # Shared, so that AdamW reads what a schedule sets here.
        self.param_groups, self.state = self._adamw.param_groups, self._adamw.state
        self.weights_of_masters = {
            id(copy): weight for weight, copy in zip(self._weights, self._masters, strict=True)
        }

    @property
    def masters(self) -> dict[int, Tensor]:
        """The fp32 copy of each weight, by the weight's id."""
        return {id(w): copy for w, copy in zip(self._weights, self._masters, strict=True)}

    def _update(self) -> None:
        """Update the copies by the weights' gradients, and the weights from the copies."""
        masters = [copy for group in self.param_groups for copy in group["params"]]
        weights = [self.weights_of_masters[id(copy)] for copy in masters]
        for weight, master in zip(weights, masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self._adamw.step()
        self._adamw.zero_grad()
        if weights:  # torch's function takes no empty list
            torch._foreach_copy_(weights, masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients of the weights."""
        for weight in self._weights:
            weight.grad = None
