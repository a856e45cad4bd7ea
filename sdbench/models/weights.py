"""The number formats of weights, and `draw_weights`, which draws them part by part.

A model is made on the meta device, which holds shapes only. Each part is drawn in fp32, and moved
to its final device and type before the next one. On a CPU all threads draw, each a block of a
tensor: one core draws the 1.29 billion weights of SD2 in 4 s.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sdbench.models.low_bit import other_buffers, reduce_bits

# Values that a generator draws, 1 MiB in fp32: few enough for a core's cache, and so many that
# seeding a generator, 5 us, is little beside the 0.7 ms of drawing them.
BLOCK_SIZE = 2**18
# Bits of a seed that torch's CPU generator uses.
SEED_BITS = 32


@dataclass(frozen=True)
class NumberFormats:
    """Types of weights (trained ones, and frozen ones beside LoRA) and of autocast, if any."""

    weights: torch.dtype
    autocast: torch.dtype | None


PRECISIONS = {
    "fp32": NumberFormats(torch.float32, None),
    "tf32": NumberFormats(torch.float32, None),
    "amp_fp16": NumberFormats(torch.float32, torch.float16),
    "amp_bf16": NumberFormats(torch.float32, torch.bfloat16),
    "bf16": NumberFormats(torch.bfloat16, None),
}
ENCODER_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Torch's autocast to a type; None: no autocast."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Seed, device, type and layout of the weights of a model.

    Attributes:
        seed: Of random weights; None leaves weights uninitialised, for fake tensors.
        generator_device: Whose generator draws; None: `device`. The numbers depend on the kind of
            GPU.
        low_bit: Linear layers get this kind of `low_bit.reduce_bits` afterwards; None: no kind.
    """

    seed: int | None
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.preserve_format
    generator_device: str | torch.device | None = None
    low_bit: str | None = None

    def place(self, module: nn.Module) -> None:
        """Move a module to this device, type and layout, in place; only shapes without a seed."""
        if self.seed is None:
            self._place_shapes(module)
        else:
            # Not diffusers' `to`, which warns of modules to keep in fp32 although there are none.
            nn.Module.to(module, self.device, dtype=self.dtype, memory_format=self.memory_format)
        if self.low_bit is not None:
            reduce_bits(module, self.low_bit)

    def _place_shapes(self, module: nn.Module) -> None:
        # For fake tensors `to` and `to_empty` raise errors in torch 2.11.
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
    fill_buffers: Callable[[Any], object] | None = None,
) -> None:
    """Draw the weights of a model that was made under ``torch.device("meta")``, in place.

    Other types round the fp32 numbers that a seed gives. On a CPU these depend only on the seed,
    not on the number of threads, nor on the order in which a library draws, or on a weight that it
    draws twice; `architecture.DRAWING` is their version. The caller's random generators keep their
    state. `initialize` is called for each module after its children; None
    calls `reset_parameters`, as the module's constructor does. `fill_buffers` is called with the
    model, for buffers beside the `position_ids` of transformers.
    """
    shared, first_blocks = _shared_weights(model), _number_blocks(model)
    parts = list(_distinct_parts(model))
    ours = {id(weight) for part in parts for weight in part.parameters()}
    outside = [name for name, weight in model.named_parameters() if id(weight) not in ours]
    assert not outside, f"these weights are in no part of the model: {outside}"
    device = torch.device(weights.generator_device or weights.device)
    with contextlib.ExitStack() as drawing:
        drawing.enter_context(torch.no_grad())
        drawing.enter_context(seeded_generator(weights.seed, device))
        if weights.seed is not None:
            # The plan has set the number of threads of this rank.
            threads = drawing.enter_context(ThreadPoolExecutor(torch.get_num_threads()))
            by_blocks = drawing.enter_context(_DrawingByBlocks(weights.seed, threads))
        for part in parts:
            if weights.seed is not None:
                numbers = [first_blocks[weight] for weight in part.parameters()]
                part.to_empty(device=device)
                pointers = (weight.data_ptr() for weight in part.parameters())
                by_blocks.first_blocks = dict(zip(pointers, numbers, strict=True))
                part.apply(initialize or _reset)
            weights.place(part)
    for first, *others in shared:
        for owner, _, name in (other.rpartition(".") for other in others):
            setattr(model.get_submodule(owner), name, model.get_parameter(first))
    for name, buffer in other_buffers(model).items():
        if name.endswith("position_ids"):  # 0, 1, 2, ...
            buffer.copy_(torch.arange(buffer.shape[-1], device=buffer.device))
        else:
            assert fill_buffers is not None, f"the content of the buffer {name} is not known"
    if fill_buffers is not None:
        fill_buffers(model)


