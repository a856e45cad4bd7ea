"""What is done about a loss that is not finite: `--on_bad_loss`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from sdbench.base.errors import RunError
from sdbench.ranks.distributed import Ranks, gather
from sdbench.record.history import BAD_BATCHES_NAME
from sdbench.record.store import INVALID
from sdbench.tasks.train.log import TrainLog

if TYPE_CHECKING:
    from torch import Tensor

    from sdbench.data.pipeline.loader import CheckedLoader
    from sdbench.engines.state import TrainState
    from sdbench.measure.losses import Losses
    from sdbench.state.checkpoints import Checkpoint, Checkpoints

STOP, SKIP, BACK = "stop", "skip", "back"
# So many bad losses without a good one between them end a run: it does not recover.
MAX_IN_A_ROW = 10


class BadLosses:
    """Deals with the bad losses of a run; what it does, it does on all ranks."""

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
    ) -> None:
        """Join the pieces.

        Args:
            action: A value of --on_bad_loss.
            losses: Of the steps of this process.
            loader: Of this rank; knows which samples a batch had.
            checkpoints: Of the run.
            folder: Of the run.
            log: Of the run, on the first rank; None on the others.
            ranks: The place of this process.
        """
        self._action = action
        self._losses = losses
        self._loader = loader
        self._checkpoints = checkpoints
        self._path = folder / BAD_BATCHES_NAME
        self._log = log
        self._ranks = ranks
        self._num_in_a_row = 0

    def judge(self, state: TrainState, loss: Tensor) -> None:
        """Leave a step's update out if the loss of any rank is not finite, and that is asked for.

        Only then it waits for the device.

        Args:
            state: Of this rank, whose gradients are there.
            loss: Of this rank's batch, on the device.
        """
        if self._action != SKIP:
            return
        total = loss.detach().clone()
        if self._ranks.world_size > 1:
            import torch

            torch.distributed.all_reduce(total)
        if total.isfinite():
            self.all_good()
        else:
            state.skip_update()

    @property
    def is_known(self) -> bool:
        """Whether a bad loss has been read that nothing has been done about; same on all ranks."""
        return self._losses.first_not_finite is not None

    def all_good(self) -> None:
        """The losses up to this step have been read, and are finite."""
        self._num_in_a_row = 0

    def act(self, state: TrainState) -> bool:
        """Note the first bad loss and its samples, and do what is asked for.

        Args:
            state: Of this rank behind a step, at which the bad loss is known.

        Returns:
            Whether an earlier state has been loaded.

        Raises:
            RunError: The run ends.
        """
        losses = self._losses.read()
        index = self._losses.first_not_finite
        assert index is not None
        num_back = len(losses) - 1 - index
        step, loss = state.num_steps - num_back, losses[index]
        self._losses.forgive()
        self._num_in_a_row += 1
        checkpoint = self._find_checkpoint() if self._action == BACK else None
        reason = self._reason_to_stop(checkpoint)
        action = self._action if reason is None else STOP
        names = gather(self._loader.names_before(state.position, num_back=num_back), self._ranks)
        if self._log is not None:
            # JSON has no number for such a loss.
            facts = {"step": step, "loss": str(loss), "action": action}
            self._log.add_bad_batch(**facts, samples_of_ranks=names)
            if action == BACK:
                assert checkpoint is not None
                facts |= {"lost_steps": [checkpoint.step + 1, state.num_steps]}
            self._log.add_event("bad_loss", **facts)
        if reason is not None:
            raise RunError(
                f"the loss is {loss} at step {step}{reason}: nothing is saved of it; its samples "
                f"are named in {self._path}",
                status=INVALID,
            )
        if checkpoint is not None:
            _go_back(state, checkpoint)
        return checkpoint is not None

    def _find_checkpoint(self) -> Checkpoint | None:
        with contextlib.suppress(RunError):  # one that could not be saved is reported elsewhere
            self._checkpoints.finish()
        return self._checkpoints.newest()

    def _reason_to_stop(self, checkpoint: Checkpoint | None) -> str | None:
        """The end of a sentence, or None where the run goes on."""
        if self._action == STOP:
            return ""
        if self._num_in_a_row > MAX_IN_A_ROW:
            return f", after {MAX_IN_A_ROW} others in a row (--on_bad_loss {self._action})"
        if self._action == BACK and checkpoint is None:
            return ", and there is no checkpoint to go back to (--save_every_batches)"
        return None


def _go_back(state: TrainState, checkpoint: Checkpoint) -> None:
    """Load weights, optimizer and average of a checkpoint; steps, data and random numbers go on."""
    tensors = state.tensors()
    checkpoint.load_into(
        {name: tensor for name, tensor in tensors.items() if not name.startswith("random.")}
    )
    state.went_back(checkpoint.facts["state"])
