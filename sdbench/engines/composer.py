"""Trains a job with MosaicML Composer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from composer import Callback, ComposerModel, State
from composer.algorithms import EMA
from composer.devices import Device
from composer.loggers import Logger
from composer.utils import get_device

from sdbench.engines.breakdown import LastGradient
from sdbench.engines.composer_compat import TrainerThatDoesNotWait, trainer_is_made
from sdbench.engines.device import find_device, peak_memory_gib, reset_peak_memory
from sdbench.engines.device_batches import Batches, make_batches
from sdbench.engines.ema import ForeachEma
from sdbench.engines.job import EmaSpec, TrainJob
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
    device = get_device(None)
    device.batch_to_device = watch.phases.wrap(phases.HOST_TO_DEVICE, device.batch_to_device)
    reset_peak_memory()
    model = device.module_to_device(ComposerDiffusion(job))
    if config.sharding in WEIGHT_SHARDING:
        shard_weights(job, sharding=config.sharding)
    optimizer = job.make_optimizer(model)
    # The phase begins in WatchCallback.
    optimizer.register_step_post_hook(lambda *_: watch.phases.switch(phases.OTHER) and None)

    loader, callbacks = _loader_and_callbacks(job, config, watch, device)
    algorithms = []
    if job.ema is not None and job.ema.implementation == "composer":
        algorithms.append(_composer_ema(job.ema, watch.phases))
    elif job.ema is not None:
        weights = held_weights(job, optimizer, sharding=config.sharding)
        callbacks.append(EmaCallback(ForeachEma(weights, job.ema), watch.phases))
    # Behind the average: it ends the step.
    callbacks.append(WatchCallback(watch, job))
    with trainer_is_made(make_ddp=functools.partial(make_ddp, config=config)):
        trainer = TrainerThatDoesNotWait(
            model=model,
            train_dataloader=loader,
            optimizers=optimizer,
            # Torch's own scheduler counts its steps; Composer's would see the batch before this.
            schedulers=torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule),
            step_schedulers_every_batch=True,
            max_duration=f"{job.num_steps}ba",
            algorithms=algorithms,
            callbacks=callbacks,
            device=device,
            # Composer's precision brings the gradient scaler that fp16 needs: torch's, which waits
            # for the device in every step to learn of gradients that are not finite. The autocast
            # itself is in the model, because Composer knows none on a CPU.
            precision="amp_fp16" if config.precision == "amp_fp16" else "fp32",
            device_train_microbatch_size=config.device_train_microbatch_size,
            ddp_sync_strategy={"every": "multi_auto_sync", "last": "single_auto_sync"}[
                config.grad_sync
            ],
            # Trainer(seed=None) would draw a new seed from the clock. Composer adds the rank, so
            # that two ranks draw different noise.
            seed=config.seed,
            progress_bar=False,
        )
    with watch.loop():
        trainer.fit()
    # Only after a good end: it waits for all ranks, which a rank that failed would do for ever.
    trainer.close()
    return measurements_of(
        watch,
        num_images=job.loader.num_images_delivered,
        peak_memory_gib=peak_memory_gib(),
    )


def _loader_and_callbacks(
    job: TrainJob, config: Any, watch: StepWatch, device: Device
) -> tuple[Any, list[Callback]]:
    """What Composer takes its batches from, and what is to be done with them, in this order."""
    loader: Any = job.loader
    callbacks: list[Callback] = [DataWaitCallback(watch)]
    if config.copy_stream == "side":
        loader = make_batches(
            job.loader, device=find_device(), watch=watch, copy_stream=config.copy_stream
        )
        callbacks = [FetchAheadCallback(loader)]
    if job.prepare is not None:
        callbacks.append(PrepareCallback(job, device))
    if config.sharding in WEIGHT_SHARDING:
        callbacks.append(GradientSyncCallback(job, config))
    return loader, callbacks


def _composer_ema(spec: EmaSpec, clock: PhaseClock) -> EMA:
    ema = EMA(half_life=f"{spec.half_life_batches}ba", update_interval=f"{spec.interval_batches}ba")
    ema.apply = clock.wrap(phases.EMA, ema.apply)
    return ema


class ComposerDiffusion(ComposerModel):
    """The job's model and loss behind the interface that Composer trains."""

    def __init__(self, job: TrainJob) -> None:
        super().__init__()
        self.model = job.model
        self._loss = job.loss

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        """The model's output for a batch."""
        return self.model(batch)

    def loss(self, outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The scalar to minimise."""
        return self._loss(outputs)


class WatchCallback(Callback):
    """Passes Composer's events on to the watch, and ends the loop when the watch says so."""

    def __init__(self, watch: StepWatch, job: TrainJob) -> None:
        self._watch = watch
        self._last_gradient = LastGradient(job.trained_weights().values(), watch.phases)

    def fit_start(self, state: State, logger: Logger) -> None:
        """The loop is about to begin."""
        self._watch.loop_begins()

    def before_backward(self, state: State, logger: Logger) -> None:
        """The gradients of a micro-batch are about to be computed."""
        self._last_gradient.backward_begins()

    def after_backward(self, state: State, logger: Logger) -> None:
        """They are there, and in the last micro-batch they are averaged over all ranks."""
        self._last_gradient.backward_ends()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """All gradients of the batch are there, and the optimizer is next."""
        self._watch.phases.switch(phases.OPTIMIZER)

    def batch_end(self, state: State, logger: Logger) -> None:
        """The step is done; the loss is the mean over all ranks."""
        self._watch.step_ends(loss=state.total_loss_dict["loss/train/total"])
        if self._watch.is_over:
            state.stop_training()


class DataWaitCallback(Callback):
    """Tells the watch when Composer waits for the loader."""

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """The next batch is asked for."""
        self._watch.data_wait_begins()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """The batch is there, or the epoch is over."""
        self._watch.data_wait_ends()


class FetchAheadCallback(Callback):
    """Has the next batch copied to the device while it computes."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """All but the optimizer's work has been handed to the device."""
        self._batches.fetch_ahead()


class PrepareCallback(Callback):
    """Has the whole batch of a step prepared on the device, before Composer cuts it."""

    def __init__(self, job: TrainJob, device: Device) -> None:
        self._prepare = job.prepare
        self._device = device

    def batch_start(self, state: State, logger: Logger) -> None:
        """The step begins with a batch of the loader."""
        assert self._prepare is not None
        with torch.no_grad():
            state.batch = self._prepare(self._device.batch_to_device(state.batch))


class GradientSyncCallback(Callback):
    """Does for FSDP2 what Composer's `ddp_sync_strategy` does for DDP."""

    def __init__(self, job: TrainJob, config: Any) -> None:
        self._job = job
        self._config = config
        device_batch_size = job.images_per_step // Ranks.from_environment().world_size
        self._num_microbatches = -(-device_batch_size // config.device_train_microbatch_size)
        self._num_seen = 0

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """A step begins."""
        self._num_seen = 0

    def before_forward(self, state: State, logger: Logger) -> None:
        """A micro-batch begins."""
        self._num_seen += 1
        is_last = self._num_seen == self._num_microbatches
        set_gradient_sync(self._job, config=self._config, is_last=is_last)


class EmaCallback(Callback):
    """Keeps a moving average that is not Composer's."""

    def __init__(self, ema: ForeachEma, clock: PhaseClock) -> None:
        self._ema = ema
        self._clock = clock

    def batch_end(self, state: State, logger: Logger) -> None:
        """Take in the weights after this optimizer step."""
        with self._clock.phase(phases.EMA):
            self._ema.update()
