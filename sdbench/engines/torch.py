"""Trains a job without a trainer.

The loop does what Composer's does, in the same order and with the same random draws, and nothing
else: what Composer itself costs is the difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sdbench.engines.breakdown import LastGradient
from sdbench.engines.device import find_device, peak_memory_gib, reset_peak_memory
from sdbench.engines.device_batches import Batch, make_batches
from sdbench.engines.ema import ForeachEma
from sdbench.engines.job import TrainJob
from sdbench.engines.sharding import (
    WEIGHT_SHARDING,
    held_weights,
    make_ddp,
    set_gradient_sync,
    shard_weights,
)
from sdbench.measure import phases
from sdbench.measure.phases import PhaseClock
from sdbench.measure.summary import Measurements, measurements_of
from sdbench.measure.watch import StepWatch
from sdbench.ranks.distributed import Ranks


def fit(job: TrainJob, config: Any, watch: StepWatch) -> Measurements:
    """Train until the watch says that all is measured, at most `job.num_steps` steps.

    Args:
        job: What the workload built.
        config: The resolved config; read are the micro-batch, precision, seed and speed-ups.
        watch: Told of every step and of the phases of it.

    Returns:
        The measurements of this rank.

    Raises:
        RunError: If the loss is not finite, or the loop ended before its last step.
    """
    ranks, device = Ranks.from_environment(), find_device()
    reset_peak_memory()
    job.model.to(device).train()
    model = _join_ranks(job, config, ranks)
    optimizer = job.make_optimizer(job.model)
    run_step: Any = TrainingStep(model, job, optimizer, config=config, clock=watch.phases)
    if config.cuda_graph:
        from sdbench.engines.cuda_graph import GraphedStep, let_rates_change

        let_rates_change(optimizer, device=device)
        run_step = GraphedStep(run_step, clock=watch.phases)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule)
    ema = None
    if job.ema is not None:
        ema = ForeachEma(held_weights(job, optimizer, sharding=config.sharding), job.ema)
    batches = make_batches(job.loader, device=device, watch=watch, copy_stream=config.copy_stream)
    # As Composer seeds: two ranks draw different noise.
    torch.manual_seed(config.seed + ranks.rank)
    with watch.loop():
        watch.loop_begins()
        for _ in range(job.num_steps):
            # No name holds on to the batch: its memory is free for the next one.
            loss = run_step(_prepare(next(batches), job))
            schedule.step()
            if ema is not None:
                with watch.phases.phase(phases.EMA):
                    ema.update()
            if ranks.world_size > 1:
                torch.distributed.all_reduce(loss)
                loss = loss.double() / ranks.world_size
            batches.fetch_ahead()
            watch.step_ends(loss=loss)
            if watch.is_over:
                break
    return measurements_of(
        watch,
        num_images=job.loader.num_images_delivered,
        peak_memory_gib=peak_memory_gib(),
    )


def _prepare(batch: Batch, job: TrainJob) -> Batch:
    if job.prepare is None:
        return batch
    with torch.no_grad():
        return job.prepare(batch)


def _join_ranks(job: TrainJob, config: Any, ranks: Ranks) -> torch.nn.Module:
    """The model as this rank calls it: itself, or what averages its gradients over all ranks."""
    if ranks.world_size == 1:
        return job.model
    if config.sharding in WEIGHT_SHARDING:
        shard_weights(job, sharding=config.sharding)
        return job.model
    # The buffers are constants, the same on every rank.
    return make_ddp(job.model, config=config, broadcast_buffers=False)


class TrainingStep:
    """What the device does for a batch: forward and backward passes, and the optimizer."""

    def __init__(
        self,
        model: torch.nn.Module,
        job: TrainJob,
        optimizer: torch.optim.Optimizer,
        *,
        config: Any,
        clock: PhaseClock,
    ) -> None:
        """Join the pieces.

        Args:
            model: The job's model, or the DDP wrapper around it.
            job: What the workload built.
            optimizer: Of the job's model.
            config: The resolved config.
            clock: Is switched from phase to phase.
        """
        self._model = model
        self._job = job
        self._optimizer = optimizer
        self._config = config
        self._clock = clock
        self._last_gradient = LastGradient(job.trained_weights().values(), clock)
        device = next(job.model.parameters()).device
        # For fp16 it waits for the device in every step: torch decides on the host whether to leave
        # out a step whose gradients are not finite.
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "amp_fp16")

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch.

        Returns:
            Its mean loss on this rank, on the device.
        """
        num_images = _count_images(batch)
        microbatches = _split(batch, self._config.device_train_microbatch_size)
        losses = []
        for number, microbatch in enumerate(microbatches, start=1):
            # The loss is a mean: a smaller micro-batch at the end counts for less.
            share = _count_images(microbatch) / num_images
            with self._gradient_sync(is_last=number == len(microbatches)):
                losses.append(self._accumulate(microbatch, share=share))
        with self._clock.phase(phases.OPTIMIZER):
            self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return sum(losses[1:], start=losses[0])

    def _accumulate(self, microbatch: Batch, *, share: float) -> Tensor:
        loss = self._job.loss(self._model(microbatch)) * share
        self._last_gradient.backward_begins()
        self._scaler.scale(loss).backward()
        self._last_gradient.backward_ends()
        return loss.detach()

    def _gradient_sync(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Average the gradients of this micro-batch over the ranks, or let them add up first."""
        if isinstance(self._model, torch.nn.parallel.DistributedDataParallel):
            if not is_last and self._config.grad_sync == "last":
                return self._model.no_sync()
        elif self._config.sharding in WEIGHT_SHARDING:
            set_gradient_sync(self._job, config=self._config, is_last=is_last)
        return contextlib.nullcontext()


def _count_images(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _split(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into micro-batches; the last one may be smaller."""
    pieces: Iterator[tuple[Tensor, ...]] = zip(
        *(data.split(size) for data in batch.values()), strict=True
    )
    return [dict(zip(batch, piece, strict=True)) for piece in pieces]
