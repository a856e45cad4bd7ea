"""The engine `torch`: a plain training loop.

It does the same work as Composer's loop, in the same order and with the same random draws: the
difference of their times is the cost of Composer itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from sdbench.engines.device_batches import Batch, MicroBatch, split_batch
from sdbench.engines.hooks import TrainingHooks
from sdbench.engines.job import TrainJob
from sdbench.engines.loop import Training, find_device
from sdbench.engines.sharding import begin_microbatch, make_ddp
from sdbench.measure import phases
from sdbench.measure.summary import Measurements, measurements_of
from sdbench.measure.watch import StepWatch
from sdbench.ranks.distributed import Ranks
from sdbench.settings.parallel import FSDP
from sdbench.settings.recipe import EngineConfig


def fit(
    job: TrainJob, config: EngineConfig, watch: StepWatch, hooks: TrainingHooks | None = None
) -> Measurements:
    """Train by a loop of plain torch; see `sdbench.engines`."""
    ranks, device = Ranks.from_environment(), find_device()
    model = job.model.to(device).train()
    if ranks.world_size > 1 and config.sharding not in FSDP:
        model = make_ddp(model, config=config)
    training = Training(job, config, watch, hooks)
    training_step = TrainingStep(model, training)
    run_step: Any = training_step
    if config.cuda_graph:
        from sdbench.engines.cuda_graph import GraphedStep, let_rates_change

        let_rates_change(training.optimizer, device=device)
        run_step = GraphedStep(run_step, clock=watch.phases)
    batches = training.begin()
    state = training.state
    state.use_scaler(training_step.scaler)
    # As Composer does, so that each rank draws its own noise.
    torch.manual_seed(config.seed + ranks.rank)
    state.restore_random_state()
    with watch.loop():
        watch.loop_begins()
        for _ in range(training.num_steps_left):
            state.is_skipped = False
            # The batch has no name here, so that its memory is free for the next one.
            loss = run_step(next(batches))
            training.end_step(loss, batches)
            if watch.is_over:
                break
    return measurements_of(watch, num_images=job.loader.num_images_delivered)


class TrainingStep:
    """Forward and backward passes and the optimizer step for one batch."""

    def __init__(self, model: torch.nn.Module, training: Training) -> None:
        """Compute nothing yet; `model` is the job's, or the DDP wrapper around it."""
        self._model = model
        self._training = training
        self._config = training.config
        device = next(training.job.model.parameters()).device
        # With fp16 each step waits for the device: torch decides on the host whether to skip a step
        # whose gradients are not finite.
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=self._config.precision == "amp_fp16"
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch; returns its mean loss on this rank, on the device."""
        training, optimizer = self._training, self._training.optimizer
        losses = []
        for microbatch in split_batch(batch, self._config.device_train_microbatch_size):
            with self._gradient_sync(is_last=microbatch.is_last):
                losses.append(self._accumulate(microbatch))
        loss = sum(losses[1:], start=losses[0])
        with training.watch.phases.phase(phases.OPTIMIZER):
            if training.hooks is not None or training.job.max_gradient_norm is not None:
                # Before gradients are taken away: the scaler must have seen some.
                self.scaler.unscale_(optimizer)
            training.gradients_ready(loss)
            self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def _accumulate(self, microbatch: MicroBatch) -> Tensor:
        loss = self._training.job.loss(self._model(microbatch.tensors)) * microbatch.share
        self._training.last_gradient.backward_begins()
        self.scaler.scale(loss).backward()
        self._training.last_gradient.backward_ends()
        return loss.detach()

    def _gradient_sync(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a micro-batch: whether its gradients are averaged over the ranks."""
        is_ddp = isinstance(self._model, torch.nn.parallel.DistributedDataParallel)
        if is_ddp and not is_last and self._config.grad_sync == "last":
            return self._model.no_sync()
        begin_microbatch(self._training.job, config=self._config, is_last=is_last)
        return contextlib.nullcontext()
