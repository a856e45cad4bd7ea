"""`BadLosses` handles losses, gradients and weights that are not finite: `--on_bad_loss`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from sdbench.base.errors import RunError
from sdbench.measure.losses import Losses
from sdbench.ranks.distributed import Ranks, gather
from sdbench.record.history import BAD_BATCHES_NAME
from sdbench.record.store import INVALID
from sdbench.tasks.train.log import TrainLog

if TYPE_CHECKING:
    from torch import Tensor

    from sdbench.data.pipeline.loader import CheckedLoader
    from sdbench.engines.train_state import TrainState
    from sdbench.state.checkpoints import Checkpoint, Checkpoints

STOP, SKIP, BACK = "stop", "skip", "back"
# A run with more bad steps in a row does not recover, and ends.
MAX_IN_A_ROW = 10


@dataclasses.dataclass(frozen=True)
class Fault:
    """The first loss, gradient or state of a run that is not finite.

    Attributes:
        step: The step of the loss, or the one after which the state was saved.
        loss: Loss of the step.
        gradient_norm: Norm of its gradients; None if it is not known.
        tensor: The part of the state that a save found; None if loss or gradients are the fault.
    """

    step: int
    loss: float
    gradient_norm: float | None
    tensor: str | None

    def __str__(self) -> str:
        if self.tensor is not None:
            return f"{self.tensor} is not finite behind step {self.step}"
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss} at step {self.step}"
        return f"the norm of the gradients is {self.gradient_norm} at step {self.step}"


class BadLosses:
    """Handles the bad steps of a run, on all ranks alike.

    A step is bad if its loss is not finite, or the norm of its gradients. The norm is known if
    gradients are clipped or bad updates skipped; the scaler of fp16 skips such updates itself.
    Otherwise a save finds that the state is not finite, and saves nothing.
    """

    def __init__(
        self,
        action: str,
        *,
        losses: Losses,
        loader: CheckedLoader,
        checkpoints: Checkpoints,
        folder: Path,
        log: TrainLog | None,
        ranks: Ranks,
        has_scaler: bool,
    ) -> None:
        """Connect the pieces.

        Args:
            action: A value of --on_bad_loss.
            losses: The losses of this process.
            loader: The loader of this rank, which knows the samples of a batch.
            checkpoints: The checkpoints of the run.
            folder: The folder of the run.
            log: The log of the run on the first rank; None on the others.
            ranks: The rank of this process.
            has_scaler: The losses are scaled, for fp16.
        """
        self._action = action
        self._losses = losses
        self._loader = loader
        self._checkpoints = checkpoints
        self._path = folder / BAD_BATCHES_NAME
        self._log = log
        self._ranks = ranks
        self._has_scaler = has_scaler
        self._norms = Losses()
        self._bad_save: tuple[int, str] | None = None
        self._num_in_a_row = 0
        self._came_back_to: int | None = None

    def judge(self, state: TrainState, loss: Tensor, norm: Tensor | None) -> None:
        """With --on_bad_loss skip, skip the update if a rank's loss or gradients are not finite.

        Waits for the device only then. `loss` and `norm`, if it is known, are on the device.
        """
        if self._has_scaler:
            norm = None
        elif norm is None and self._action == SKIP:
            norm = state.gradient_norm()
        if norm is not None:
            self._norms.add(norm)
        if self._action != SKIP:
            return
        total = loss.detach().double()
        if norm is not None:
            total += norm
        if self._ranks.world_size > 1:
            import torch

            torch.distributed.all_reduce(total)
        if total.isfinite():
            self.all_good()
        else:
            state.skip_update()

    @property
    def is_known(self) -> bool:
        """Whether a fault has been read and not handled yet; the same on all ranks."""
        found = (self._losses.first_not_finite, self._norms.first_not_finite, self._bad_save)
        return any(one is not None for one in found)

    def read(self) -> None:
        """Read losses and norms up to this step, which waits for the device."""
        self._losses.read()
        self._norms.read()

    def all_good(self) -> None:
        """Note that all steps up to this one are good."""
        self._num_in_a_row = 0

    def save_was_bad(self, step: int, tensor: str) -> None:
        """Note that a save has found a tensor that is not finite after a step."""
        if self._bad_save is None:
            self._bad_save = step, tensor

    def act(self, state: TrainState, *, is_last: bool) -> bool:
        """Log the first bad step and its samples, and go on as --on_bad_loss says.

        Args:
            state: The state of this rank after a step.
            is_last: No step follows.

        Returns:
            True if an earlier state has been loaded.

        Raises:
            RunError: The run ends.
        """
        fault = self._find_fault(state.num_steps)
        self._losses.forgive()
        self._norms.forgive()
        self._bad_save = None
        self._num_in_a_row += 1
        checkpoint = self._checkpoints.newest() if self._action == BACK else None
        reason = self._reason_to_stop(fault, checkpoint, is_last=is_last)
        action = self._action if reason is None else STOP
        # JSON has no number for what is not finite.
        facts = {"step": fault.step, "loss": str(fault.loss), "action": action}
        if fault.gradient_norm is not None:
            facts["gradient_norm"] = str(fault.gradient_norm)
        if fault.tensor is not None:
            facts["tensor"] = fault.tensor
        else:
            num_back = state.num_steps - fault.step
            names = self._loader.names_before(state.position, num_back=num_back)
            names_of_ranks = gather(names, self._ranks)
            if self._log is not None:
                self._log.add_bad_batch(**facts, samples_of_ranks=names_of_ranks)
        if self._log is not None:
            if action == BACK:
                assert checkpoint is not None
                facts |= {"lost_steps": [checkpoint.step + 1, state.num_steps]}
            self._log.add_event("bad_loss", **facts)
        if reason is not None:
            cause = f"its samples are named in {self._path}"
            if fault.tensor is not None:
                cause = "an update since the save before made it so, or a fault of the machine"
            raise RunError(
                f"{fault}{reason}: nothing is saved of it; {cause}",
                status=INVALID,
            )
        if checkpoint is not None:
            _go_back(state, checkpoint)
            self._came_back_to = checkpoint.step
        return checkpoint is not None

    def _find_fault(self, num_steps: int) -> Fault:
        """The first fault: a bad loss or norm comes before the bad state that it leads to."""
        losses, norms = self._losses.read(), self._norms.read()
        first = num_steps + 1 - len(losses)  # the step of the first loss of this process
        found = (self._losses.first_not_finite, self._norms.first_not_finite)
        steps = [first + index for index in found if index is not None]
        tensor = None
        if self._bad_save is not None and all(self._bad_save[0] < step for step in steps):
            step, tensor = self._bad_save
        else:
            step = min(steps)
        norm = norms[step - first] if norms else None
        return Fault(step, losses[step - first], norm, tensor)

    def _reason_to_stop(
        self, fault: Fault, checkpoint: Checkpoint | None, *, is_last: bool
    ) -> str | None:
        """Why the run ends, as the end of a sentence; None if it goes on."""
        told = f"(--on_bad_loss {self._action})"
        if self._action == STOP:
            return ""
        if self._action == SKIP and fault.tensor is not None:
            return f", which no skipped update can mend {told}"
        if self._num_in_a_row > MAX_IN_A_ROW:
            return f", after {MAX_IN_A_ROW} others in a row {told}"
        if self._action == SKIP:
            return None
        if checkpoint is None:
            return ", and there is no checkpoint to go back to (--save_every_batches)"
        if checkpoint.step == self._came_back_to:
            return (
                f", and the run has come back to step {checkpoint.step} before: more checkpoints "
                "(--save_every_batches) or --on_bad_loss skip may help"
            )
        if is_last:
            return f", and no step is left to go on with from step {checkpoint.step} {told}"
        return None


def _go_back(state: TrainState, checkpoint: Checkpoint) -> None:
    """Load weights, optimizer and average, but no random states, steps or position in the data."""
    tensors = state.tensors()
    checkpoint.load_into(
        {name: tensor for name, tensor in tensors.items() if not name.startswith("random.")}
    )
    state.went_back(checkpoint.facts["state"])
