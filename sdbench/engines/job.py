"""What does a workload hand to an engine?

The workload describes; the engine builds optimizer and moving average after it has placed or
sharded the parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
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
    """A training job, taken apart.

    Attributes:
        model: Maps a batch to what `loss` takes.
        trained: The sub-module whose weights are trained, e.g. the U-Net.
        loss: Maps the model's output to a scalar.
        loader: Batches of this rank.
        make_optimizer: Builds the optimizer for the model as the engine has placed it.
        schedule: Optimizer step, from 0, to the factor on the learning rate.
        ema: The moving average to keep, or None.
        images_per_step: Global batch.
        num_steps: Optimizer steps that the run may take at most; the watch may end it earlier.
        flops_per_image: Model FLOPs of one image, multiply-add counted as two.
        num_parameters: Weights of all sub-models.
        num_trainable_parameters: Those that are trained.
        prepare: Done once to the batch of a step on its device, before it is cut into
            micro-batches, without gradients; None leaves the batch as it is.
        sharded_blocks: Classes of modules in `trained` that an engine which shares out weights
            gathers and frees one by one.
    """

    model: torch.nn.Module
    trained: torch.nn.Module
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
