"""`BadLosses` handles losses, gradients and weights that are not finite: `--on_bad_loss`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import RunError
from sdbench.measure.timer import Losses
from sdbench.ranks.distributed import Ranks, gather
from sdbench.record.history import BAD_BATCHES_NAME
from sdbench.record.store import INVALID
from sdbench.training.log import TrainLog

if TYPE_CHECKING:
    from torch import Tensor

    from sdbench.data.batches.loader import CheckedLoader
    from sdbench.engines.train_state import TrainState
    from sdbench.state.checkpoints import Checkpoint, Checkpoints

STOP, SKIP, BACK = "stop", "skip", "back"
# A run with more bad steps in a row does not recover, and ends.
MAX_IN_A_ROW = 10


@dataclasses.dataclass(kw_only=True)
class BadLosses:
    """Handles the bad steps of a run, on all ranks alike.

    A step is bad if its loss or the norm of its gradients is not finite. The norm is known if
    gradients are clipped or bad updates skipped; the scaler of fp16 skips such updates itself.
    Otherwise a save finds that the state is not finite, and saves nothing.
    """

    action: str
    has_scaler: bool
    losses: Losses
    loader: CheckedLoader
    checkpoints: Checkpoints
    log: TrainLog | None  # of the first rank
    ranks: Ranks
    _norms: Losses = dataclasses.field(default_factory=Losses)
    # The step of a save and the tensor that it found not to be finite.
    _bad_save: tuple[int, str] | None = None
    _num_in_a_row: int = 0
    _came_back_to: int | None = None

    def judge(self, state: TrainState, loss: Tensor, norm: Tensor | None) -> None:
        """With --on_bad_loss skip, skip the update if a rank's loss or gradients are not finite.

        Waits for the device only then. `loss` and `norm`, if it is known, are on the device.
        """
        import torch

        if self.has_scaler:
            norm = None
        elif norm is None and self.action == SKIP:
            norm = state.gradient_norm()
        if norm is None and self.action != SKIP:
            return
        known = [loss] if norm is None else [loss, norm]
        sums = torch.stack([one.detach().double().squeeze() for one in known])
        if self.ranks.world_size > 1:
            # A norm may be that of this rank alone, and what is not finite has to be so on all.
            torch.distributed.all_reduce(sums)
        if norm is not None:
            self._norms.add(sums[-1] / self.ranks.world_size)
        if self.action == SKIP:
            if sums.isfinite().all():
                self._num_in_a_row = 0
            else:
                state.skip_update()

    @property
    def is_known(self) -> bool:
        """Whether a fault has been read and not handled yet; the same on all ranks."""
        found = (self.losses.first_not_finite, self._norms.first_not_finite, self._bad_save)
        return any(one is not None for one in found)

    def read(self) -> None:
        """Read losses and norms up to this step, which waits for the device."""
        self.losses.read()
        self._norms.read()
        if not self.is_known:
            self._num_in_a_row = 0

    def save_was_bad(self, step: int, tensor: str) -> None:
        """Note that a save has found a tensor that is not finite after a step."""
        if self._bad_save is None:
            self._bad_save = step, tensor

    def act(self, state: TrainState, *, is_last: bool) -> None:
        """Log the first bad step and its samples, and go on as --on_bad_loss says.

        A `RunError` ends the run. The state is not whole then, nor where an earlier one has been
        loaded.
        """
        step, tensor, facts = self._find_fault(state.num_steps)
        self._num_in_a_row += 1
        checkpoint = self.checkpoints.newest() if self.action == BACK else None
        reason = self._reason_to_stop(tensor, checkpoint, is_last=is_last)
        facts["action"] = self.action if reason is None else STOP
        if tensor is None:
            names = self.loader.names_before(state.position, num_back=state.num_steps - step)
            names_of_ranks = gather(names, self.ranks)
            if self.log is not None:
                self.log.add_bad_batch(step=step, **facts, samples_of_ranks=names_of_ranks)
        if facts["action"] == BACK:
            assert checkpoint is not None
            facts["lost_steps"] = [checkpoint.step + 1, state.num_steps]
        if self.log is not None:
            self.log.add_event("bad_loss", step=step, **facts)
        if facts["action"] != SKIP:
            state.is_whole = False
        if reason is not None:
            what = ", ".join(f"{name} {facts[name]}" for name in facts if name != "action")
            raise RunError(
                f"step {step} is not finite ({what}){reason}: nothing is saved of it (--on_bad_loss"
                f" {self.action}); {BAD_BATCHES_NAME} names the samples of bad losses",
                status=INVALID,
            )
        if checkpoint is None:
            return
        # Random states, steps and the position in the data stay as they are.
        tensors = state.tensors()
        checkpoint.load_into(
            {name: tensor for name, tensor in tensors.items() if not name.startswith("random.")}
        )
        state.went_back(checkpoint.facts["state"])
        self._came_back_to = checkpoint.step

    def _find_fault(self, num_steps: int) -> tuple[int, str | None, dict[str, Any]]:
        """The first fault, which counts as handled now: its step, the bad tensor, and its facts.

        A bad loss or norm comes before the bad tensor of a save that it leads to.
        """
        losses, norms = self.losses.read(), self._norms.read()
        first = num_steps + 1 - len(losses)  # the step of the first loss of this process
        found = (self.losses.first_not_finite, self._norms.first_not_finite)
        step = min((first + index for index in found if index is not None), default=num_steps + 1)
        tensor = None
        if self._bad_save is not None and self._bad_save[0] < step:
            step, tensor = self._bad_save
        # JSON has no number for what is not finite.
        facts = {"loss": str(losses[step - first])}
        if norms:
            facts["gradient_norm"] = str(norms[step - first])
        if tensor is not None:
            facts["tensor"] = tensor
        self.losses.forgive()
        self._norms.forgive()
        self._bad_save = None
        return step, tensor, facts

    def _reason_to_stop(
        self, tensor: str | None, checkpoint: Checkpoint | None, *, is_last: bool
    ) -> str | None:
        """Why the run ends, as a part of a sentence; None if it goes on."""
        if self.action == STOP:
            return ""
        if self._num_in_a_row > MAX_IN_A_ROW:
            return f", after {MAX_IN_A_ROW} others in a row"
        if self.action == SKIP:
            return None if tensor is None else ", which no skipped update can mend"
        if checkpoint is None:
            return ", and there is no checkpoint to go back to (--save_every_batches)"
        if checkpoint.step == self._came_back_to:
            return f", and the run has come back to step {checkpoint.step} before"
        return ", and no step is left" if is_last else None
