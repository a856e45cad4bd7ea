"""DDP and FSDP2: how the ranks share the work and the weights of one model.

All engines shard weights by torch's FSDP2 here, before the optimizer is made. Composer's own
sharding (its `parallelism_config`) also changes optimizer, precision and torch itself: the engines
could not be compared. Composer does not use DDP for a model that FSDP2 has sharded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from sdbench.engines.job import TrainJob
from sdbench.ranks.distributed import Ranks
from sdbench.settings.parallel import FSDP, GATHERED_ONCE, WITHIN_NODE
from sdbench.settings.recipe import EngineConfig


class MicrobatchedDDP(DistributedDataParallel):
    """DDP that accumulates gradients also with a static graph.

    torch 2.7 learns the graph in the first backward pass, and fails if gradients are not averaged
    in it ("expect_autograd_hooks_ INTERNAL ASSERT FAILED"). Averaging once more does not change the
    sum.
    """

    _knows_graph = False

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context without averaging, except for the first micro-batch of a run."""
        if self.static_graph and not self._knows_graph:
            self._knows_graph = True
            return contextlib.nullcontext()
        return super().no_sync()


def make_ddp(
    module: torch.nn.Module, *, config: EngineConfig, **options: Any
) -> DistributedDataParallel:
    """Wrap a module in DDP as the config says; `options` are those of `DistributedDataParallel`."""
    ddp = MicrobatchedDDP(
        module,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        bucket_cap_mb=config.ddp_bucket_mib,
        broadcast_buffers=False,  # they are constants and equal on all ranks
        **options,
    )
    if config.grad_compression == "bf16":
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


def shard_weights(job: TrainJob, *, config: EngineConfig) -> None:
    """Shard the weights of trained sub-models by FSDP2; each rank keeps those of frozen ones.

    With fp32 copies of bf16 weights each rank holds only its shards of the copies. The optimizer
    and the average work on them, and FSDP2 gathers weights for a step in bf16. Gradients are
    reduced in bf16, between CPUs in fp64, and are fp32 shards afterwards.

    The weights of the job, which are on their device, become contiguous, as FSDP2 requires;
    activations keep the layout of the images.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    ranks = Ranks.from_environment()
    axes = {"shard": ranks.world_size}
    if config.sharding in WITHIN_NODE:
        axes = {"replicate": ranks.num_nodes, "shard": ranks.local_world_size}
    weights = [w for trained in job.trained.values() for w in trained.module.parameters()]
    has_masters = config.master_weights == "fp32"
    param_dtype = weights[0].dtype if has_masters else None
    for weight in weights:
        data = weight.data.contiguous()
        weight.data = data.float() if has_masters else data
    device_type = weights[0].device.type
    reduce_dtype = None
    if device_type == "cpu":
        if config.sharding in WITHIN_NODE and torch.__version__ < "2.11":
            # torch 2.7 asserts that the stream of an average between nodes has recorded an event.
            # Streams of a CPU record none, as each operation ends before it returns. Only on a CPU:
            # on an accelerator torch waits for that event if a gathered weight is not used, as in
            # the backward pass of a LoRA.
            torch.cpu.Stream.record_event = lambda self: torch.cpu.Event()
        # For fp32 and bf16 FSDP2 asks for a reduction by mean, for which gloo returns the sum or an
        # error (pytorch issue 162338). For fp64 it asks for a sum and divides.
        reduce_dtype = torch.float64
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=config.sharding not in GATHERED_ONCE,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=job.casts_inputs,
        ),
    )
    # The innermost first: a block does not shard again what a block inside it has sharded.
    for trained in job.trained.values():
        for module in reversed(list(trained.module.modules())):
            if isinstance(module, job.sharded_blocks) and module is not trained.module:
                shard(module)
        shard(trained.module)


def begin_microbatch(job: TrainJob, *, config: EngineConfig, is_last: bool) -> None:
    """Tell FSDP2 whether the next micro-batch reduces gradients, and to gather weights for it."""
    if config.sharding not in FSDP:
        return
    for trained in job.trained.values():
        module: Any = trained.module  # fully_shard has added these methods
        module.set_requires_gradient_sync(is_last or config.grad_sync == "every")
        if config.sharding in GATHERED_ONCE:
            module.set_reshard_after_backward(is_last)
    if config.gather_ahead:
        for module in _sharded_modules(job):
            module.unshard(async_op=True)  # no effect on a module that has its weights


def forget_gathered(job: TrainJob) -> None:
    """Free gathered weights, which FSDP2 may keep after a forward pass."""
    for module in _sharded_modules(job):
        module.reshard()


def _sharded_modules(job: TrainJob) -> Iterator[FSDPModule]:
    """The modules that gather their weights on their own, in the order of their registration.

    The forward pass has another order: diffusers' U-Net registers the middle block after those
    that go up, and attentions before residual blocks.
    """
    for trained in job.trained.values():
        yield from (m for m in trained.module.modules() if isinstance(m, FSDPModule))


def own_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer of this rank's weights, which is inside torch's ZeroRedundancyOptimizer."""
    return getattr(optimizer, "optim", optimizer)


def held_weights(job: TrainJob, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The trained weights whose optimizer state this rank holds, or their fp32 copies, by name."""
    own = own_optimizer(optimizer)
    held = getattr(own, "masters", None)
    if held is None:
        held = {id(weight): weight for group in own.param_groups for weight in group["params"]}
    weights = job.trained_weights().items()
    return {name: held[id(weight)] for name, weight in weights if id(weight) in held}
