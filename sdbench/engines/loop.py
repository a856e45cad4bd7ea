"""`Training`: what the loops of all engines share.

An engine's own loop calls, in each step: `gradients_ready` before the update, and `end_step` after
it; Composer's loop, which steps the schedule itself, calls the pieces of `end_step`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdbench.engines.device_batches import Batches
from sdbench.engines.ema import ForeachEma
from sdbench.engines.hooks import TrainingHooks
from sdbench.engines.job import TrainJob
from sdbench.engines.optimizers import parameter_groups, update_in_backward
from sdbench.engines.sharding import held_weights, shard_weights
from sdbench.engines.train_state import TrainState
from sdbench.measure import phases
from sdbench.measure.phases import PhaseClock
from sdbench.measure.watch import StepWatch
from sdbench.ranks.distributed import Ranks
from sdbench.settings.parallel import FSDP, ZERO1
from sdbench.settings.recipe import EngineConfig


def find_device() -> torch.device:
    """This process's current GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Training:
    """A job whose model is on its device, with its optimizer, average and state.

    Attributes:
        ema: The suite's own moving average; None if there is none or Composer keeps it.
        last_gradient: Separates the backward pass from the wait for other ranks.
        state: What is saved and restored; made by `begin`.
        schedule: Of the optimizer's rates, from the step that `state` has come to.
    """

    state: TrainState
    schedule: torch.optim.lr_scheduler.LambdaLR

    def __init__(
        self, job: TrainJob, config: EngineConfig, watch: StepWatch, hooks: TrainingHooks | None
    ) -> None:
        """Shard the weights if the config says so, and make optimizer and average."""
        if torch.cuda.is_available():
            # The peak of a CPU process counts from its start.
            torch.cuda.reset_peak_memory_stats()
        self.job = job
        self.config = config
        self.watch = watch
        self.hooks = hooks
        self.is_sharded = config.sharding in FSDP
        if self.is_sharded:
            shard_weights(job, config=config)
        self.optimizer = job.make_optimizer(parameter_groups(job, which=config.optimizer_params))
        if config.sharding in ZERO1:
            self.optimizer.clock = watch.phases
        if config.update_in_backward:
            update_in_backward(self.optimizer)
        self.ema = None
        if job.ema is not None and job.ema.implementation == "foreach":
            self.ema = ForeachEma(held_weights(job, self.optimizer), job.ema)
        self.last_gradient = LastGradient(job.trained_weights().values(), watch.phases)

    def end_optimizer_phase(self) -> None:
        """End the phase with the optimizer's step, for loops that begin it in an event.

        Steps within the backward pass belong to that one.
        """
        self.optimizer.register_step_post_hook(lambda *_: self.watch.phases.end(phases.OPTIMIZER))

    def begin(self) -> Batches:
        """Make the state, which the hooks may restore, and the schedule from there on.

        Returns the job's batches on the device, whose position is in the state.
        """
        batches = Batches(
            self.job.loader,
            device=find_device(),
            watch=self.watch,
            config=self.config,
            prepare=self.job.prepare,
        )
        self.state = TrainState(
            self.job, self.optimizer, ema=self.ema, batches=batches, config=self.config
        )
        if self.hooks is not None:
            if self.config.update_in_backward:
                # Elsewhere `gradients_ready` comes before the first update.
                self.optimizer.register_step_pre_hook(lambda *_: self.state.update_begins())
            self.hooks.begins(self.state)
        first = self.state.num_steps
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: self.job.schedule(first + step)
        )
        return batches

    @property
    def num_steps_left(self) -> int:
        """Steps that this process may take."""
        return self.job.num_steps - self.state.num_steps

    def gradients_ready(self, loss: Tensor) -> None:
        """Clip the gradients of a step if the job says so, and tell the hooks."""
        norm = None
        if self.job.max_gradient_norm is not None:
            weights = self.job.trained_weights().values()
            norm = torch.nn.utils.clip_grad_norm_(weights, self.job.max_gradient_norm)
        if self.hooks is not None:
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            self.hooks.gradients_ready(loss, norm)
            self.state.update_begins()

    def update_ended(self) -> None:
        """Count the step; update the moving average first, unless the step was skipped."""
        if self.ema is not None and not self.state.is_skipped:
            with self.watch.phases.phase(phases.EMA):
                self.ema.update()
        if self.hooks is not None:
            self.state.update_ended()

    def end_step(self, loss: Tensor, batches: Batches) -> None:
        """End a step whose update is done; `loss`, of this rank's batch, is overwritten."""
        self.schedule.step()
        self.update_ended()
        loss = mean_over_ranks(loss, self.watch.phases)
        batches.fetch_ahead()
        self.step_ended(loss)

    def step_ended(self, loss: Tensor) -> None:
        """Tell watch and hooks that a step has ended, with its mean loss over all ranks."""
        self.watch.step_ends(loss=loss)
        if self.hooks is not None:
            self.hooks.step_ended(self.state)


class LastGradient:
    """Switches the phase when the last gradient of a backward pass has been computed.

    DDP averages finished gradients while the others are computed. Only the communication after the
    last gradient, which includes waiting for slower ranks, makes the step longer. FSDP's gradients
    are finished when they have been reduced; on a CPU that blocks and counts as backward pass.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], clock: PhaseClock) -> None:
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
