"""`TrainJob`, which a task hands to an engine.

The task describes the optimizer and the moving average; they are made after the engine has placed
or sharded the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sdbench.data.batches.loader import CheckedLoader
    from sdbench.engines.device_batches import Batch


@dataclasses.dataclass(frozen=True)
class EmaSpec:
    """An exponential moving average of weights, updated every `interval_batches` optimizer steps.

    Attributes:
        implementation: ``composer`` (Composer's algorithm, over every trainable parameter and all
            buffers) or ``foreach`` (`ForeachEma`, over the trained weights).
        half_life_batches: Steps after which the influence of a weight has halved.
        warms_up: The decay of the n-th update is at most (1 + n) / (10 + n), as in open-diffusion.
    """

    implementation: str
    half_life_batches: float
    interval_batches: int = 1
    warms_up: bool = False

    @property
    def decay(self) -> float:
        """Factor of the old average in an update: 0.5 ** (interval / half-life)."""
        return 0.5 ** (self.interval_batches / self.half_life_batches)


@dataclasses.dataclass(frozen=True)
class TrainedModule:
    """A sub-module whose weights are trained, its learning rate without schedule, and its decay."""

    module: torch.nn.Module
    lr: float
    weight_decay: float


@dataclasses.dataclass(frozen=True)
class TrainJob:
    """A training job.

    Attributes:
        model: Maps a batch to the input of `loss`, which makes a scalar of it.
        trained: The trained sub-modules of `model` by name. Their weights are averaged, sharded
            and saved.
        loader: Batches of this rank.
        make_optimizer: Makes the optimizer from `optimizers.parameter_groups`.
        schedule: `schedule(step)` is the multiplier of all learning rates; steps count from 0.
        images_per_step: Global batch.
        num_steps: Maximum number of optimizer steps; the watch may end the run earlier.
        flops_per_image: As `replay.count_flops`.
        num_parameters: Weights of all sub-models, including encoders freed after use.
        prepare: Applied to the whole batch of a step on the device, without gradients, before it is
            split into micro-batches.
        sharded_blocks: Classes of modules inside `trained` that FSDP gathers and frees one by one.
        casts_inputs: Whether FSDP casts the inputs of these to the type of their weights.
        max_gradient_norm: Gradients of a step with a larger norm, over all trained weights and
            micro-batches, are scaled down to it.
        kept: Frozen weights that are saved too, because they came from another run: on the CPU, in
            the type they came in, by the name ``<module>.<parameter>``.
    """

    model: torch.nn.Module
    trained: Mapping[str, TrainedModule]
    loss: Callable[[Any], torch.Tensor]
    loader: CheckedLoader
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    schedule: Callable[[int], float]
    ema: EmaSpec | None
    images_per_step: int
    num_steps: int
    flops_per_image: float
    num_parameters: int
    num_trainable_parameters: int
    prepare: Callable[[Batch], Batch] | None = None
    sharded_blocks: tuple[type[torch.nn.Module], ...] = ()
    casts_inputs: bool = True
    max_gradient_norm: float | None = None
    kept: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def trained_weights(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that get gradients, named ``<module>.<parameter>``."""
        return {
            f"{module_name}.{name}": weight
            for module_name, trained in self.trained.items()
            for name, weight in trained.module.named_parameters()
            if weight.requires_grad
        }
