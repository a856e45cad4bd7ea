"""`ForeachEma`: an exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sdbench.engines.job import EmaSpec

# Weights in other types are converted to fp32 in groups of this many: for SD2's U-Net (686 weights)
# that takes about 160 MB at a time, where all at once take 3.46 GB.
NUM_WEIGHTS_AT_ONCE = 32


class ForeachEma:
    """A moving average in fp32, updated by torch's foreach kernels.

    Composer's EMA loops over the parameters in Python and makes temporaries; a foreach lerp reads
    weights and averages and writes averages: 3 x 3.46 GB for the U-Net of SD2.
    """

    def __init__(self, weights: Mapping[str, Tensor], spec: EmaSpec) -> None:
        """Allocate the averages of the weights that this rank holds, by name.

        Each rank averages its own shard of a weight that FSDP has sharded.
        """
        self._weights = dict(weights)
        self._spec = spec
        # Zeros: a checkpoint may be saved before the first update, and has only finite values.
        self._averages = [
            torch.zeros_like(_local(weight), dtype=torch.float32)
            for weight in self._weights.values()
        ]
        self.num_steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after an optimizer step, at the end of each interval.

        As in Composer, the average begins as the weights after the first step, and with an interval
        of k the weights after each k-th step are mixed in: after n steps, with m = n // k and the
        decay d, it is d^m w_1 + (1 - d) (d^(m-1) w_k + d^(m-2) w_2k + ... + w_mk).
        """
        self.num_steps += 1
        # FSDP replaces the local shards when the first step begins, so they are looked up anew.
        weights = [_local(weight) for weight in self._weights.values()]
        if self.num_steps == 1:
            for average, weight in zip(self._averages, weights, strict=True):
                average.copy_(weight)
        if self.num_steps % self._spec.interval_batches == 0:
            decay = self._spec.decay
            if self._spec.warms_up:
                num_updates = self.num_steps // self._spec.interval_batches
                decay = min(decay, (1 + num_updates) / (10 + num_updates))
            update = get_ema_multi_avg_fn(decay)
            for first in range(0, len(weights), NUM_WEIGHTS_AT_ONCE):
                group = slice(first, first + NUM_WEIGHTS_AT_ONCE)
                fp32 = [weight.float() for weight in weights[group]]
                update(self._averages[group], fp32, self.num_steps)

    @property
    def averages(self) -> dict[str, Tensor]:
        """This rank's averages by name, in the memory of this object.

        The average of a sharded weight is a DTensor, so that torch.distributed.checkpoint can load
        it on another number of ranks.
        """
        averages = {}
        for (name, weight), average in zip(self._weights.items(), self._averages, strict=True):
            if isinstance(weight, DTensor):
                sizes = {"shape": weight.shape, "stride": weight.stride()}
                average = DTensor.from_local(
                    average, weight.device_mesh, weight.placements, **sizes
                )
            averages[name] = average
        return averages


def _local(weight: Tensor) -> Tensor:
    """This rank's shard of a weight, or the whole weight, detached."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight
