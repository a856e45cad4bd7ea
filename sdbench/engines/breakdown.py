"""Separates a rank's own work from its waits for the gradients and losses of other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sdbench.measure import phases
from sdbench.measure.phases import PhaseClock
from sdbench.ranks.distributed import Ranks


class LastGradient:
    """Switches the phase when the last gradient of a backward pass has been computed.

    DDP averages finished gradients while the others are computed. Only the communication after the
    last gradient, which includes waiting for slower ranks, makes the step longer. FSDP's gradients
    are finished when they have been reduced; on a CPU that blocks and counts as backward pass.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], clock: PhaseClock) -> None:
        """Prepare; hooks are set in profiled backward passes only."""
        self._parameters = list(weights)
        self._clock = clock
        self._hooks: list[Any] = []
        self._num_missing = 0

    def backward_begins(self) -> None:
        """Switch to the phase `BACKWARD` and begin to count gradients."""
        self._clock.switch(phases.BACKWARD)
        if self._clock.is_running and torch.distributed.is_initialized():
            self._num_missing = len(self._parameters)
            self._hooks = [
                weight.register_post_accumulate_grad_hook(self._count)
                for weight in self._parameters
            ]

    def backward_ends(self) -> None:
        """Remove the hooks, so that measured steps have none, and switch to the phase `OTHER`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._clock.switch(phases.OTHER)

    def _count(self, weight: torch.Tensor) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._clock.switch(phases.GRADIENT_COMMUNICATION)


def mean_over_ranks(loss: torch.Tensor, clock: PhaseClock) -> torch.Tensor:
    """The mean of the ranks' losses on every rank; `loss` is overwritten."""
    world_size = Ranks.from_environment().world_size
    if world_size == 1:
        return loss
    with clock.phase(phases.RANK_WAIT):
        torch.distributed.all_reduce(loss)
    return loss.double() / world_size
