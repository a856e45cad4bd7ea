"""How does a model get random weights without a second copy of it, or of its numbers?

The model is made on the meta device, which holds shapes only. Then each part in turn is drawn once,
in fp32 on the device where it stays, and brought to its type before the next part begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the weights of a model are, and where.

    Attributes:
        seed: Of those that are drawn; None draws nothing, for fake tensors, which have no numbers.
        device: Where they are.
        dtype: Type of the floating-point ones.
        memory_format: Layout of the four-dimensional ones.
    """

    seed: int | None
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.preserve_format

    def place(self, module: nn.Module) -> None:
        """Bring a module to device, type and layout, in place."""
        # nn.Module's own `to`: diffusers' warns of modules to keep in fp32, and then names none.
        nn.Module.to(module, self.device, dtype=self.dtype, memory_format=self.memory_format)

    def hold_places(self, module: nn.Module) -> None:
        """Give a module tensors of this device and type without values, in place.

        Of fake tensors torch 2.11 changes none in a module: `to` and `to_empty` raise.
        """
        for part in module.modules():
            own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            for name, tensor in own:
                dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
                place = torch.empty_like(tensor, device=self.device, dtype=dtype)
                is_weight = isinstance(tensor, nn.Parameter)
                setattr(part, name, nn.Parameter(place) if is_weight else place)


def draw_weights(
    model: nn.Module,
    weights: Weights,
    *,
    initialize: Callable[[nn.Module], object] | None = None,
) -> None:
    """Draw the weights of a model that is on the meta device, in place.

    One seed gives one set of fp32 numbers on devices of one kind, and in other types these numbers
    rounded. The caller's random generators are left as they were.

    Args:
        model: Made under ``torch.device("meta")``.
        weights: What they are to be.
        initialize: Sets the weights of a module, after those of its children; None draws what the
            module's own constructor would have drawn.
    """
    device = torch.device(weights.device)
    with _drawing_by(weights.seed, device), torch.no_grad():
        for part in _parts(model):
            if weights.seed is None:
                weights.hold_places(part)
                continue
            part.to_empty(device=device)
            part.apply(initialize or _reset)
            weights.place(part)
    _fill_buffers(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    undrawn = [name for name, tensor in tensors if tensor.is_meta]
    assert not undrawn, f"these weights are in no part of the model: {undrawn}"


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The largest parts without a list of parts inside: blocks of a large model, or less."""
    if any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
        for child in module.children():
            yield from _parts(child)
    else:
        yield module


def _reset(module: nn.Module) -> None:
    if next(module.parameters(recurse=False), None) is not None:
        module.reset_parameters()


def _fill_buffers(model: nn.Module) -> None:
    """Buffers are computed, not drawn; the sub-models have one kind, the positions 0, 1, 2, ..."""
    for name, buffer in model.named_buffers():
        assert name.endswith("position_ids"), f"nobody has said what the buffer {name} holds"
        buffer.copy_(torch.arange(buffer.shape[-1], device=buffer.device))


@contextlib.contextmanager
def _drawing_by(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw by a seed on this device and leave the caller's random generators as they were."""
    if seed is None:
        yield
    elif device.type == "cuda":
        with torch.cuda.device(device), torch.random.fork_rng(devices=[device]):
            torch.cuda.manual_seed(seed)  # of this GPU only, unlike torch.manual_seed
            yield
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
