"""Counts the arithmetic and the bytes of each operator of a step.

A step is trained under a torch dispatch mode that is shown every operator below autograd and
autocast: exactly those that compute something. Numbers are kept and no tensors, so that the step
needs no more memory than any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sdbench.tasks.profile.roofline import Operator, Work
from sdbench.tasks.profile.work import count_bytes, count_flop, tensors_in

# The marks of torch's profiler and optimizers are dispatched as operators too.
NO_WORK = ("profiler", "prim")


class WorkCounter(TorchDispatchMode):
    """Counts the work of every operator while it is entered.

    Attributes:
        work: Operator and type of its numbers to the sum over its calls.
    """

    def __init__(self, *, phase: Callable[[], str], device_type: str) -> None:
        """Prepare to count.

        Args:
            phase: The phase that the step is in.
            device_type: Whose memory is counted: ``cuda`` or ``cpu``.
        """
        super().__init__()
        self.work: dict[tuple[Operator, str], Work] = {}
        self._phase = phase
        self._device_type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in NO_WORK:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._add(func, args, kwargs, result)
        return result

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = tensors_in((args, kwargs)) or tensors_in(result)
        if not tensors:
            return
        numbers = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        dtype = str((numbers or [tensors[0].dtype])[0]).removeprefix("torch.")
        operator = Operator(
            self._phase(), func.name().partition(".")[0], _shapes([*args, *kwargs.values()])
        )
        work = self.work.setdefault((operator, dtype), Work())
        work.calls += 1
        work.flop += count_flop(func, args, kwargs, result)
        work.num_bytes += count_bytes(func, args, kwargs, result, device_type=self._device_type)


def _shapes(values: list[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(value.shape) for value in values if isinstance(value, torch.Tensor) and value.dim()
    )
