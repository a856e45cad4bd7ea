"""The engine `torch`: a plain training loop.

It does the same work as Composer's loop, in the same order and with the same random draws: the
difference of their times is the cost of Composer itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sdbench.engines.breakdown import LastGradient, mean_over_ranks
from sdbench.engines.device import find_device, reset_peak_memory
from sdbench.engines.device_batches import Batch, make_batches
from sdbench.engines.ema import ForeachEma
from sdbench.engines.job import TrainJob
from sdbench.engines.optimizers import (
    gradients_ready,
    make_schedule,
    optimizer_of,
)
from sdbench.engines.sharding import (
    begin_microbatch,
    held_weights,
    make_ddp,
    shard_weights,
)
from sdbench.engines.state import TrainingHooks, TrainState
from sdbench.measure import phases
from sdbench.measure.phases import PhaseClock
from sdbench.measure.summary import Measurements, measurements_of
from sdbench.measure.watch import StepWatch
from sdbench.ranks.distributed import Ranks
from sdbench.settings.parallel import FSDP


def fit(
    job: TrainJob, config: Any, watch: StepWatch, hooks: TrainingHooks | None = None
) -> Measurements:
    """Train by a loop of plain torch; see `sdbench.engines`."""
    ranks, device = Ranks.from_environment(), find_device()
    reset_peak_memory()
    job.model.to(device).train()
    model = _join_ranks(job, config, ranks)
    optimizer = optimizer_of(job, config, hooks, watch.phases)
    training_step = TrainingStep(
        model, job, optimizer, config=config, clock=watch.phases, hooks=hooks
    )
    run_step: Any = training_step
    if config.cuda_graph:
        from sdbench.engines.cuda_graph import GraphedStep, let_rates_change

        let_rates_change(optimizer, device=device)
        run_step = GraphedStep(run_step, clock=watch.phases)
    ema = None
    if job.ema is not None:
        ema = ForeachEma(held_weights(job, optimizer, sharding=config.sharding), job.ema)
    batches = make_batches(
        job.loader, device=device, watch=watch, config=config, prepare=job.prepare
    )
    state = TrainState(
        job,
        optimizer,
        ema=ema,
        batches=batches,
        scaler=training_step.scaler,
        config=config,
    )
    if hooks is not None:
        hooks.begins(state)
    schedule = make_schedule(optimizer, job, state)
    # As Composer does, so that each rank draws its own noise.
    torch.manual_seed(config.seed + ranks.rank)
    state.restore_random_state()
    with watch.loop():
        watch.loop_begins()
        for _ in range(state.num_steps, job.num_steps):
            state.is_skipped = False
            # The batch has no name here, so that its memory is free for the next one.
            loss = run_step(next(batches))
            schedule.step()
            if ema is not None and not state.is_skipped:
                with watch.phases.phase(phases.EMA):
                    ema.update()
            loss = mean_over_ranks(loss, watch.phases)
            batches.fetch_ahead()
            state.num_steps += 1
            watch.step_ends(loss=loss)
            if hooks is not None:
                hooks.step_ended(state)
            if watch.is_over:
                break
    return measurements_of(watch, num_images=job.loader.num_images_delivered)


def _join_ranks(job: TrainJob, config: Any, ranks: Ranks) -> torch.nn.Module:
    """Shard the model or wrap it in DDP; returns what the training step calls."""
    if ranks.world_size == 1:
        return job.model
    if config.sharding in FSDP:
        shard_weights(job, config=config)
        return job.model
    return make_ddp(job.model, config=config)


class TrainingStep:
    """Forward and backward passes and the optimizer step for one batch."""

    def __init__(
        self,
        model: torch.nn.Module,
        job: TrainJob,
        optimizer: torch.optim.Optimizer,
        *,
        config: Any,
        clock: PhaseClock,
        hooks: TrainingHooks | None,
    ) -> None:
        """Prepare; nothing is computed yet.

        Args:
            model: The job's model, or the DDP wrapper around it.
            job: The training job.
            optimizer: Updates the trained weights.
            config: The resolved config.
            clock: Is told of the phases of a step.
            hooks: Are told when the gradients are there.
        """
        self._model = model
        self._job = job
        self._optimizer = optimizer
        self._config = config
        self._clock = clock
        self._hooks = hooks
        self._last_gradient = LastGradient(job.trained_weights().values(), clock)
        device = next(job.model.parameters()).device
        # With fp16 each step waits for the device: torch decides on the host whether to skip a step
        # whose gradients are not finite.
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "amp_fp16")

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch.

        Returns:
            The batch's mean loss on this rank, on the device.
        """
        num_images = _count_images(batch)
        microbatches = _split(batch, self._config.device_train_microbatch_size)
        losses = []
        for number, microbatch in enumerate(microbatches, start=1):
            # The loss is a mean: a smaller micro-batch at the end counts for less.
            share = _count_images(microbatch) / num_images
            with self._gradient_sync(is_last=number == len(microbatches)):
                losses.append(self._accumulate(microbatch, share=share))
        loss = sum(losses[1:], start=losses[0])
        with self._clock.phase(phases.OPTIMIZER):
            if self._hooks is not None or self._job.max_gradient_norm is not None:
                # Before gradients are taken away: the scaler wants to have seen some.
                self.scaler.unscale_(self._optimizer)
            gradients_ready(self._job, self._hooks, loss)
            self.scaler.step(self._optimizer)
        self.scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    def _accumulate(self, microbatch: Batch, *, share: float) -> Tensor:
        loss = self._job.loss(self._model(microbatch)) * share
        self._last_gradient.backward_begins()
        self.scaler.scale(loss).backward()
        self._last_gradient.backward_ends()
        return loss.detach()

    def _gradient_sync(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a micro-batch in which gradients are averaged over ranks, or are not."""
        if isinstance(self._model, torch.nn.parallel.DistributedDataParallel):
            if not is_last and self._config.grad_sync == "last":
                return self._model.no_sync()
        elif self._config.sharding in FSDP:
            begin_microbatch(self._job, config=self._config, is_last=is_last)
        return contextlib.nullcontext()


def _count_images(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _split(batch: Batch, size: int) -> list[Batch]:
    """Split a batch into micro-batches; the last one may be smaller."""
    pieces: Iterator[tuple[Tensor, ...]] = zip(
        *(data.split(size) for data in batch.values()), strict=True
    )
    return [dict(zip(batch, piece, strict=True)) for piece in pieces]
