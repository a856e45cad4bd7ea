"""Lightning's strategies for ranks of Ray Train: DDP, and weights that FSDP2 has sharded.

Ray's own `RayFSDPStrategy` is for FSDP1, which needs a GPU and keeps weights in flat tensors: its
checkpoints would fit no other engine. The policies are the same: SHARD_GRAD_OP is --sharding
grad_op, FULL_SHARD is full, HYBRID_SHARD is hybrid.
"""

from __future__ import annotations

import contextlib

import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from ray.train.lightning import RayDDPStrategy

from sdbench.engines.job import EngineConfig
from sdbench.engines.sharding import make_ddp
from sdbench.engines.training import find_device
from sdbench.ranks.distributed import Ranks


class RanksEnvironment(LightningEnvironment):
    """Tells Lightning the rank of this process; nodes may have different numbers of ranks.

    Lightning would compute them from devices and nodes.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no ranks."""
        return True

    def world_size(self) -> int:
        """Number of ranks."""
        return self._ranks.world_size

    def global_rank(self) -> int:
        """Rank of this process."""
        return self._ranks.rank

    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return self._ranks.local_rank

    def set_world_size(self, size: int) -> None:
        """Do nothing."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing."""

    def teardown(self) -> None:
        """Do nothing: the process goes on with its rank."""


class ConnectedStrategy(RayDDPStrategy):
    """Ray's DDP strategy on the device that the rank has chosen."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return find_device()


class ConfiguredDDPStrategy(ConnectedStrategy):
    """DDP with the options of the config."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return make_ddp(model, config=self._config)

    def _register_ddp_hooks(self) -> None:
        """Do nothing: `make_ddp` has registered those of the config."""

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """The context of each micro-batch of a step but the last."""
        if self._config.grad_sync == "every":
            return contextlib.nullcontext()
        return super().block_backward_sync()


class ShardedStrategy(ConnectedStrategy):
    """For a model that FSDP2 has sharded, which averages gradients by itself."""

    def configure_ddp(self) -> None:
        """Do nothing."""

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """An empty context: `begin_microbatch` decides what a micro-batch does."""
        return contextlib.nullcontext()
