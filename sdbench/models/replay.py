"""`profile_step` and `count_flops`: the memory and the arithmetic of a training step.

A step is replayed on torch's fake tensors, without memory or arithmetic, and every allocation is
counted. Both take seconds and are cached on disk by step, code and libraries. torch's own
`MemTracker` gives the peak of one micro-batch alone: it would replay each, twelve times slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch
import transformers
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from sdbench.base.cache import private_folder
from sdbench.base.conditions import NUM_SIZES, SIZES
from sdbench.base.errors import ConfigError
from sdbench.base.files import new_file
from sdbench.base.shape import Shape
from sdbench.models.architecture import Architecture
from sdbench.models.autoencoder import Autoencoder, build_autoencoder
from sdbench.models.blocks import checkpoint_activations
from sdbench.models.diffusion import DiffusionModel, build_model
from sdbench.models.lora import Lora
from sdbench.settings.recipe import EngineConfig
from sdbench.settings.training import DENOISER

REPLAYS_FOLDER = "replayed-steps"
# What `profile_step` finds, by `key_of` the steps, where a program takes it from an earlier time.
KNOWN: dict[str, dict[str, Any]] = {}

# Larger than the prime factors of usual tensor sizes (2, 3, 5; 7 and 11 of 77 tokens).
PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47)

# torch's autocast computes these in fp32 on CUDA (its documentation: "CUDA Ops that can autocast to
# float32"), and in the type of their input on a CPU.
FP32_ON_CUDA = frozenset(
    {
        torch.nn.functional.group_norm,
        torch.nn.functional.layer_norm,
        torch.nn.functional.softmax,
        torch.group_norm,
        torch.layer_norm,
        torch.softmax,
        torch.Tensor.softmax,
    }
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step, as far as it decides which tensors are allocated and what is computed.

    The fields are arguments of `build_model` and `blocks.checkpoint_activations`, or:

    Attributes:
        on_cuda: Whether to allocate as on CUDA.
        encodes_images: Whether images are encoded in the step, and captions with them.
        trained: `DENOISER`, with or without ``text_encoder``; or only ``vae``.
        learns_token: Only a new token of ``text_encoder`` and LoRA are trained, in fp32.
    """

    architecture: Architecture
    shape: Shape
    precision: str = "fp32"
    encoder_dtype: str = "fp32"
    attention: str = "sdpa"
    vae_attention: str = "sdpa"
    on_cuda: bool = False
    encodes_images: bool = True
    trained: tuple[str, ...] = (DENOISER,)
    lora: Lora | None = None
    frozen_bits: str = "same"
    learns_token: bool = False
    activation_checkpointing: str = "none"

    @staticmethod
    def of(
        config: EngineConfig,
        architecture: Architecture,
        *,
        on_cuda: bool,
        shape: Shape | None = None,
    ) -> Step:
        """The step of a run; its LoRA is checked when the step is replayed or counted.

        `shape` is that of the pictures; None: the square.
        """
        return Step(
            architecture=architecture,
            shape=shape or Shape.square(config.image_size),
            precision=config.precision,
            encoder_dtype=config.encoder_dtype,
            attention=config.attention,
            vae_attention=config.attention_of_vae,
            on_cuda=on_cuda,
            encodes_images=config.step_has_encoders and not config.has_subject,
            trained=config.trained_parts,
            lora=Lora.of(config, architecture),
            frozen_bits=config.frozen_bits,
            learns_token=config.learned_token is not None,
            activation_checkpointing=config.activation_checkpointing,
        )

    @property
    def encodes_captions(self) -> bool:
        """Whether captions are encoded in the step."""
        return self.encodes_images or "text_encoder" in self.trained


