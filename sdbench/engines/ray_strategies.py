"""Lightning's strategies for ranks of Ray Train: DDP, and weights that FSDP2 has sharded.

Ray's own `RayFSDPStrategy` is for FSDP1, which wants a GPU and keeps weights in flat tensors: its
checkpoints would fit no other engine. The policies are the same: SHARD_GRAD_OP is --sharding
grad_op, FULL_SHARD is full, HYBRID_SHARD is hybrid.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from ray.train.lightning import RayDDPStrategy

from sdbench.engines.sharding import make_ddp


class ConfiguredDDPStrategy(RayDDPStrategy):
    """DDP with the options of the config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._config = config

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        # Buffers are constants and equal on all ranks.
        return make_ddp(model, config=self._config, broadcast_buffers=False)

    def _register_ddp_hooks(self) -> None:
        """Nothing: `make_ddp` has registered those of the config."""

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """The context of a micro-batch that others of its step follow."""
        if self._config.grad_sync == "every":
            return contextlib.nullcontext()
        return super().block_backward_sync()


class ShardedStrategy(RayDDPStrategy):
    """For a model that FSDP2 has sharded, which averages gradients by itself."""

    def configure_ddp(self) -> None:
        """Nothing to wrap."""

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to block: `set_gradient_sync` has said what a micro-batch does."""
        return contextlib.nullcontext()
