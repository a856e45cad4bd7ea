"""The arithmetic and the bytes of one call of an operator.

Arithmetic is that of matrix products and convolutions, by torch's own formulas. Bytes are what the
call must read and write at least, each input once and each output once: what it writes to itself
on the way, or reads a second time, is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# torch 2.7 and 2.11 have formulas for the attention kernels of GPUs only, and take that of a CPU
# for nothing. The arguments are the same. A backward pass is five products and not four: these
# kernels compute the scores again instead of keeping them.
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
# What was in the first argument is not read before it is overwritten.
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
# Of a table only the rows that are asked for are read: as many bytes as the output has.
LOOK_UPS = {aten.embedding, aten.index, aten.index_select, aten.gather}
# The schema lets these write the gradients too, which they do only to take a loss scale off them.
FUSED_OPTIMIZERS = {aten._fused_adamw_, aten._fused_adam_}


def count_flop(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Operations of the matrix products and convolutions in a call, a multiply-add being two.

    Args:
        func: An overload of a torch operator.
        args: Its positional arguments.
        kwargs: Its other arguments.
        result: What it returned.
    """
    packet = func.overloadpacket
    formula = FORMULAS.get(packet) or flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def count_bytes(func: Any, args: Any, kwargs: Any, result: Any, *, device_type: str) -> int:
    """Bytes of the device's memory that a call reads and writes; a view moves none.

    Args:
        func: An overload of a torch operator.
        args: Its positional arguments.
        kwargs: Its other arguments.
        result: What it returned.
        device_type: Tensors elsewhere are not counted: they do not pass this memory.
    """
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
        for tensor in tensors_in(value):
            storages.add(tensor.untyped_storage().data_ptr())
            if is_written:
                written[id(tensor)] = tensor
            if not is_overwritten:
                read[id(tensor)] = tensor
    # A result in the memory of an argument is the argument, or a view of it.
    made = [t for t in tensors_in(result) if t.untyped_storage().data_ptr() not in storages]
    written |= {id(tensor): tensor for tensor in made}
    if not written:
        return 0
    num_written = sum(_num_bytes(tensor, device_type) for tensor in written.values())
    if packet in LOOK_UPS:
        table, *indices = tensors_in((args, kwargs))
        num_read = sum(_num_bytes(tensor, device_type) for tensor in indices)
        return num_written + min(num_written, _num_bytes(table, device_type)) + num_read
    return num_written + sum(_num_bytes(tensor, device_type) for tensor in read.values())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _named(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Arguments as the schema describes them, each with its value in this call."""
    # torch keeps no public way to the schema of an operator.
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _num_bytes(tensor: torch.Tensor, device_type: str) -> int:
    """Bytes in memory; along a dimension without a stride all elements are the same one."""
    if tensor.device.type != device_type:
        return 0
    num_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        num_elements *= size if stride or not size else 1
    return num_elements * tensor.element_size()
