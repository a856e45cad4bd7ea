"""DDP and FSDP2: how the ranks of a run share the work, and the weights, of one model.

Both engines share the weights out by torch's FSDP2 here, before anything else gets hold of them:
Composer's own way (its `parallelism_config`) changes optimizer, precision and torch itself besides,
and two ways could not be compared. Composer leaves its DDP off when it finds a model of FSDP2.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from sdbench.engines.job import TrainJob
from sdbench.ranks.distributed import Ranks

# Values of --sharding whose ranks hold a part of the weights between two steps.
WEIGHT_SHARDING = ("grad_op", "full", "hybrid")


class MicrobatchedDDP(DistributedDataParallel):
    """DDP that can be told of a static graph and accumulate gradients.

    Torch learns the graph in the first backward pass, and fails where it leaves the averaging of
    gradients out in that one ("expect_autograd_hooks_ INTERNAL ASSERT FAILED", torch 2.7). To
    average in one micro-batch more does not change the sum.
    """

    _knows_graph = False

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Leave the averaging out, but not in the first micro-batch of a run."""
        if self.static_graph and not self._knows_graph:
            self._knows_graph = True
            return contextlib.nullcontext()
        return super().no_sync()


def make_ddp(module: torch.nn.Module, *, config: Any, **options: Any) -> DistributedDataParallel:
    """Wrap a module in DDP as the config says.

    Args:
        module: On its device, the same on every rank.
        config: The resolved config.
        **options: More arguments of `DistributedDataParallel`.
    """
    ddp = MicrobatchedDDP(
        module,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        bucket_cap_mb=config.ddp_bucket_mib,
        **options,
    )
    if config.grad_compression == "bf16":
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


def shard_weights(job: TrainJob, *, sharding: str) -> None:
    """Give each rank its part of the trained weights; the frozen ones stay whole on each.

    Args:
        job: With the model on its device. A weight in another layout becomes contiguous, which
            FSDP2 asks for; activations keep the layout of the images.
        sharding: One of `WEIGHT_SHARDING`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    ranks = Ranks.from_environment()
    axes = {"shard": ranks.world_size}
    if sharding == "hybrid":
        axes = {"replicate": ranks.num_nodes, "shard": ranks.local_world_size}
    weights = [w for module in job.trained.values() for w in module.parameters()]
    for weight in weights:
        weight.data = weight.data.contiguous()
    device_type = weights[0].device.type
    reduce_dtype = None
    if device_type == "cpu":
        # Of fp32 and bf16 FSDP2 asks the ranks' connection for the mean, and gloo, a CPU's, takes
        # the sum for it or refuses (pytorch issue 162338). Of fp64 it asks for a sum and divides.
        reduce_dtype = torch.float64
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=sharding != "grad_op",
        mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
    )
    # The innermost first: a block leaves alone what a block inside it has shared out.
    for trained in job.trained.values():
        for module in reversed(list(trained.modules())):
            if isinstance(module, job.sharded_blocks) and module is not trained:
                shard(module)
        shard(trained)


def set_gradient_sync(job: TrainJob, *, config: Any, is_last: bool) -> None:
    """Tell FSDP2 about the micro-batch to come.

    Args:
        job: What `shard_weights` has sharded.
        config: The resolved config.
        is_last: Whether it is the last micro-batch of a step.
    """
    trained: Any
    for trained in job.trained.values():
        trained.set_requires_gradient_sync(is_last or config.grad_sync == "every")
        if config.sharding == "grad_op":  # whole weights within a step are gathered once in it
            trained.set_reshard_after_backward(is_last)


def held_weights(
    job: TrainJob, optimizer: torch.optim.Optimizer, *, sharding: str
) -> dict[str, torch.Tensor]:
    """The trained weights whose optimizer state this rank holds, by name: of zero1 its part.

    Where the optimizer keeps fp32 copies of them (`masters`), the copies are what it trains.

    Args:
        job: Placed, or shared out.
        optimizer: What `job.make_optimizer` has made of them.
        sharding: The config's.
    """
    weights = job.trained_weights()
    if sharding != "zero1":
        masters = getattr(optimizer, "masters", None)
        if masters is None:
            return weights
        return {name: masters[id(weight)] for name, weight in weights.items()}
    # `optim` is the optimizer of this rank's part inside torch's ZeroRedundancyOptimizer.
    held = {id(weight) for group in optimizer.optim.param_groups for weight in group["params"]}
    return {name: weight for name, weight in weights.items() if id(weight) in held}
