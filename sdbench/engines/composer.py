"""The engine `composer`: MosaicML Composer's trainer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from composer import Callback, ComposerModel, State
from composer.algorithms import EMA
from composer.loggers import Logger
from composer.utils import get_device

from sdbench.engines.composer_compat import TrainerThatDoesNotWait, trainer_is_made
from sdbench.engines.device_batches import Batches
from sdbench.engines.job import EmaSpec, EngineConfig, TrainingHooks, TrainJob
from sdbench.engines.sharding import begin_microbatch, make_ddp
from sdbench.engines.training import Training
from sdbench.measure import phases
from sdbench.measure.phases import PhaseClock
from sdbench.measure.summary import Measurements, measurements_of
from sdbench.measure.watch import StepWatch


def fit(
    job: TrainJob, config: EngineConfig, watch: StepWatch, hooks: TrainingHooks | None = None
) -> Measurements:
    """Train by Composer's trainer; see `sdbench.engines`."""
    device = get_device(None)
    model = device.module_to_device(ComposerDiffusion(job))
    training = Training(job, config, watch, hooks)
    training.end_optimizer_phase()
    algorithms = []
    if job.ema is not None and job.ema.implementation == "composer":
        algorithms.append(_composer_ema(job.ema, watch.phases))
    # They are on the device already, where Composer leaves them.
    batches = training.begin()
    with trainer_is_made(make_ddp=functools.partial(make_ddp, config=config)):
        trainer = TrainerThatDoesNotWait(
            clock=watch.phases,
            # Does for FSDP2 what `ddp_sync_strategy` does for DDP.
            begin_microbatch=functools.partial(begin_microbatch, job, config=config),
            model=model,
            train_dataloader=batches,
            optimizers=training.optimizer,
            # A scheduler of torch counts its own steps; Composer's would be one batch behind.
            schedulers=training.schedule,
            step_schedulers_every_batch=True,
            max_duration=f"{training.num_steps_left}ba",
            algorithms=algorithms,
            callbacks=[TrainingCallback(training, batches)],
            device=device,
            # For fp16 Composer adds torch's gradient scaler, which waits for the device in every
            # step to learn of gradients that are not finite. The autocast itself is in the model,
            # because Composer has none for a CPU.
            precision="amp_fp16" if config.precision == "amp_fp16" else "fp32",
            device_train_microbatch_size=config.device_train_microbatch_size,
            ddp_sync_strategy={"every": "multi_auto_sync", "last": "single_auto_sync"}[
                config.grad_sync
            ],
            # Trainer(seed=None) would take a seed from the clock. Composer adds the rank, so that
            # each rank draws its own noise.
            seed=config.seed,
            progress_bar=False,
        )
    if config.precision == "amp_fp16":
        training.state.use_scaler(trainer.state.scaler)
    with watch.loop():
        trainer.fit()
    # Not after an error: it waits for all ranks, and one that failed would never come.
    trainer.close()
    return measurements_of(watch, num_images=job.loader.num_images_delivered)


def _composer_ema(spec: EmaSpec, clock: PhaseClock) -> EMA:
    ema = EMA(half_life=f"{spec.half_life_batches}ba", update_interval=f"{spec.interval_batches}ba")
    ema.apply = clock.wrap(phases.EMA, ema.apply)
    return ema


class ComposerDiffusion(ComposerModel):
    """The job's model and loss as a model of Composer."""

    def __init__(self, job: TrainJob) -> None:
        super().__init__()
        self.model = job.model
        self._loss = job.loss

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        """The model's output for a batch."""
        return self.model(batch)

    def loss(self, outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The scalar loss."""
        return self._loss(outputs)


class TrainingCallback(Callback):
    """Passes Composer's events on to the training, and ends the loop with `watch.is_over`."""

    def __init__(self, training: Training, batches: Batches) -> None:
        self._training = training
        self._watch = training.watch
        self._batches = batches

    def fit_start(self, state: State, logger: Logger) -> None:
        """The loop is about to begin; nothing else draws random numbers any more."""
        self._training.state.restore_random_state()
        self._watch.loop_begins()

    def before_backward(self, state: State, logger: Logger) -> None:
        """The gradients of a micro-batch are about to be computed."""
        self._training.last_gradient.backward_begins()

    def after_backward(self, state: State, logger: Logger) -> None:
        """The gradients are there; after the last micro-batch they are averaged over all ranks."""
        self._training.last_gradient.backward_ends()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """All gradients of the batch are there, and the optimizer is next."""
        self._batches.fetch_ahead()
        self._watch.phases.switch(phases.OPTIMIZER)
        self._training.state.is_skipped = False
        self._training.gradients_ready(state.total_loss_dict["loss/train/total"])

    def batch_end(self, state: State, logger: Logger) -> None:
        """The step is done; the loss is the mean over all ranks."""
        self._training.update_average()
        self._training.step_ended(state.total_loss_dict["loss/train/total"])
        if self._watch.is_over:
            state.stop_training()
