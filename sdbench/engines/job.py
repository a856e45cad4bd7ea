"""What does a workload hand to an engine?

The workload describes; the engine builds optimizer and moving average after it has placed or
sharded the parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class EmaSpec:
    """An exponential moving average of weights, updated after every so many optimizer steps.

    Attributes:
        implementation: ``composer`` (its algorithm, over every trainable parameter and all buffers)
            or ``foreach`` (torch's foreach kernels over the trained sub-module, in fp32).
        half_life_batches: Steps after which a weight's influence has halved.
        interval_batches: Steps from one update to the next.
    """

    implementation: str
    half_life_batches: int
    interval_batches: int = 1

    @property
    def decay(self) -> float:
        """What an update keeps of the average: 0.5 ** (interval / half-life)."""
        return 0.5 ** (self.interval_batches / self.half_life_batches)


@dataclasses.dataclass(frozen=True)
class TrainJob:
    """A training job.

    Attributes:
        model: Maps a batch to what `loss` takes.
        trained: The sub-modules of `model` whose weights are trained, by name. These are averaged,
            sharded and saved.
        loss: Maps the model's output to a scalar.
        loader: Batches of this rank.
        make_optimizer: Builds the optimizer for the model as the engine has placed it, with a
            parameter group for each rate or decay that the job wants.
        schedule: `schedule(step)` is the multiplier of the learning rate; steps count from 0.
        ema: Which moving average of the trained weights to keep, or None.
        images_per_step: Global batch.
        num_steps: Optimizer steps that the run may take at most; the watch may end it earlier.
        flops_per_image: Model FLOPs of one image, multiply-add counted as two.
        num_parameters: Weights of all sub-models.
        num_trainable_parameters: Those that are trained.
        prepare: Applied to the whole batch of a step on its device, without gradients, before the
            batch is cut into micro-batches; None leaves the batch as it is.
        sharded_blocks: Classes of modules in `trained` that FSDP gathers and frees one by one.
    """

    model: torch.nn.Module
    trained: Mapping[str, torch.nn.Module]
    loss: Callable[[Any], torch.Tensor]
    loader: Iterable[Any]
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    schedule: Callable[[int], float]
    ema: EmaSpec | None
    images_per_step: int
    num_steps: int
    flops_per_image: float
    num_parameters: int
    num_trainable_parameters: int
    prepare: Callable[[Any], Any] | None = None
    sharded_blocks: tuple[type[torch.nn.Module], ...] = ()

    def trained_weights(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that get gradients, named ``<module>.<parameter>``."""
        return {
            f"{module_name}.{name}": weight
            for module_name, module in self.trained.items()
            for name, weight in module.named_parameters()
            if weight.requires_grad
        }
