"""Frozen linear layers whose weights have 8 or 4 bits a number, by torchao.

The trained LoRA beside them stays in fp32. QLoRA (arXiv 2305.14314) has such weights in NF4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# to_nf4 takes blocks of 64 numbers, whose scales it rounds in blocks of 256.
NF4_NUMBERS = 64 * 256
PREFIX = "low_bit_"


class LowBitLinear(nn.Linear):
    """A linear layer with a frozen weight of few bits, made by `reduce_bits`.

    Its `weight` is what the bits stand for, made anew whenever it is asked for. What torchao stores
    is in buffers, which ranks, devices and compilers treat like any others.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return _Product.apply(x, self, self.bias)

    @property
    def weight(self) -> Tensor:
        """The weight, (out, in), in the type that it had."""
        stored = self._kind.__tensor_unflatten__(
            {name: getattr(self, f"{PREFIX}{name}") for name in self._names},
            self._context,
            (self.out_features, self.in_features),
            (self.in_features, 1),
        )
        is_nf4 = hasattr(stored, "get_original_weight")
        return stored.get_original_weight() if is_nf4 else stored.dequantize()


class _Product(torch.autograd.Function):
    """A product with the weight of a layer, which autograd would keep until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LowBitLinear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.layer.weight.to(gradient.dtype), None, None


def other_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module by name, without those of weights of few bits."""
    named = module.named_buffers()
    return {name: buffer for name, buffer in named if PREFIX not in name}


def reduce_bits(module: nn.Module, kind: str) -> None:
    """Bring the weights of linear layers to ``int8`` or ``nf4``, in place.

    Layers whose weights do not fill the blocks of NF4 stay as they are.
    """
    from torchao.dtypes.nf4tensor import to_nf4
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    make = {"int8": Int8QuantizedTrainingLinearWeight.from_float, "nf4": to_nf4}[kind]
    for layer in module.modules():
        is_whole = isinstance(layer, nn.Linear) and not isinstance(layer, LowBitLinear)
        if is_whole and (kind == "int8" or layer.weight.numel() % NF4_NUMBERS == 0):
            stored: Any = make(layer.weight.detach())
            layer._names, layer._context = stored.__tensor_flatten__()
            layer._kind = type(stored)
            del layer.weight
            for name in layer._names:
                layer.register_buffer(f"{PREFIX}{name}", getattr(stored, name), persistent=False)
            layer.__class__ = LowBitLinear
