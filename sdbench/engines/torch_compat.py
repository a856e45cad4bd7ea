"""Internals of torch that the engines change: `AdamW`, and FSDP2 between nodes of CPUs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdbench.base.errors import RunError

# Parameters of AdamW._init_group in the releases of torch that the suite was tried with.
INIT_GROUP = (
    "group",
    "params_with_grad",
    "grads",
    "exp_avgs",
    "exp_avg_sqs",
    "max_exp_avg_sqs",
    "state_steps",
)


class AdamW(torch.optim.AdamW):
    """torch's AdamW, without copies of tensors that are channels_last.

    The fused CPU kernel copies tensors that are not contiguous. The update is elementwise, so a
    permuted view that is contiguous gives the same result. `_init_group`, a private method that
    lists a group's tensors for the kernel, is overridden to give it such views.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Make the optimizer as torch does, if its `_init_group` is the known one."""
        if (found := tuple(inspect.signature(super()._init_group).parameters)) != INIT_GROUP:
            raise RunError(
                f"torch {torch.__version__} is not known to this suite: its AdamW lists the "
                f"tensors {found}, and not {INIT_GROUP}; requirements.txt has a torch that is known"
            )
        super().__init__(*args, **settings)

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        is_complex = super()._init_group(group, *tensors)
        weights = tensors[0]
        # Gradients, first and second moments, and the largest second moments where they are kept;
        # the last list, the numbers of steps, is left out.
        alike = [of_one_kind for of_one_kind in tensors[:-1] if of_one_kind]
        for index in range(len(weights)):
            of_one_weight = [of_one_kind[index] for of_one_kind in alike]
            if all(map(_is_channels_last, of_one_weight)):
                for of_one_kind, tensor in zip(alike, of_one_weight, strict=True):
                    of_one_kind[index] = tensor.permute(0, 2, 3, 1)
        return is_complex


def let_cpus_average_between_nodes() -> None:
    """Let FSDP2 share weights within each node on CPUs as well.

    torch 2.7 asserts that the stream of an average between nodes has recorded an event. The streams
    of a CPU, where each operation has ended when it returns, record none; torch 2.11 knows that.
    """
    if torch.__version__ >= "2.11":
        return
    torch.cpu.Stream.record_event = lambda self: torch.cpu.Event()


def _is_channels_last(tensor: Tensor) -> bool:
    """Return True for an unsharded CPU tensor with the channels last in memory."""
    if tensor.ndim != 4 or tensor.device.type != "cpu" or isinstance(tensor, DTensor):
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)
