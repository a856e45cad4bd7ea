"""Composer's trainer with the internals of release 0.32 that the engine changes."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import composer
import cpuinfo
import torch
from composer import Event, Trainer
from composer.distributed import dist_strategy
from composer.utils import dist

from sdbench.base.errors import RunError
from sdbench.engines.training import mean_over_ranks
from sdbench.measure.phases import PhaseClock

# Private methods may mean something else in another release.
KNOWN_VERSION = "0.32."


class TrainerThatDoesNotWait(Trainer):
    """Composer's trainer without its seven reads from the device in every step.

    It reads the loss twice, the number of images twice, the number of tokens, the time of the step,
    and whether a rank has no more data. The host waits for the device with each read. None is
    needed: all ranks have equally many batches of one size, and the times are not used.
    """

    def __init__(
        self, *, clock: PhaseClock, begin_microbatch: Callable[..., object], **options: Any
    ) -> None:
        """Make the trainer; `begin_microbatch` is told with `is_last` of each micro-batch."""
        if not composer.__version__.startswith(KNOWN_VERSION):
            raise RunError(
                f"--engine composer changes internals of Composer {KNOWN_VERSION}x, and "
                f"{composer.__version__} is installed; --engine torch does without Composer"
            )
        self._clock = clock
        self._begin_microbatch = begin_microbatch
        super().__init__(**options)

    def _use_closures(self) -> bool:
        """No closures, since Composer reads the loss of each for the optimizer to return."""
        return False

    def _iter_dataloader(self, trainer_mode: Any) -> Iterator[Any]:
        """The batches, which never end: Composer would ask all ranks whether theirs have."""
        return iter(self.state.dataloader)

    def _train_batch(self, use_grad_scaling: bool) -> None:
        """Train on a batch and leave its mean loss over all ranks on the device.

        Composer reads nothing when this returns None, as in a step without a loss.
        """
        losses = super()._train_batch(use_grad_scaling)
        self.state.total_loss_dict = {
            name: mean_over_ranks(loss, self._clock) for name, loss in losses.items()
        }

    def _train_microbatches(
        self,
        microbatches: Sequence[Any],
        total_loss_dict: dict[str, torch.Tensor],
        ddp_sync: bool = True,
    ) -> torch.Tensor:
        """Compute the gradients of a batch as Composer does, counting images on the host."""
        assert ddp_sync, "Composer asks for it with closures only"
        state = self.state
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        uses_scaler = self._use_grad_scaling(state.precision, state.scaler)
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        batch, total = state.batch, total_loss_dict["loss/train/total"]
        num_images = sum(map(self._train_data_spec.get_num_samples_in_batch, microbatches))
        for number, microbatch in enumerate(microbatches, start=1):
            state.batch = microbatch  # on the device
            is_last = number == len(microbatches)
            self._begin_microbatch(is_last=is_last)
            total += self._train_microbatch(uses_scaler, num_images, is_last)["total"]
        state.batch = batch
        if uses_scaler:
            for optimizer in state.optimizers:
                state.scaler.unscale_(optimizer)
        # Of this rank; `_train_batch` puts the mean over all ranks in its place.
        state.total_loss_dict = total_loss_dict
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return total

    def _accumulate_time_across_ranks(
        self, num_samples: int, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """Samples and tokens of all ranks, and the time of this one."""
        return (
            num_samples * dist.get_world_size(),
            num_tokens * dist.get_world_size(),
            batch_time,
        )


@contextlib.contextmanager
def trainer_is_made(*, make_ddp: Any) -> Iterator[None]:
    """A context for the constructor of the trainer, which wraps the model by `make_ddp`.

    Composer itself passes no options on to DDP.
    """
    with (
        mock.patch.object(dist_strategy, "DistributedDataParallel", make_ddp),
        # py-cpuinfo counts the CPU's cycles for a second, for a name that is never shown.
        mock.patch.object(cpuinfo, "get_cpu_info", dict),
    ):
        yield