@dataclass(frozen=True)
class StepProfile:
    """Memory of a training step in bytes.

    Attributes:
        timeline: After each operation the live bytes that do not depend on the micro-batch (weight
            copies, gradients), the live bytes per image, and the bytes of complete gradients, which
            are part of the first number. The weights are not counted. Without the operations after
            which no micro-batch can have its peak.
        trained_start: Index of the first operation of a trained sub-model.
        trained_sizes: How many numbers each trained weight has.
        frozen_weights: Those of all sub-models, and all buffers.
        frozen_beside: Frozen weights beside LoRA, included in `frozen_weights`.
        gathered_weights: Trained weights that FSDP gathers at the same time: those outside of
            blocks, and two blocks, one of which is gathered ahead.
        gathered_beside: The same of the frozen weights beside LoRA.
    """

    timeline: list[tuple[int, int, int]]
    trained_start: int
    trained_weights: int
    trained_sizes: list[int]
    frozen_weights: int
    frozen_beside: int
    gathered_weights: int
    gathered_beside: int


class _AllocationLog(TorchDispatchMode):
    """Logs, after each operation, the bytes of live tensors that the step has allocated."""

    def __init__(self, existing: list[torch.Tensor], *, num_images: int) -> None:
        """Begin a log; a tensor whose size `num_images` divides is counted per image."""
        super().__init__()
        self.timeline: list[tuple[int, int, int]] = []
        self.gradient_bytes = 0
        self._num_images = num_images
        self._constant_bytes = self._bytes_per_image = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in existing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        self.timeline.append((self._constant_bytes, self._bytes_per_image, self.gradient_bytes))
        return result

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Count the gradient of a parameter."""
        self.gradient_bytes += parameter.grad.nbytes

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        bytes_per_image, rest = divmod(storage.nbytes(), self._num_images)
        sizes = (storage.nbytes(), 0) if rest else (0, bytes_per_image)
        self._change(*sizes)
        weakref.finalize(storage, self._change, *(-size for size in sizes))

    def _change(self, constant_bytes: int, bytes_per_image: int) -> None:
        self._constant_bytes += constant_bytes
        self._bytes_per_image += bytes_per_image


class _CudaAutocastRules(TorchFunctionMode):
    """Makes autocast on fake CPU tensors allocate as on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FP32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs))
        return func(*args, **kwargs)


@functools.cache
def profile_step(step: Step) -> StepProfile:
    """Replay a training step, or take the replay of an earlier process from the cache."""
    found = KNOWN.get(key_of(step)) if KNOWN else None
    if found is None:
        found = remember("memory", step, lambda: dataclasses.asdict(_replay_step(step)))
    return StepProfile(**found)


def key_of(step: Step) -> str:
    """Hash of a step, whatever code replays it, and wherever the model comes from."""
    return hashlib.sha256(repr(step).encode()).hexdigest()[:16]


def remember(what: str, step: Step, find: Callable[[], Any]) -> Any:
    """What is found for a step, in JSON's types; from the cache if an earlier process found it."""
    try:
        folder = private_folder(REPLAYS_FOLDER)
    except ConfigError:  # the plan notes it
        return find()
    path = folder / f"{what}-{_fingerprint(step, find)}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or cut off
        found = find()
    with contextlib.suppress(OSError), new_file(path) as new:  # a full or read-only disk
        new.write_text(json.dumps(found))
    return found


