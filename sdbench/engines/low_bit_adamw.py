"""torchao's AdamW whose state has 8 or 4 bits a number (arXiv 2110.02861, 2309.01507)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW4bit, AdamW8bit
from torchao.optim.adam import single_param_adam

from sdbench.engines.adamw import Updating
from sdbench.settings.parallel import has_cpp_compiler

has_compiler = functools.cache(has_cpp_compiler)


class _Stepping(Updating):
    """Steps of torchao's optimizer on weights as vectors.

    torchao compiles its update for each shape of a weight. Of vectors of 8 bits one compiled update
    serves all sizes. That of 4 bits does not, and takes 40 s for each size on two cores, so a CPU
    runs it without compiling.
    """

    bits: int
    param_groups: list[dict[str, Any]]
    state: Any
    _new_buffer: Callable[..., Tensor]

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        """Make the state of all weights; torchao makes each in the first step.

        There it would lie between what updates allocate for a moment, and a CPU's heap would keep
        the rest in pieces: 1.4 GiB for two blocks of Flux.1.
        """
        super().__init__(groups, **options)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.requires_grad:
                    vector = weight.detach().reshape(-1)
                    self.state[weight] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": self._new_buffer(vector, True),
                        "exp_avg_sq": self._new_buffer(vector, False),
                    }

    def _update(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update_weight(weight, group)

    def _update_weight(self, weight: Tensor, group: dict[str, Any]) -> None:
        # A view, or a copy of a weight that is channels_last.
        vector = weight.detach().reshape(-1)
        state = self.state[weight]
        state["step"] += 1
        is_compiled = weight.device.type != "cpu" or (self.bits == 8 and has_compiler())
        update = _compile() if is_compiled else single_param_adam
        with torch._dynamo.utils.disable_cache_limit():
            update(
                vector,
                weight.grad.reshape(-1),
                state["step"],
                state["exp_avg"],
                state["exp_avg_sq"],
                None,
                torch.as_tensor(group["lr"], dtype=torch.float32),
                *group["betas"],
                group["weight_decay"],
                group["eps"],
                IS_ADAMW=True,
                # Rounded to the nearest, bf16 weights would lose most of their updates.
                BF16_STOCHASTIC_ROUND=weight.dtype is torch.bfloat16,
            )
        if vector.data_ptr() != weight.data_ptr():
            weight.copy_(vector.view(weight.shape))


class _AdamW8bit(_Stepping, AdamW8bit):
    bits = 8


class _AdamW4bit(_Stepping, AdamW4bit):
    bits = 4


ADAMW_OF_BITS = {one.bits: one for one in (_AdamW8bit, _AdamW4bit)}


@functools.cache
def _compile() -> Callable[..., None]:
    return torch.compile(single_param_adam, fullgraph=True, dynamic=True)
