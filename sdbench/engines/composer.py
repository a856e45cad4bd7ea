"""How does MosaicML Composer train the parts?"""

from __future__ import annotations

from typing import Any

import torch
from composer import Callback, ComposerModel, State, Trainer
from composer.algorithms import EMA
from composer.devices import DeviceGPU
from composer.loggers import Logger
from composer.utils import get_device

from sdbench.measure import phases
from sdbench.measure.hardware import BYTES_PER_GIB, peak_resident_memory_gib
from sdbench.measure.phases import PhaseClock
from sdbench.measure.summary import Measurements, measurements_of
from sdbench.measure.watch import StepWatch
from sdbench.parts import EmaSpec, Parts


def fit(parts: Parts, config: Any, watch: StepWatch) -> Measurements:
    """Train until the watch says that all is measured, at most `parts.num_steps` steps.

    Args:
        parts: What the workload built.
        config: The resolved config; read are the micro-batch, precision and seed.
        watch: Told of every step and of the phases of it.

    Returns:
        The measurements of this rank.

    Raises:
        RunError: If the loss is not finite, or the loop ended before its last step.
    """
    device = get_device(None)
    device.batch_to_device = watch.phases.wrap(phases.HOST_TO_DEVICE, device.batch_to_device)
    model = device.module_to_device(ComposerDiffusion(parts))
    callbacks: list[Callback] = [WatchCallback(watch, trained=parts.trained)]
    algorithms = []
    if parts.ema is not None and parts.ema.implementation == "composer":
        ema = EMA(half_life=f"{parts.ema.half_life_batches}ba")
        ema.apply = watch.phases.wrap(phases.EMA, ema.apply)
        algorithms.append(ema)
    elif parts.ema is not None:
        foreach_ema = ForeachEma(parts.trained, parts.ema)
        foreach_ema.batch_end = watch.phases.wrap(phases.EMA, foreach_ema.batch_end)
        callbacks.insert(0, foreach_ema)

    if isinstance(device, DeviceGPU):
        torch.cuda.reset_peak_memory_stats()
    optimizer = parts.make_optimizer(model)
    # Composer hands most optimizers the whole forward and backward pass as a closure, so that for
    # torch a step begins before its gradients are there: the phase begins in WatchCallback.
    optimizer.register_step_post_hook(lambda *_: watch.phases.switch(phases.OTHER) and None)
    trainer = Trainer(
        model=model,
        train_dataloader=parts.loader,
        optimizers=optimizer,
        # Torch's own scheduler counts its steps; Composer's would see the batch before this one.
        schedulers=torch.optim.lr_scheduler.LambdaLR(optimizer, parts.schedule),
        step_schedulers_every_batch=True,
        max_duration=f"{parts.num_steps}ba",
        algorithms=algorithms,
        callbacks=callbacks,
        device=device,
        # Composer's precision brings the gradient scaler that fp16 needs. The autocast itself is in
        # the model, because Composer knows none on a CPU.
        precision="amp_fp16" if config.precision == "amp_fp16" else "fp32",
        device_train_microbatch_size=config.device_train_microbatch_size,
        # Trainer(seed=None) would draw a new seed from the clock. Composer adds the rank, so that
        # two ranks draw different noise.
        seed=config.seed,
        progress_bar=False,
    )
    trainer.fit()
    # Only after a good end: it waits for all ranks, which a rank that failed would do for ever.
    trainer.close()
    return measurements_of(
        watch,
        num_images=parts.loader.num_images_delivered,
        peak_memory_gib=_peak_memory_gib(device),
    )


class ComposerDiffusion(ComposerModel):
    """The parts' model and loss behind the interface that Composer trains."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.model = parts.model
        self._loss = parts.loss

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        """The model's output for a batch."""
        return self.model(batch)

    def loss(self, outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The scalar to minimise."""
        return self._loss(outputs)


class WatchCallback(Callback):
    """Passes Composer's events on to the watch, and ends the loop when the watch says so."""

    def __init__(self, watch: StepWatch, *, trained: torch.nn.Module) -> None:
        self._watch = watch
        self._last_gradient = LastGradient(trained, watch.phases)

    def fit_start(self, state: State, logger: Logger) -> None:
        """The loop is about to begin."""
        self._watch.loop_begins()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """The next batch is asked for."""
        self._watch.data_wait_begins()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """The batch is there, or the epoch is over."""
        self._watch.data_wait_ends()

    def before_backward(self, state: State, logger: Logger) -> None:
        """The gradients of a micro-batch are about to be computed."""
        self._watch.phases.switch(phases.BACKWARD)
        self._last_gradient.backward_begins()

    def after_backward(self, state: State, logger: Logger) -> None:
        """They are there, and in the last micro-batch they are averaged over all ranks."""
        self._last_gradient.backward_ends()
        self._watch.phases.switch(phases.OTHER)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """All gradients of the batch are there, and the optimizer is next."""
        self._watch.phases.switch(phases.OPTIMIZER)

    def batch_end(self, state: State, logger: Logger) -> None:
        """The step is done; Composer has averaged the loss over all ranks."""
        self._watch.step_ends(loss=state.total_loss_dict["loss/train/total"])
        if self._watch.is_over:
            state.stop_training()


class LastGradient:
    """Tells when a rank has computed its last gradient: what is left of the pass is communication.

    While it computes, torch's DDP averages the gradients that are there already; only what goes on
    behind the last of them, waiting for slower ranks included, makes the step longer.
    """

    def __init__(self, module: torch.nn.Module, clock: PhaseClock) -> None:
        """Prepare; nothing is hooked until a profiled backward pass.

        Args:
            module: Its trained parameters get gradients, each once in a backward pass.
            clock: Is switched behind the last of them.
        """
        self._parameters = [weight for weight in module.parameters() if weight.requires_grad]
        self._clock = clock
        self._hooks: list[Any] = []
        self._num_missing = 0

    def backward_begins(self) -> None:
        """Count the gradients to come, if anybody wants to know."""
        if self._clock.is_running and torch.distributed.is_initialized():
            self._num_missing = len(self._parameters)
            self._hooks = [
                weight.register_post_accumulate_grad_hook(self._count)
                for weight in self._parameters
            ]

    def backward_ends(self) -> None:
        """Take the hooks away again: the measured steps do without them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _count(self, weight: torch.Tensor) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._clock.switch(phases.GRADIENT_COMMUNICATION)


class ForeachEma(Callback):
    """Keeps a moving average of one sub-module with torch's foreach kernels.

    Composer's own EMA walks over every parameter in Python and makes temporaries; one foreach lerp
    reads both sets of weights and writes one: 3 x 3.46 GB for the U-Net of SD2.
    """

    def __init__(self, module: torch.nn.Module, spec: EmaSpec) -> None:
        self._module = module
        self._decay = spec.decay
        self.average: torch.optim.swa_utils.AveragedModel | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Make room for the average, now that the module is where it will be trained.

        The first update is a copy, as Composer's is, so that after n steps the average is
        decay^(n-1) w_1 + (1 - decay) (decay^(n-2) w_2 + ... + w_n).
        """
        self.average = torch.optim.swa_utils.AveragedModel(
            self._module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(self._decay)
        )
        self.average.requires_grad_(False)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Take in the weights after this optimizer step."""
        assert self.average is not None
        self.average.update_parameters(self._module)


def _peak_memory_gib(device: Any) -> float:
    """On a GPU what torch's allocator reserved at most: that decides whether a run fits."""
    if isinstance(device, DeviceGPU):
        return torch.cuda.max_memory_reserved() / BYTES_PER_GIB
    return peak_resident_memory_gib()