def _fingerprint(step: Step, find: Callable[[], Any]) -> str:
    """Hash of what a replay depends on: the step, this code, and the libraries.

    It does not depend on where the weights come from, which the repr of an architecture leaves out.
    """
    modules = (torch, diffusers, transformers, peft)
    versions = [sys.version, *(module.__version__ for module in modules)]
    digest = hashlib.sha256(repr((step, versions)).encode())
    digest.update(Path(find.__code__.co_filename).read_bytes())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def build_replayed(step: Step, *, device: str) -> DiffusionModel | Autoencoder:
    """The model of a step without weights, on the meta device or of fake tensors."""
    # All fused kernels keep the same tensors, and those of GPUs take no fake CPU tensors.
    attention, vae_attention = (
        kind if kind in ("eager", "by_shape") else "sdpa"
        for kind in (step.attention, step.vae_attention)
    )
    alike: dict[str, Any] = {"seed": None, "precision": step.precision, "device": device}
    if "vae" in step.trained:
        return build_autoencoder(step.architecture, kl_weight=1.0, attention=vae_attention, **alike)
    model = build_model(
        step.architecture,
        encoder_dtype=step.encoder_dtype,
        attention=attention,
        vae_attention=vae_attention,
        encoders=step.encodes_captions,
        trained=step.trained,
        lora=step.lora,
        frozen_bits=step.frozen_bits,
        initial_token_id=0 if step.learns_token else None,
        **alike,
    )
    if not step.encodes_images:
        model.vae = None
    # Recomputation in the backward pass does not see the modes that are active around it.
    rules = _CudaAutocastRules if step.on_cuda else None
    checkpoint_activations(
        model.denoiser,
        which=step.activation_checkpointing,
        transformers=model.network.transformers,
        recompute=rules,
    )
    return model


@functools.cache
def count_flops(step: Step) -> int:
    """Count matrix products and convolutions of a step on one image, without computing them.

    A multiply-add counts as two. Number formats, kernels and recomputation do not change the count;
    weights that need no gradients add no work for them.
    """
    # On the meta device attention is two matrix products. For fused attention torch's counter gives
    # zero on a CPU; on a GPU it includes the recomputation of flash attention.
    plain = make_plain(step)
    return remember("flops", plain, lambda: _count_flops(plain))


def make_plain(step: Step) -> Step:
    """The step in fp32 with torch's attention, nothing recomputed."""
    return dataclasses.replace(
        step,
        **{"precision": "fp32", "encoder_dtype": "fp32", "activation_checkpointing": "none"},
        **{"attention": "sdpa", "vae_attention": "sdpa", "on_cuda": False, "frozen_bits": "same"},
    )


def _count_flops(step: Step) -> int:
    model = build_replayed(step, device="meta")
    with torch.device("meta"):
        batch = make_batch(step, num_images=1)
    with FlopCounterMode(display=False) as counter:
        model.loss(*model(batch)).backward()
    return counter.get_total_flops()


class _FakeCpuMode(FakeTensorMode):
    """Fake tensors on the CPU.

    Where torch finds no GPU, `FakeTensorMode` puts a stand-in in the place of CUDA's device guard.
    In torch 2.11 the stand-in is freed with the thread that entered the mode first, and the
    next one to enter ends the process (pytorch/pytorch#178950). `sdbench doctor` uses threads.
    """

    avoid_device_init = False


def _replay_step(step: Step) -> StepProfile:
    with _FakeCpuMode():
        model = build_replayed(step, device="cpu")
        modules = [model.get_submodule(name) for name in step.architecture.modules_of(step.trained)]
        whole, start = _replay(model, modules, step)
        sizes = [one.numel() for one in model.parameters() if one.requires_grad]
        trained_weights = _num_bytes(model, trained=True)
        find_peaks = functools.partial(
            _find_peaks, largest=trained_weights * max(sizes) // sum(sizes)
        )
        frozen, trained = find_peaks(whole[:start]), find_peaks(whole[start:])
        gathered = functools.partial(
            _num_gathered_bytes, kinds=step.architecture.family.load_network().sharded_blocks
        )
        return StepProfile(
            timeline=[*frozen, *trained],
            trained_start=len(frozen),
            trained_weights=trained_weights,
            trained_sizes=sizes,
            frozen_weights=_num_bytes(model, trained=False)
            + sum(buffer.nbytes for buffer in model.buffers()),
            frozen_beside=sum(_num_bytes(module, trained=False) for module in modules),
            gathered_weights=sum(gathered(module, trained=True) for module in modules),
            gathered_beside=sum(gathered(module, trained=False) for module in modules),
        )


