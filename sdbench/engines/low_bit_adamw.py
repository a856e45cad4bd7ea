"""torchao's AdamW whose state has 8 or 4 bits a number (arXiv 2110.02861, 2309.01507)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torchao.optim import AdamW4bit, AdamW8bit


class _Stepping:
    """What both have beside torchao's own: rates that are numbers, and no compiling on a CPU."""

    param_groups: list[dict[str, Any]]

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        # Without it bf16 weights would lose most of their updates; it does nothing to others.
        super().__init__(groups, bf16_stochastic_round=True, **settings)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights."""
        for group in self.param_groups:  # torchao takes only tensors, ZeRO-1 and others set numbers
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
        on_cpu = all(w.device.type == "cpu" for group in self.param_groups for w in group["params"])
        # torchao compiles an update for each shape of a weight: minutes on a CPU, for little.
        with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
            return super().step(closure)


class _AdamW8bit(_Stepping, AdamW8bit):
    pass


class _AdamW4bit(_Stepping, AdamW4bit):
    pass


ADAMW_OF_BITS = {8: _AdamW8bit, 4: _AdamW4bit}
