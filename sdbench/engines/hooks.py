"""`TrainingHooks`: what an engine calls around its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from sdbench.engines.train_state import TrainState


class TrainingHooks(Protocol):
    """What train.py does around the steps of a run; a measurement has no hooks."""

    def begins(self, state: TrainState) -> None:
        """Restore a state, if there is one: everything is built and placed, nothing trained yet."""

    def gradients_ready(self, loss: torch.Tensor, norm: torch.Tensor | None) -> None:
        """Act on the gradients of a step before its update, which it may skip.

        The loss of this rank's batch and the norm of all gradients before they were clipped, None
        where they are not, are on the device.
        """

    def step_ended(self, state: TrainState) -> None:
        """Act after a step, once the watch has counted it."""
