"""`Zero1`: torch's ZeRO-1 optimizer, with few messages for many weights."""

from __future__ import annotations

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from sdbench.measure.phases import RANK_WAIT, PhaseClock

# DDP's message size for the initial broadcast of the weights.
MESSAGE_BYTES = 250 * 2**20


class Zero1(ZeroRedundancyOptimizer):
    """torch's optimizer, which sends all weights that a rank has updated in one message.

    torch sends each of the 686 weights of a U-Net on its own: 35 ms a step of `tiny` with two gloo
    ranks, and 8 ms in one message. Its views of weights in one buffer would undo the channels_last
    layout. `_sync_params`, a private method, is overridden. While `clock` runs, it times the wait
    for ranks that still update their weights.
    """

    clock: PhaseClock | None = None

    def _sync_params(self) -> None:
        if self.clock is not None and self.clock.is_running:
            with self.clock.phase(RANK_WAIT):
                torch.distributed.barrier(self.process_group)
        for rank, groups in enumerate(self._partition_parameters()):
            weights = [weight.detach() for group in groups for weight in group["params"]]
            if weights:
                torch.distributed._broadcast_coalesced(
                    self.process_group, weights, MESSAGE_BYTES, rank
                )