def _find_peaks(
    timeline: Sequence[tuple[int, int, int]], *, largest: int
) -> list[tuple[int, int, int]]:
    """The moments at which some micro-batch has its peak; `largest` are the bytes of a gradient.

    Of the gradients that are complete, all are there, or at most one; or all are there from the
    beginning, so that they change no comparison.
    """
    kept: set[tuple[int, int, int]] = set()
    for constant in (
        lambda one: one[0],
        lambda one: one[0] - one[2] + min(one[2], largest),
        lambda one: one[0] - one[2],
    ):
        kept.update(_upper_envelope(timeline, constant))
    return [one for one in dict.fromkeys(timeline) if one in kept]


def _upper_envelope(
    timeline: Sequence[tuple[int, int, int]], constant: Callable[[tuple[int, int, int]], int]
) -> list[tuple[int, int, int]]:
    """The moments that have the most bytes for some number of images: constant + number x slope."""
    most: list[tuple[int, int, int]] = []
    for third in sorted(timeline, key=lambda one: (one[1], constant(one))):
        # The last one goes if this one has more for any number, or for each for which it had most.
        while most:
            second = most[-1]
            if constant(third) < constant(second):
                if len(most) == 1:
                    break
                first = most[-2]
                fell, falls = (constant(first) - constant(one) for one in (second, third))
                if falls * (second[1] - first[1]) > fell * (third[1] - first[1]):
                    break
            most.pop()
        most.append(third)
    return most


def _replay(
    model: Any, trained: Sequence[torch.nn.Module], step: Step
) -> tuple[list[tuple[int, int, int]], int]:
    """Run one step on fake tensors, and return `timeline` and `trained_start` of its profile."""
    weights = [*model.parameters(), *model.buffers()]
    # A prime that divides the size of no weight distinguishes tensors that are proportional to the
    # images from tensors of the size of a weight (a gradient, a copy in another type).
    num_images = next(
        prime for prime in PRIMES if all(weight.numel() % prime for weight in weights)
    )
    log = _AllocationLog(weights, num_images=num_images)
    starts: list[int] = []
    for module in trained:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(log.gradient_ready)
        module.register_forward_pre_hook(lambda *_: starts.append(len(log.timeline)))
    rules = _CudaAutocastRules() if step.on_cuda else contextlib.nullcontext()
    with log, rules:
        model.loss(*model(make_batch(step, num_images=num_images))).backward()
    # A trained VAE is not called as a whole, and nothing comes before it.
    return log.timeline, min(starts, default=0)


def make_batch(step: Step, *, num_images: int) -> dict[str, torch.Tensor]:
    """A batch of images or moments, and of captions or encoded captions."""
    architecture, shape = step.architecture, step.shape
    height, width = (side // architecture.latents.factor for side in (shape.height, shape.width))
    latent_shape = (num_images, architecture.latents.num_channels, height, width)
    num_channels = architecture.parts["vae"]["in_channels"]
    image_shape = (num_images, num_channels, shape.height, shape.width)
    moments = ("latent_mean", "latent_logvar")
    batch = {name: torch.empty(latent_shape) for name in moments}
    if step.encodes_images:
        batch = {"image": torch.empty(image_shape, dtype=torch.uint8)}
    if architecture.family.tells_sizes:
        batch[SIZES] = torch.empty(num_images, NUM_SIZES)
    if step.encodes_captions:
        for one in architecture.captions:
            batch[one.name] = torch.empty(num_images, one.num_tokens, dtype=torch.int64)
    else:
        for one in architecture.conditions:
            batch[one.name] = torch.empty(num_images, *one.shape)
    return batch


def _num_gathered_bytes(model: torch.nn.Module, *, kinds: Any, trained: bool) -> int:
    blocks = [module for module in model.modules() if isinstance(module, kinds)]
    sizes = [_num_bytes(block, trained=trained) for block in blocks]
    return _num_bytes(model, trained=trained) - sum(sizes) + 2 * max(sizes, default=0)


def _num_bytes(module: torch.nn.Module, *, trained: bool) -> int:
    return sum(
        parameter.nbytes for parameter in module.parameters() if parameter.requires_grad == trained
    )
