"""AdamW in torch's variants, and on fp32 copies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdbench.base.errors import RunError

# Parameters of AdamW._init_group in the releases of torch that the suite was tried with.
INIT_GROUP = (
    *("group", "params_with_grad", "grads"),
    *("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
)


class AdamW(torch.optim.AdamW):
    """torch's AdamW, whose state is there from the start, without copies of channels_last tensors.

    torch makes the state in the first step, between gradients that come and go; a CPU's heap then
    keeps the rest in pieces: 1.2 GiB for four blocks of Flux.1 with updates in the backward pass.
    The fused CPU kernel copies tensors that are not contiguous. The update is elementwise, so a
    permuted view that is contiguous gives the same result. `_init_group`, a private method that
    lists a group's tensors for the kernel, is overridden to give it such views.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        if (found := tuple(inspect.signature(super()._init_group).parameters)) != INIT_GROUP:
            raise RunError(
                f"torch {torch.__version__} is not known to this suite: its AdamW lists the "
                f"tensors {found}, and not {INIT_GROUP}; requirements.txt has a torch that is known"
            )
        super().__init__(*args, **options)
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
        **options: Any,
    ) -> None:
        """Copy the trained weights; the options are those of `kind`, which updates the copies."""
        self._weights: list[Tensor] = []
        self._masters: list[Tensor] = []
        copied = []
        for group in groups:
            weights = [weight for weight in group["params"] if weight.requires_grad]
            masters = [weight.detach().float().requires_grad_() for weight in weights]
            copied.append({**group, "params": masters})
            self._weights += weights
            self._masters += masters
        self._adamw = kind(copied, **options)
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
