"""Frozen linear layers whose weights have 8 or 4 bits a number, by torchao.

The trained LoRA beside them stays in fp32. QLoRA (arXiv 2305.14314) has such weights in NF4.
torchao is imported where a model has them: the host of a GPU may lack it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# NF4 has a scale for each block of numbers, and rounds the scales in blocks of their own.
NF4_BLOCK, NF4_SCALES = 64, 256
PREFIX = "low_bit_"


class LowBitLinear(nn.Linear):
    """A linear layer with a frozen weight of few bits, made by `reduce_bits`.

    The weight is made anew in each product. What torchao stores is in buffers, which ranks, devices
    and compilers treat like any others.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return _Product.apply(x, self.bias, self._stored(), self._kind, self._shape, self._dtype)

    @property
    def weight(self) -> Tensor:
        """Shape and type of the weight, on the meta device: peft asks for them."""
        return torch.empty(self._shape, dtype=self._dtype, device="meta")

    def restored(self) -> Tensor:
        """What the bits stand for, (out, in), in the type that the weight had."""
        return _restore(self._stored(), self._kind, self._shape, self._dtype)

    def _stored(self) -> list[Tensor]:
        return [self._buffers[name] for name in self._buffers if name.startswith(PREFIX)]


class _Product(torch.autograd.Function):
    """A product with a weight of few bits, which autograd would keep in all its bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        stored: list[Tensor],
        kind: str,
        shape: list[int],
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.form = kind, shape, dtype
        return functional.linear(x, _restore(stored, kind, shape, dtype).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = _restore([*ctx.saved_tensors], *ctx.form).to(gradient.dtype)
        return gradient @ weight, None, None, None, None, None


def _restore(stored: list[Tensor], kind: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    """The weight that stored tensors stand for."""
    if torch.compiler.is_compiling():  # torch.compile takes torchao's classes apart, and fails
        return _restore_whole(stored, kind, shape, dtype)
    if kind == "int8":
        from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

        return Int8QuantizedTrainingLinearWeight(*stored).dequantize()
    return _as_nf4(stored, shape, dtype).get_original_weight()


@torch.library.custom_op("sdbench::restore_low_bit", mutates_args=())
def _restore_whole(stored: list[Tensor], kind: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    return _restore(stored, kind, shape, dtype)


@_restore_whole.register_fake
def _(stored: list[Tensor], kind: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    return stored[0].new_empty(shape, dtype=dtype)


def _as_nf4(stored: list[Tensor], shape: list[int], dtype: torch.dtype) -> Any:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import (
        NF4Tensor,
        SubclassTensorArgs,
    )

    data, mean, factor, scales, table = stored  # in the order of NF4Tensor.__tensor_flatten__
    form = SubclassTensorArgs(torch.Size(shape), (shape[1], 1), 0, dtype, data.device, False)
    num_blocks = shape[0] * shape[1] // NF4_BLOCK
    return NF4Tensor(form, NF4_BLOCK, num_blocks, NF4_SCALES, scales, factor, mean, data, table)


def reduce_bits(module: nn.Module, kind: str) -> None:
    """Bring the weights of linear layers to ``int8`` or ``nf4``, in place.

    Layers whose weights do not fill the blocks of NF4 stay as they are.
    """
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight
    from torchao.quantization import to_nf4

    makers = {"int8": Int8QuantizedTrainingLinearWeight.from_float, "nf4": to_nf4}
    for layer in module.modules():
        is_whole = isinstance(layer, nn.Linear) and not isinstance(layer, LowBitLinear)
        if is_whole and (kind == "int8" or layer.weight.numel() % (NF4_BLOCK * NF4_SCALES) == 0):
            stored: Any = makers[kind](layer.weight.detach())
            layer._kind = kind
            layer._shape, layer._dtype = list(layer.weight.shape), layer.weight.dtype
            del layer.weight
            for name in stored.__tensor_flatten__()[0]:
                layer.register_buffer(f"{PREFIX}{name}", getattr(stored, name), persistent=False)
            layer.__class__ = LowBitLinear


def other_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module by name, without those of weights of few bits."""
    return {name: buffer for name, buffer in module.named_buffers() if PREFIX not in name}
