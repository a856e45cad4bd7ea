"""`pack_linear_layers`: linear layers whose weights lie in memory as a CPU's kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sdbench.models.compat import change_class


class PackedLinear(nn.Linear):
    """A frozen linear layer on weights that oneDNN has laid out in blocks."""

    packed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., features) in bf16; gradients do not pass."""
        # The operators that Inductor uses for weights that are frozen.
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linear_layers(model: nn.Module) -> None:
    """Lay the weights of all linear layers out in blocks, once.

    oneDNN does it in each call otherwise: with 154 rows, two captions, this takes as long as the
    product.

    Args:
        model: Frozen, in bf16, on the CPU; changed in place. Its weights stay beside their copies.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            change_class(module, PackedLinear)
            module.packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach())
