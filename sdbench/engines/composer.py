"""The engine `composer`: MosaicML Composer's trainer, with changed internals of release 0.32."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import composer
import cpuinfo
import torch
from composer import Callback, ComposerModel, Event, State, Trainer
from composer.algorithms import EMA
from composer.distributed import dist_strategy
from composer.loggers import Logger
from composer.utils import dist, get_device

from sdbench.base.errors import RunError
from sdbench.engines.device_batches import Batches
from sdbench.engines.hooks import TrainingHooks
from sdbench.engines.job import TrainJob
from sdbench.engines.loop import Training, mean_over_ranks
from sdbench.engines.sharding import begin_microbatch, make_ddp
from sdbench.measure import phases
from sdbench.measure.summary import Measurements, measurements_of
from sdbench.measure.watch import StepWatch
from sdbench.settings.recipe import EngineConfig

# Private methods may mean something else in another release.
KNOWN_VERSION = "0.32."


def fit(
    job: TrainJob, config: EngineConfig, watch: StepWatch, hooks: TrainingHooks | None = None
) -> Measurements:
    """Train by Composer's trainer; see `sdbench.engines`."""
    device = get_device(None)
    model = device.module_to_device(ComposerDiffusion(job))
    training = Training(job, config, watch, hooks)
    training.end_optimizer_phase()
    algorithms = []
    if (ema := job.ema) is not None and ema.implementation == "composer":
        average = EMA(
            half_life=f"{ema.half_life_batches}ba", update_interval=f"{ema.interval_batches}ba"
        )
        average.apply = watch.phases.phase(phases.EMA)(average.apply)
        algorithms.append(average)
    # They are on the device already, where Composer leaves them.
    batches = training.begin()
    with (
        # Composer itself passes no options on to DDP.
        mock.patch.object(
            dist_strategy, "DistributedDataParallel", functools.partial(make_ddp, config=config)
        ),
        # py-cpuinfo counts the CPU's cycles for a second, for a name that is never shown.
        mock.patch.object(cpuinfo, "get_cpu_info", dict),
    ):
        trainer = TrainerThatDoesNotWait(
            training,
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


class ComposerDiffusion(ComposerModel):
    """The job's model and loss as a model of Composer."""

    def __init__(self, job: TrainJob) -> None:
        super().__init__()
        self.model = job.model
        self._loss = job.loss

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        """Call the model."""
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
        self._training.update_ended()
        self._training.step_ended(state.total_loss_dict["loss/train/total"])
        if self._watch.is_over:
            state.stop_training()


class TrainerThatDoesNotWait(Trainer):
    """Composer's trainer without its seven reads from the device in every step.

    It reads the loss twice, the number of images twice, the number of tokens, the time of the step,
    and whether a rank has no more data. The host waits for the device with each read. None is
    needed: all ranks have equally many batches of one size, and the times are not used.
    """

    def __init__(self, training: Training, **options: Any) -> None:
        if not composer.__version__.startswith(KNOWN_VERSION):
            raise RunError(
                f"--engine composer changes internals of Composer {KNOWN_VERSION}x, and "
                f"{composer.__version__} is installed; --engine torch does without Composer"
            )
        self._training = training
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
        clock = self._training.watch.phases
        self.state.total_loss_dict = {
            name: mean_over_ranks(loss, clock) for name, loss in losses.items()
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
            # Does for FSDP2 what `ddp_sync_strategy` does for DDP.
            begin_microbatch(self._training.job, config=self._training.config, is_last=is_last)
            total += self._train_microbatch(uses_scaler, num_images, is_last)["total"]
        state.batch = batch
        if uses_scaler:
            for optimizer in state.optimizers:
                state.scaler.unscale_(optimizer)
        # The losses of this rank; `_train_batch` replaces them by the mean over all ranks.
        state.total_loss_dict = total_loss_dict
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return total

    def _accumulate_time_across_ranks(
        self, num_samples: int, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """Samples and tokens of all ranks, and the time of this one."""
        num_ranks = dist.get_world_size()
        return num_samples * num_ranks, num_tokens * num_ranks, batch_time
