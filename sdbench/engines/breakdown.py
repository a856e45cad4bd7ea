"""Tells the backward pass from the wait for the other ranks behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sdbench.measure import phases
from sdbench.measure.phases import PhaseClock


class LastGradient:
    """Notices when a rank has computed its last gradient: the rest of the pass is communication.

    While it computes, torch's DDP averages the gradients that are there already; only what goes on
    behind the last of them, waiting for slower ranks included, makes the step longer. FSDP's
    gradients are there when they are shared out, so that on a CPU, where that blocks, it counts as
    backward pass.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], clock: PhaseClock) -> None:
        """Prepare; nothing is hooked until a profiled backward pass.

        Args:
            weights: Parameters that get a gradient, each once in a backward pass.
            clock: Is switched behind the last of them.
        """
        self._parameters = list(weights)
        self._clock = clock
        self._hooks: list[Any] = []
        self._num_missing = 0

    def backward_begins(self) -> None:
        """Charge what follows to the backward pass and count the gradients to come."""
        self._clock.switch(phases.BACKWARD)
        if self._clock.is_running and torch.distributed.is_initialized():
            self._num_missing = len(self._parameters)
            self._hooks = [
                weight.register_post_accumulate_grad_hook(self._count)
                for weight in self._parameters
            ]

    def backward_ends(self) -> None:
        """Take the hooks away again: the measured steps do without them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._clock.switch(phases.OTHER)

    def _count(self, weight: torch.Tensor) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._clock.switch(phases.GRADIENT_COMMUNICATION)
