"""The engine `ray`: PyTorch Lightning's trainer, in ranks that Ray Train has started.

`sdbench.launch.ray_job` starts the ranks. A single rank does without Ray here.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning.pytorch as lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor

from sdbench.base.stop import keep_handlers
from sdbench.engines.breakdown import LastGradient, mean_over_ranks
from sdbench.engines.device import find_device, reset_peak_memory
from sdbench.engines.device_batches import Batch, Batches, make_batches
from sdbench.engines.ema import ForeachEma
from sdbench.engines.job import TrainJob
from sdbench.engines.optimizers import (
    gradients_ready,
    make_schedule,
    optimizer_of,
)
from sdbench.engines.sharding import begin_microbatch, held_weights, shard_weights
from sdbench.engines.state import TrainingHooks, TrainState
from sdbench.measure import phases
from sdbench.measure.summary import Measurements, measurements_of
from sdbench.measure.watch import StepWatch
from sdbench.ranks.distributed import Ranks
from sdbench.settings.parallel import FSDP


def fit(
    job: TrainJob, config: Any, watch: StepWatch, hooks: TrainingHooks | None = None
) -> Measurements:
    """Train by Lightning's trainer; see `sdbench.engines`."""
    ranks, device = Ranks.from_environment(), find_device()
    reset_peak_memory()
    job.model.to(device).train()
    if ranks.world_size > 1 and config.sharding in FSDP:
        shard_weights(job, config=config)
    optimizer = optimizer_of(job, config, hooks, watch.phases)
    # The optimizer's phase begins in `Diffusion.on_before_optimizer_step`.
    optimizer.register_step_post_hook(lambda *_: watch.phases.switch(phases.OTHER) and None)
    scaler = None
    if config.precision == "amp_fp16":
        scaler = torch.amp.GradScaler(device.type, enabled=True)  # torch 2.7 wants the word on CPUs
    ema = None
    if job.ema is not None:
        ema = ForeachEma(held_weights(job, optimizer, sharding=config.sharding), job.ema)
    batches = make_batches(
        job.loader, device=device, watch=watch, config=config, prepare=job.prepare
    )
    state = TrainState(job, optimizer, ema=ema, batches=batches, scaler=scaler, config=config)
    if hooks is not None:
        hooks.begins(state)
    num_steps = job.num_steps - state.num_steps
    microbatches = MicroBatches(
        batches, config=config, num_steps=num_steps, images_per_step=job.images_per_step
    )
    handlers = contextlib.ExitStack()
    model = Diffusion(
        job,
        optimizer,
        handlers=handlers,
        config=config,
        state=state,
        scaler=scaler,
        ema=ema,
        watch=watch,
        hooks=hooks,
        batches=batches,
    )
    with _few_words():
        trainer = lightning.Trainer(
            strategy=_make_strategy(config, ranks=ranks, device=device),
            plugins=_make_plugins(scaler, device=device, ranks=ranks),
            accumulate_grad_batches=microbatches.num_per_step,
            max_epochs=1,  # an epoch of Lightning is the run
            min_epochs=0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # Lightning asks the first rank before each micro-batch whether it has had a signal.
        loop = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = watch.phases.wrap(
            phases.RANK_WAIT, loop._broadcast_sigterm_tensor
        )
        # As the other engines do, so that each rank draws its own noise.
        torch.manual_seed(config.seed + ranks.rank)
        with watch.loop(), handlers:
            # Lightning sets handlers of its own, by which a signal would break a step off.
            handlers.enter_context(keep_handlers())
            try:
                trainer.fit(model, microbatches)
            except SystemExit as end:  # Lightning's answer to Ctrl-C
                raise KeyboardInterrupt from end
    return measurements_of(watch, num_images=job.loader.num_images_delivered)


@contextlib.contextmanager
def _few_words() -> Iterator[None]:
    """Leave out what Lightning says of its own devices, loaders and callbacks."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        yield


def _make_strategy(config: Any, *, ranks: Ranks, device: torch.device) -> Strategy:
    if ranks.world_size == 1:
        return SingleDeviceStrategy(device)
    from sdbench.engines.ray_strategies import ConfiguredDDPStrategy, ShardedStrategy

    if config.sharding in FSDP:
        return ShardedStrategy()
    return ConfiguredDDPStrategy(config)


def _make_plugins(
    scaler: torch.amp.GradScaler | None, *, device: torch.device, ranks: Ranks
) -> list[Any]:
    plugins: list[Any] = []
    if scaler is not None:
        plugins.append(MixedPrecision("16-mixed", device.type, scaler))
    if ranks.world_size > 1:
        from sdbench.engines.ray_strategies import RanksEnvironment

        plugins.append(RanksEnvironment(ranks))
    return plugins


class MicroBatch(NamedTuple):
    """A part of a step's batch.

    Attributes:
        tensors: On the device.
        share: Of the batch's images.
        is_last: Whether the step ends with it.
    """

    tensors: Batch
    share: float
    is_last: bool


class MicroBatches:
    """The micro-batches of a run, in order.

    Its length is known, without which Lightning would fetch one ahead: the position in the data
    would not be that of the batch trained on last.
    """

    def __init__(
        self, batches: Batches, *, config: Any, num_steps: int, images_per_step: int
    ) -> None:
        """Prepare; nothing is loaded yet.

        Args:
            batches: Of this rank, on its device.
            config: The resolved config.
            num_steps: Most steps of the run.
            images_per_step: Global batch.
        """
        self._batches = batches
        self._size = config.device_train_microbatch_size
        self._num_steps = num_steps
        self._num_images = images_per_step // Ranks.from_environment().world_size
        self.num_per_step = -(-self._num_images // self._size)

    def __len__(self) -> int:
        return self._num_steps * self.num_per_step

    def __iter__(self) -> Iterator[MicroBatch]:
        for _ in range(self._num_steps):
            yield from self._split(next(self._batches))

    def _split(self, batch: Batch) -> Iterator[MicroBatch]:
        pieces = zip(*(data.split(self._size) for data in batch.values()), strict=True)
        for number, piece in enumerate(pieces, start=1):
            tensors = dict(zip(batch, piece, strict=True))
            # The loss is a mean: a smaller micro-batch at the end counts for less.
            share = len(piece[0]) / self._num_images
            yield MicroBatch(tensors, share, is_last=number == self.num_per_step)


class Diffusion(lightning.LightningModule):
    """The job's model, loss and optimizer as a module of Lightning, which tells watch and hooks."""

    def __init__(
        self,
        job: TrainJob,
        optimizer: torch.optim.Optimizer,
        *,
        handlers: contextlib.ExitStack,
        config: Any,
        state: TrainState,
        scaler: torch.amp.GradScaler | None,
        ema: ForeachEma | None,
        watch: StepWatch,
        hooks: TrainingHooks | None,
        batches: Batches,
    ) -> None:
        super().__init__()
        self.model = job.model
        self._job = job
        self._optimizer = optimizer
        self._handlers = handlers
        self._config = config
        self._state = state
        self._scaler = scaler
        self._ema = ema
        self._watch = watch
        self._hooks = hooks
        self._batches = batches
        self._schedule = make_schedule(optimizer, job, state)
        self._last_gradient = LastGradient(job.trained_weights().values(), watch.phases)
        self._losses: list[Tensor] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer; its schedule is stepped at the end of a step."""
        return self._optimizer

    def transfer_batch_to_device(
        self, batch: MicroBatch, device: torch.device, dataloader_idx: int
    ) -> MicroBatch:
        """The batch, which is on the device."""
        return batch

    def on_train_start(self) -> None:
        """The loop is about to begin, and nothing draws random numbers any more."""
        self._handlers.close()
        self._state.restore_random_state()
        self._watch.loop_begins()

    def on_train_batch_start(self, batch: MicroBatch, batch_idx: int) -> None:
        """A micro-batch begins."""
        if not self._losses:
            self._state.is_skipped = False
        if self._config.sharding in FSDP:
            begin_microbatch(self._job, config=self._config, is_last=batch.is_last)

    def training_step(self, batch: MicroBatch) -> Tensor:
        """The micro-batch's part of the loss; Lightning divides it by the number of them."""
        loss = self._job.loss(self.model(batch.tensors)) * batch.share
        self._losses.append(loss.detach())
        return loss * self.trainer.accumulate_grad_batches

    def on_before_backward(self, loss: Tensor) -> None:
        """The gradients of a micro-batch are about to be computed."""
        self._last_gradient.backward_begins()

    def on_after_backward(self) -> None:
        """The gradients are there; in the last micro-batch they are averaged over all ranks."""
        self._last_gradient.backward_ends()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """All gradients of the step are there, and the update is next."""
        self._watch.phases.switch(phases.OPTIMIZER)
        # Lightning leaves the scale of fp16 to fused optimizers, which take it away in their step.
        if self._scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            self._scaler.unscale_(optimizer)
        gradients_ready(self._job, self._hooks, self._step_loss())

    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        """Nothing: gradients are freed when the step ends, and not held during the next one."""

    def on_train_batch_end(self, outputs: Any, batch: MicroBatch, batch_idx: int) -> None:
        """A micro-batch is done, and with the last one the step."""
        if batch.is_last:
            self._end_step()

    def _end_step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        if self._ema is not None and not self._state.is_skipped:
            with self._watch.phases.phase(phases.EMA):
                self._ema.update()
        loss = mean_over_ranks(self._step_loss(), self._watch.phases)
        self._losses = []
        self._batches.fetch_ahead()
        self._state.num_steps += 1
        self._watch.step_ends(loss=loss)
        if self._hooks is not None:
            self._hooks.step_ended(self._state)
        if self._watch.is_over:
            self.trainer.should_stop = True

    def _step_loss(self) -> Tensor:
        """The mean loss of the step's batch on this rank; never the tensor of a micro-batch."""
        return torch.stack(self._losses).sum()
