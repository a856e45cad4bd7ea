"""`WorkCounter`: counts the arithmetic and the bytes of each operator of a step; `count_image`.

Arithmetic is that of matrix products and convolutions, by torch's own formulas. Bytes are the least
that a call must read and write, each input once and each output once, without temporaries and
repeated reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sdbench.models.replay import Step, build_replayed, make_batch, make_plain, remember
from sdbench.profile.roofline import Operator, Work

aten = torch.ops.aten

# The marks of torch's profiler and optimizers are dispatched as operators too.
NO_WORK = ("profiler", "prim")

# torch 2.7 and 2.11 have formulas only for the attention kernels of GPUs, and count nothing for a
# CPU. The arguments are the same. A backward pass is five products and not four: these kernels
# compute the scores again instead of keeping them.
FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
# Memory is set aside, and nothing is read or written.
ALLOCATIONS = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
# The first argument is overwritten without being read.
OVERWRITES = {
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.normal_,
    aten.uniform_,
    aten.random_,
    aten._foreach_copy_,
    aten._foreach_zero_,
}
# Only the rows asked for are read from a table: as many bytes as the output has.
LOOK_UPS = {aten.embedding, aten.index, aten.index_select, aten.gather}
# The schema lets these write the gradients too, which they do only to undo loss scaling.
FUSED_OPTIMIZERS = {aten._fused_adamw_, aten._fused_adam_}


class WorkCounter(TorchDispatchMode):
    """Counts the work of every operator while it is entered.

    It sees every operator below autograd and autocast: exactly those that compute something. It
    keeps numbers and no tensors, so that the step needs no more memory than any other.

    Attributes:
        work: Sum over the calls, by operator and dtype.
    """

    def __init__(self, *, phase: Callable[[], str], device_type: str) -> None:
        """Prepare to count the memory of ``cuda`` or ``cpu``; `phase` says where the step is."""
        super().__init__()
        self.work: dict[tuple[Operator, str], Work] = {}
        self._phase = phase
        self._device_type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace not in NO_WORK:
            self._add(func, args, kwargs, result)
        return result

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = _tensors_in((args, kwargs)) or _tensors_in(result)
        if not tensors:
            return
        numbers = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        dtype = str((numbers or [tensors[0].dtype])[0]).removeprefix("torch.")
        shapes = tuple(
            tuple(value.shape)
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.Tensor) and value.dim()
        )
        operator = Operator(self._phase(), func.name().partition(".")[0], shapes)
        work = self.work.setdefault((operator, dtype), Work())
        work.calls += 1
        work.flop += _count_flop(func, args, kwargs, result)
        work.num_bytes += _count_bytes(func, args, kwargs, result, device_type=self._device_type)


def count_image(step: Step) -> dict[str, float]:
    """Count the work of an image in a step, without computing it, and the operators of the step.

    The bytes are those of operators that are no products, with two for each number. The step is
    counted with two images and with four: what both have, such as weights, belongs to no image.
    """
    plain = make_plain(step)
    return remember("work", plain, lambda: _count_image(plain))


def _count_image(step: Step) -> dict[str, float]:
    found = []
    for num_images in (2, 4):
        model = build_replayed(step, device="meta")
        with torch.device("meta"):
            batch = make_batch(step, num_images=num_images)
        with WorkCounter(phase=str, device_type="meta") as counter:
            model.loss(*model(batch)).backward()
        work = counter.work.values()
        flop = sum(one.flop for one in work)
        num_bytes = sum(one.num_bytes for one in work if not one.flop)
        found.append((flop, num_bytes, sum(one.calls for one in work if one.num_bytes)))
    (few_flop, few_bytes, num_operators), (flop, num_bytes, _) = found
    num_trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    return {
        "tera_operations": (flop - few_flop) / 2 / 1e12,
        "gigabytes": (num_bytes - few_bytes) / 2 / 2 / 1e9,  # fp32 on the meta device
        "num_operators": num_operators,
        "giga_weights": num_trained / 1e9,
    }


def _count_flop(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Operations of the matrix products and convolutions in a call, a multiply-add being two."""
    packet = func.overloadpacket
    formula = FORMULAS.get(packet) or flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _count_bytes(func: Any, args: Any, kwargs: Any, result: Any, *, device_type: str) -> int:
    """Bytes of the device's memory that a call reads and writes; a view moves none."""
    packet = func.overloadpacket
    is_view = func.is_view or torch.Tag.inplace_view in func.tags
    if is_view or packet in ALLOCATIONS:
        return 0
    read: dict[int, torch.Tensor] = {}
    written: dict[int, torch.Tensor] = {}
    storages: set[int] = set()
    for argument, value in _named(func, args, kwargs):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_overwritten = argument.is_out or (packet in OVERWRITES and argument.name == "self")
        if packet in FUSED_OPTIMIZERS and argument.name == "grads":
            is_written = kwargs.get("grad_scale") is not None
        for tensor in _tensors_in(value):
            storages.add(_storage_of(tensor))
            if is_written:
                written[id(tensor)] = tensor
            if not is_overwritten:
                read[id(tensor)] = tensor
    # A result in the memory of an argument is the argument, or a view of it.
    made = [t for t in _tensors_in(result) if _storage_of(t) not in storages]
    written |= {id(tensor): tensor for tensor in made}
    if not written:
        return 0
    num_written = sum(_num_bytes(tensor, device_type) for tensor in written.values())
    if packet in LOOK_UPS:
        table, *indices = _tensors_in((args, kwargs))
        num_read = sum(_num_bytes(tensor, device_type) for tensor in indices)
        return num_written + min(num_written, _num_bytes(table, device_type)) + num_read
    return num_written + sum(_num_bytes(tensor, device_type) for tensor in read.values())


def _storage_of(tensor: torch.Tensor) -> int:
    """What two tensors with the same memory have in common, on the meta device too."""
    return tensor.untyped_storage()._cdata


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _named(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The arguments as the schema describes them, each with its value in this call."""
    # torch keeps no public way to the schema of an operator.
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _num_bytes(tensor: torch.Tensor, device_type: str) -> int:
    """Bytes in memory; along a dimension of stride 0 all elements are the same one."""
    if tensor.device.type != device_type:
        return 0
    num_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        num_elements *= size if stride or not size else 1
    return num_elements * tensor.element_size()
