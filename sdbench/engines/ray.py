"""The engine `ray`: PyTorch Lightning's trainer, in ranks that Ray Train has started.

`sdbench.launch.ray_job` starts the ranks; nothing here needs Ray.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from sdbench.base.stop import keep_handlers
from sdbench.engines.device_batches import Batches, MicroBatch, split_batch
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
    """Train by Lightning's trainer; see `sdbench.engines`."""
    ranks, device = Ranks.from_environment(), find_device()
    job.model.to(device).train()
    training = Training(job, config, watch, hooks)
    training.end_optimizer_phase()
    batches = training.begin()
    scaler = None
    if config.precision == "amp_fp16":
        scaler = torch.amp.GradScaler(device.type, enabled=True)  # torch 2.7 wants the word on CPUs
        training.state.use_scaler(scaler)
    microbatches = _MicroBatches(batches, training)
    handlers = contextlib.ExitStack()
    model = _Diffusion(training, batches, handlers=handlers, scaler=scaler)
    plugins: list[Any] = []
    if scaler is not None:
        plugins.append(MixedPrecision("16-mixed", device.type, scaler))
    strategy = SingleDeviceStrategy(device)
    if ranks.world_size > 1:
        strategy = RanksStrategy(config)
        plugins.append(RanksEnvironment())
    with _quiet_lightning():
        trainer = lightning.Trainer(
            strategy=strategy,
            plugins=plugins,
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
        loop._broadcast_sigterm_tensor = watch.phases.phase(phases.RANK_WAIT)(
            loop._broadcast_sigterm_tensor
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
def _quiet_lightning() -> Iterator[None]:
    """Silence what Lightning logs about its own devices, loaders and callbacks."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        yield


class RanksEnvironment(TorchElasticEnvironment):
    """Tells Lightning the rank of this process, which Ray Train sets in the environment."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing: nodes may have different numbers of ranks."""


class RanksStrategy(DDPStrategy):
    """DDP with the options of the config, or a model that FSDP2 has sharded.

    Ray's `RayFSDPStrategy` is for FSDP1, which needs a GPU and keeps weights in flat tensors: its
    checkpoints would fit no other engine. FSDP2 averages gradients by itself.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._is_sharded = config.sharding in FSDP

    @property
    def root_device(self) -> torch.device:
        """The device that this rank has chosen."""
        return find_device()

    def _configure_launcher(self) -> None:
        """Have no launcher: the ranks are there, and Lightning's would choose their threads."""

    def configure_ddp(self) -> None:
        """Wrap the model for DDP."""
        if not self._is_sharded:
            super().configure_ddp()

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return make_ddp(model, config=self._config)

    def _register_ddp_hooks(self) -> None:
        """Do nothing: `make_ddp` has registered those of the config."""

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """The context of each micro-batch of a step but the last."""
        if self._is_sharded or self._config.grad_sync == "every":
            return contextlib.nullcontext()
        return super().block_backward_sync()


class _MicroBatches:
    """The micro-batches of a run, in order.

    The length is known: Lightning would fetch one ahead without it, and the position in the data
    would not be that of the batch trained on last.
    """

    def __init__(self, batches: Batches, training: Training) -> None:
        self._batches = batches
        self._size = training.config.device_train_microbatch_size
        self._num_steps = training.num_steps_left
        num_images = training.job.images_per_step // Ranks.from_environment().world_size
        self.num_per_step = -(-num_images // self._size)

    def __len__(self) -> int:
        return self._num_steps * self.num_per_step

    def __iter__(self) -> Iterator[MicroBatch]:
        for _ in range(self._num_steps):
            yield from split_batch(next(self._batches), self._size)


class _Diffusion(lightning.LightningModule):
    """The job's model, loss and optimizer as a module of Lightning, whose events it passes on."""

    def __init__(
        self,
        training: Training,
        batches: Batches,
        *,
        handlers: contextlib.ExitStack,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        super().__init__()
        self.model = training.job.model
        self._training = training
        self._batches = batches
        self._handlers = handlers
        self._scaler = scaler
        self._losses: list[Tensor] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._training.optimizer

    def transfer_batch_to_device(
        self, batch: MicroBatch, device: torch.device, dataloader_idx: int
    ) -> MicroBatch:
        return batch  # it is on the device

    def on_train_start(self) -> None:
        self._handlers.close()
        # Nothing else draws random numbers before the loop.
        self._training.state.restore_random_state()
        self._training.watch.loop_begins()

    def on_train_batch_start(self, batch: MicroBatch, batch_idx: int) -> None:
        if not self._losses:
            self._training.state.is_skipped = False
        if self._training.is_sharded:
            begin_microbatch(
                self._training.job, config=self._training.config, is_last=batch.is_last
            )

    def training_step(self, batch: MicroBatch) -> Tensor:
        """The micro-batch's part of the loss; Lightning divides it by the number of them."""
        loss = self._training.job.loss(self.model(batch.tensors)) * batch.share
        self._losses.append(loss.detach())
        return loss * self.trainer.accumulate_grad_batches

    def on_before_backward(self, loss: Tensor) -> None:
        self._training.last_gradient.backward_begins()

    def on_after_backward(self) -> None:
        self._training.last_gradient.backward_ends()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._training.watch.phases.switch(phases.OPTIMIZER)
        # Lightning leaves the scale of fp16 to fused optimizers, which take it away in their step.
        if self._scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            self._scaler.unscale_(optimizer)
        self._training.gradients_ready(self._step_loss())

    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        """Do nothing: gradients are freed when the step ends, not held during the next one."""

    def on_train_batch_end(self, outputs: Any, batch: MicroBatch, batch_idx: int) -> None:
        if batch.is_last:
            loss, self._losses = self._step_loss(), []
            self._training.optimizer.zero_grad(set_to_none=True)
            self._training.end_step(loss, self._batches)
            if self._training.watch.is_over:
                self.trainer.should_stop = True

    def _step_loss(self) -> Tensor:
        """The mean loss of the step's batch on this rank, a new tensor."""
        return torch.stack(self._losses).sum()
