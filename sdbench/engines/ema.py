"""The moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sdbench.engines.job import EmaSpec
from sdbench.ranks.distributed import Ranks, broadcast

# Weights that are not fp32 are converted first: so many at a time, that in place of a second copy
# of all 3.46 GB of SD2's U-Net (686 weights) there is one of about 160 MB.
NUM_WEIGHTS_AT_ONCE = 32


class ForeachEma:
    """Keeps a moving average in fp32 with torch's foreach kernels.

    Composer's own EMA walks over every parameter in Python and makes temporaries; a foreach lerp
    reads both sets of weights and writes one: 3 x 3.46 GB for the U-Net of SD2.
    """

    def __init__(self, weights: Mapping[str, Tensor], spec: EmaSpec) -> None:
        """Make room for the average.

        Args:
            weights: What this rank averages, by name, as it was placed or shared out. Of a weight
                that FSDP has cut up each rank averages its own piece.
            spec: Decay and interval.
        """
        self._weights = dict(weights)
        self._interval_batches = spec.interval_batches
        self._update = get_ema_multi_avg_fn(spec.decay)
        self._averages = [
            torch.empty_like(_local(weight), dtype=torch.float32)
            for weight in self._weights.values()
        ]
        self._num_steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an optimizer step, if it is the turn of this step.

        The first step is copied and after that each k-th, where k is the interval, is mixed in, as
        in Composer: after n steps the average is, with m = n // k and d the decay of an interval,
        d^m w_1 + (1 - d) (d^(m-1) w_k + d^(m-2) w_2k + ... + w_mk).
        """
        self._num_steps += 1
        # FSDP exchanges the local pieces when the first step begins, so they are asked for anew.
        weights = [_local(weight) for weight in self._weights.values()]
        if self._num_steps == 1:
            for average, weight in zip(self._averages, weights, strict=True):
                average.copy_(weight)
        if self._num_steps % self._interval_batches == 0:
            for first in range(0, len(weights), NUM_WEIGHTS_AT_ONCE):
                group = slice(first, first + NUM_WEIGHTS_AT_ONCE)
                fp32 = [weight.float() for weight in weights[group]]
                self._update(self._averages[group], fp32, self._num_steps)

    def state_dict(self) -> dict[str, Any]:
        """What this rank holds: the number of steps, and the averages by name.

        They share memory with this object. A piece of a weight that FSDP has cut up is a DTensor,
        so that torch.distributed.checkpoint can load it on another number of ranks.
        """
        named = zip(self._weights.items(), self._averages, strict=True)
        return {
            "num_steps": torch.tensor(self._num_steps),
            "averages": {name: _placed(average, like=weight) for (name, weight), average in named},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken of the same weights, placed in the same way."""
        self._num_steps = int(state["num_steps"])
        for name, average in zip(self._weights, self._averages, strict=True):
            average.copy_(_local(state["averages"][name]))

    def gather(self) -> dict[str, Tensor]:
        """The whole average by name, on the CPU of the first rank; every rank has to call it.

        Returns:
            On the other ranks nothing.
        """
        ranks = Ranks.from_environment()
        own: dict[str, Tensor] = {}
        for name, average in self.state_dict()["averages"].items():
            if isinstance(average, DTensor):
                average = average.full_tensor()
                if ranks.rank > 0:
                    continue
            own[name] = average.cpu()
        if ranks.world_size == 1:
            return own
        known = broadcast(set(own), ranks)
        missing = {name: average for name, average in own.items() if name not in known}
        of_ranks: list[Any] | None = [None] * ranks.world_size if ranks.rank == 0 else None
        torch.distributed.gather_object(missing, of_ranks)
        if of_ranks is None:
            return {}
        for of_rank in of_ranks:
            own |= of_rank
        return own


def _local(weight: Tensor) -> Tensor:
    """What this rank holds of a weight, without its history."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _placed(average: Tensor, *, like: Tensor) -> Tensor:
    """The average of a piece as a part of the whole, if the weight is one that has been cut up."""
    if not isinstance(like, DTensor):
        return average
    return DTensor.from_local(
        average, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
