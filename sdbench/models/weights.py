"""The number formats of weights, and what fills a model: `draw_weights` and `load_weights`.

A model is made on the meta device, which holds shapes only, and cannot be computed with. Each part
is drawn in fp32, and moved to its final device and type before the next one. On a CPU all threads
draw, each a block of a tensor: one core draws the 1.29 billion weights of SD2 in 4 s, and takes a
fifth of that more to set them to NaN before and to look for NaN afterwards.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sdbench.base.errors import ConfigError, RunError
from sdbench.models.low_bit import other_buffers, reduce_bits
from sdbench.models.stored import StoredWeight

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
                is_float = tensor.is_floating_point()
                dtype = self.dtype if is_float else tensor.dtype
                nothing = math.nan if is_float else 0
                place = torch.full_like(tensor, nothing, device=self.device, dtype=dtype)
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
                fill_with_nan(part, device)
                pointers = (weight.data_ptr() for weight in part.parameters())
                by_blocks.first_blocks = dict(zip(pointers, numbers, strict=True))
                part.apply(initialize or _reset)
                check_filled(part)
            weights.place(part)
    _share(model, shared)
    others = _fill_position_ids(model)
    if fill_buffers is not None:
        fill_buffers(model)
    else:
        assert not others, f"the content of these buffers is not known: {others}"


def load_weights(
    model: nn.Module, weights: Weights, stored: Mapping[str, StoredWeight], *, flag: str
) -> None:
    """Load the weights of a model that was made under ``torch.device("meta")``, in place.

    `stored` has them all, see `stored.compare_weights`. A ConfigError names one that is not finite,
    and a matrix of zeros, which a file has that got its length before its content.
    """
    shared, tensors = _shared_weights(model), {}
    with contextlib.ExitStack() as stack:
        files = {
            file: stack.enter_context(safe_open(file, "pt"))
            for file in {one.file for one in stored.values()}
        }
        for name, one in stored.items():
            # A copy: the tensor itself is the content of the file, whatever becomes of it.
            tensors[name] = files[one.file].get_tensor(one.name).to(torch.float32, copy=True)
            check_content(tensors[name], one.name, file=one.file, flag=flag)
    for first, *others in shared:
        tensors |= dict.fromkeys(others, tensors[first])
    model.load_state_dict(tensors, assign=True)
    _share(model, shared)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    others = set(_fill_position_ids(model)) - stored.keys()
    assert not others, f"the content of these buffers is not known: {others}"
    weights.place(model)


def check_content(tensor: torch.Tensor, name: str, *, file: Path, flag: str) -> None:
    """Raise a ConfigError for a weight of a file that no training can have left like this."""
    if not tensor.numel():
        return
    smallest, largest = (end.item() for end in torch.aminmax(tensor))
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        what = "is not finite"
    elif tensor.ndim > 1 and smallest == largest == 0:
        what = "is a matrix of zeros, as in a file whose content has not come"
    else:
        return
    raise ConfigError(
        f"the weight {name} {what}",
        value=str(file),
        allowed="weights of a trained model: copy or download the file again",
        flag=flag,
    )


def own_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model, where a weight that has several names is there by the first."""
    others = {name for _, *more in _shared_weights(model) for name in more}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in others}


def fill_with_nan(module: nn.Module, device: str | torch.device) -> None:
    """Give a module memory on a device, in which each weight is NaN until something sets it."""
    module.to_empty(device=device)
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(math.nan)


def check_filled(module: nn.Module) -> None:
    """Raise a RunError for a weight that nothing has set since `fill_with_nan`."""
    for name, weight in module.named_parameters():
        if weight.numel() and weight.detach().aminmax().min.isnan():
            raise RunError(
                f"the weight {name} of a {type(module).__name__} was not drawn: the library does "
                "not initialise it as this suite expects"
            )


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


def _share(model: nn.Module, shared: list[list[str]]) -> None:
    """Give weights the names of `_shared_weights` again."""
    for first, *others in shared:
        for owner, _, name in (other.rpartition(".") for other in others):
            setattr(model.get_submodule(owner), name, model.get_parameter(first))


def _fill_position_ids(model: nn.Module) -> list[str]:
    """Fill the buffers of transformers that are 0, 1, 2, ...; return the names of the others."""
    buffers = other_buffers(model)
    others = [name for name in buffers if not name.endswith("position_ids")]
    for name in buffers.keys() - set(others):
        buffers[name].copy_(torch.arange(buffers[name].shape[-1], device=buffers[name].device))
    return others


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