def initialize_text_encoder(encoder: Any) -> Callable[[nn.Module], object]:
    """What draws the modules of a text encoder of transformers, for `draw_weights`."""
    # T5's embedding and CLIP's projection are drawn, alone, when the whole model is asked for,
    # which is no part of `draw_weights`.
    own = [layer for layer in encoder.children() if isinstance(layer, (nn.Embedding, nn.Linear))]

    def initialize(module: nn.Module) -> None:
        encoder._init_weights(encoder if module in own else module)

    return initialize


def _shared_weights(model: nn.Module) -> list[list[str]]:
    """The names of each weight that has several, such as T5's embedding."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _number_blocks(model: nn.Module) -> dict[nn.Parameter, int]:
    """The number of the first block of each weight; the blocks are numbered by the weights' names.

    transformers 5 draws all linear layers alike, and those of its models a second time.
    """
    numbers, next_number = {}, 0
    for _, weight in sorted(model.named_parameters()):
        numbers[weight] = next_number
        next_number += math.ceil(weight.numel() / BLOCK_SIZE)
    return numbers


def _distinct_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Those of `_parts` that have other weights than the parts before them."""
    seen: set[nn.Parameter] = set()
    for part in _parts(model):
        own = set(part.parameters())
        if not own or not own <= seen:
            yield part
        seen |= own


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The largest sub-modules that hold no ModuleList, such as one attention or residual block."""
    if any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
        for child in module.children():
            yield from _parts(child)
    else:
        yield module


def _reset(module: nn.Module) -> None:
    if isinstance(module, RMSNorm):  # diffusers' own, whose constructor alone sets its weight
        module.weight.fill_(1.0)
    elif next(module.parameters(recurse=False), None) is not None:
        module.reset_parameters()


class _DrawingByBlocks(TorchDispatchMode):
    """Draws the CPU tensors within the block by blocks, in several threads.

    The blocks of all tensors are numbered, see `_number_blocks`. Each has its own generator, whose
    seed is a number of the model plus that of the block: no two blocks of a model share one.

    Attributes:
        first_blocks: The number of the first block of each tensor that may be drawn, by its memory.
    """

    def __init__(self, seed: int, threads: Executor) -> None:
        super().__init__()
        self.first_blocks: dict[int, int] = {}
        self._seed = random.Random(seed).getrandbits(SEED_BITS)
        self._threads = threads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        is_drawing = func in (aten.uniform_.default, aten.normal_.default)
        if not is_drawing or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        tensor, *distribution = args

        def draw(block: torch.Tensor, seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():  # which holds for one thread
                func(block, *distribution, **kwargs | {"generator": generator})

        blocks = tensor.detach().view(-1).split(BLOCK_SIZE)
        first = self._seed + self.first_blocks[tensor.data_ptr()]
        seeds = [(first + number) % 2**SEED_BITS for number in range(len(blocks))]
        if len(blocks) == 1:
            draw(blocks[0], seeds[0])  # or a thread would take longer to begin than to draw
        else:
            list(self._threads.map(draw, blocks, seeds))
        return tensor


@contextlib.contextmanager
def seeded_generator(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed the device's random generator, and restore its state after the block."""
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


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another `forward` in place; its weights, their names and its hooks stay.

    `kind` is derived from the module's class, without a constructor, which would not be run.
    """
    assert kind.__bases__ == (type(module),) and kind.__init__ is type(module).__init__
    module.__class__ = kind
