"""The optimizers that the settings can ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sdbench.engines.torch_compat import AdamW


def make_optimizer(model: torch.nn.Module, *, config: Any) -> torch.optim.Optimizer:
    """Make the AdamW that the config asks for.

    Args:
        model: As the engine has placed it, or shared it out.
        config: The resolved config.

    Returns:
        It, with its state in the type of the tensors that it updates.
    """
    parameters = list(model.parameters())
    if config.optimizer_params == "trainable":
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
    # fused=None leaves torch its default: a foreach loop on a GPU, a loop over tensors on a CPU.
    settings = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "fused": True if config.optimizer == "adamw_fused" else None,
        "capturable": config.cuda_graph,
    }
    if config.sharding == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            parameters,
            optimizer_class=AdamW,
            parameters_as_bucket_view=False,
            **settings,
        )
    if config.master_weights == "fp32":
        return AdamWOfMasterWeights(parameters, **settings)
    return AdamW(parameters, **settings)


class AdamWOfMasterWeights(torch.optim.Optimizer):
    """AdamW on fp32 copies of half-precision weights.

    A step of lr x update is mostly less than half the distance of two neighbouring bf16 numbers
    (2^-8 of the weight) and would be lost in them; the copies collect it.
    """

    def __init__(self, weights: Iterable[Tensor], **settings: Any) -> None:
        """Copy the weights.

        Args:
            weights: Parameters of a model.
            **settings: Of `torch.optim.AdamW`.
        """
        self._weights = [weight for weight in weights if weight.requires_grad]
        copies = [weight.detach().float() for weight in self._weights]
        self._masters = [copy.requires_grad_() for copy in copies]
        self._adamw = AdamW(self._masters, **settings)
        super().__init__(self._masters, self._adamw.defaults)
        self._share()

    def _share(self) -> None:
        """Have one set of groups and one state: what a schedule sets here, AdamW reads."""
        self.param_groups, self.state = self._adamw.param_groups, self._adamw.state

    @property
    def masters(self) -> dict[int, Tensor]:
        """The copy of each weight, by the weight's id."""
        return {id(w): copy for w, copy in zip(self._weights, self._masters, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """The state of AdamW, and `masters`: the copies, in the order of the weights."""
        return {**super().state_dict(), "masters": [copy.detach() for copy in self._masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken of the same weights; sets the weights, too."""
        self._adamw.load_state_dict(state_dict)
        self._share()
        torch._foreach_copy_(self._masters, state_dict["masters"])
        torch._foreach_copy_(self._weights, self._masters)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the copies by the weights' gradients, and the weights from the copies."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self._adamw.step()
        self._adamw.zero_grad()
        torch._foreach_copy_(self._weights, self._masters)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the weights' gradients."""
        for weight in self._weights:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()
