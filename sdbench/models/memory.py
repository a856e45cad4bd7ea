"""An estimate of the peak memory of one rank.

A training step is replayed on torch's fake tensors, without memory or arithmetic, and every
allocation is counted. One replay gives the peak for any micro-batch: after each operation a
constant number of bytes is live (gradients, weight copies), plus a number per image (activations).

A replay takes seconds, so it is kept in the cache on disk, by step, code and libraries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sdbench.base.cache import private_folder
from sdbench.base.files import new_file
from sdbench.models.architecture import Architecture
from sdbench.models.blocks import SHARDED_BLOCKS, checkpoint_activations
from sdbench.models.stable_diffusion import StableDiffusion, build_stable_diffusion

BYTES_PER_GIB = 2**30

# Larger than the prime factors of usual tensor sizes (2, 3, 5; 7 and 11 of 77 tokens).
PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47)

# Resident size of Python with torch, composer, streaming, diffusers and transformers imported,
# measured with torch 2.7.0: 0.74 GiB, and 0.81 with oneDNN's and OpenMP's after a step of `tiny`.
CPU_PROCESS_GIB = 0.78
# Not measured: about 0.5 GiB for a CUDA context and as much for workspaces of cuBLAS and cuDNN.
GPU_PROCESS_GIB = 1.0

# Not measured: share of a step's memory that CUDA's caching allocator reserves and does not use.
CUDA_FRAGMENTATION = 0.05

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
class MemoryEstimate:
    """Peak memory of one rank by use, in GiB.

    Attributes:
        process: Libraries on a CPU; CUDA context and workspaces on a GPU.
        unet_weights: Trained weights.
        encoder_weights: Frozen weights of VAE and text encoder.
        optimizer_state: The two moments of Adam, and master weights.
        ema: Averaged copy of the trained weights.
        gradients: Gradients at the time of the peak, with DDP's copy of them.
        activations: What grows with the micro-batch, at the time of the peak.
        temporaries: The rest at that time: weights cast by autocast, the optimizer's temporaries,
            and what CUDA's allocator reserves and does not use.
        phase: Phase of the peak: encoders, backward or optimizer.
    """

    process: float
    unet_weights: float
    encoder_weights: float
    optimizer_state: float
    ema: float
    gradients: float
    activations: float
    temporaries: float
    phase: str

    @property
    def total_gib(self) -> float:
        """Sum of all parts."""
        return sum(value for _, value in self._parts())

    def describe(self) -> str:
        """The parts as text, largest first."""
        parts = sorted(self._parts(), key=lambda part: -part[1])
        return ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in parts)

    def _parts(self) -> list[tuple[str, float]]:
        return [
            (field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name != "phase"
        ]


@dataclass(frozen=True)
class _StepProfile:
    """Bytes of a replayed step beyond its weights.

    Attributes:
        timeline: After each operation the live bytes whatever the micro-batch (weight copies,
            gradients), the live bytes per image, and the bytes of complete gradients, which are
            part of the first number.
        unet_start: Index of the U-Net's first operation.
        unet_weights: Bytes of the trained weights, and so of all their gradients.
        encoder_weights: Bytes of the frozen weights.
        gathered_weights: Bytes of the trained weights that are whole at once under FSDP: those
            outside of blocks and those of two blocks, one of which is being gathered.
    """

    timeline: list[tuple[int, int, int]]
    unet_start: int
    unet_weights: int
    encoder_weights: int
    gathered_weights: int


class _AllocationLog(TorchDispatchMode):
    """Logs the bytes of all live tensors that the step has allocated after each operation."""

    def __init__(self, existing: list[torch.Tensor], *, num_images: int) -> None:
        """Begin a log.

        Args:
            existing: Tensors that are not counted.
            num_images: Images of the step; tensors whose size it divides count as theirs.
        """
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
        """Add a complete gradient; a hook for parameters."""
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


def estimate_peak_memory(
    architecture: Architecture,
    *,
    image_size: int,
    micro_batch: int,
    precision: str,
    encoder_dtype: str,
    attention: str,
    optimizer: str,
    use_ema: bool,
    num_ranks: int,
    device_type: str,
    latents: str,
    num_microbatches: int = 1,
    encoder_batch: int | None = None,
    activation_checkpointing: str = "none",
    master_weights: bool = False,
    gradient_as_bucket_view: bool = False,
    sharding: str = "none",
    num_sharing_ranks: int = 1,
) -> MemoryEstimate:
    """Estimate the peak memory of one rank in training with AdamW.

    Args:
        architecture: The model.
        image_size: Side of the square image in pixels.
        micro_batch: Images per forward pass.
        precision: One of `PRECISIONS`.
        encoder_dtype: One of `ENCODER_DTYPES`.
        attention: `eager`, which keeps the attention matrices, or any other, which does not.
        optimizer: `adamw` or `adamw_fused`.
        use_ema: Whether a moving average of the trained weights is kept, in fp32.
        num_ranks: With more than one, DDP holds a second copy of the gradients in its buckets.
        device_type: `cpu` or `cuda`.
        latents: `online` (encoders in the step) or `precomputed`.
        num_microbatches: Forward passes per optimizer step; with more than one the gradients
            outlive the backward pass.
        encoder_batch: Images per call of the encoders ahead of the micro-batches; None: the
            encoders run in each micro-batch.
        activation_checkpointing: One of those of `blocks.checkpoint_activations`.
        master_weights: Whether the optimizer holds fp32 copies of the weights.
        gradient_as_bucket_view: Whether gradients are views of DDP's buckets.
        sharding: `none`, `zero1`, `grad_op`, `full` or `hybrid`; measured with `tiny` only.
        num_sharing_ranks: Ranks that hold one copy of the sharded state together.

    Returns:
        The peak by its parts.
    """
    on_cuda = device_type == "cuda"
    profile = _profile_step(
        architecture,
        image_size=image_size,
        precision=precision,
        encoder_dtype=encoder_dtype,
        attention=attention,
        on_cuda=on_cuda,
        online=latents == "online",
        activation_checkpointing=activation_checkpointing,
    )
    weights = profile.unet_weights
    constant, slope, complete = torch.tensor(profile.timeline).T
    num_images = torch.full_like(slope, micro_batch)
    if encoder_batch is not None:
        num_images[: profile.unet_start] = encoder_batch
    activations = num_images * slope

    def moment(index: int, gradients: float) -> _Moment:
        return _Moment(
            phase="encoders" if index < profile.unet_start else "backward",
            gradients=gradients,
            activations=float(activations[index]),
            temporaries=float(constant[index] - complete[index]),
        )

    index = int((constant + activations).argmax())
    moments = [moment(index, float(complete[index]))]
    # Gradients of an earlier micro-batch are there from the start. On a CPU the gradients cannot
    # use the memory that activations free: the C library's heap holds it in pieces of other sizes.
    # Measured with glibc, sd2-base at 256 px, micro-batches 2 and 8, fp32 and amp_bf16: resident
    # memory peaks at all gradients plus the largest rest, to 4 %.
    if num_microbatches > 1 or not on_cuda:
        moments.append(moment(int((constant + activations - complete).argmax()), weights))
    update = weights if on_cuda and optimizer == "adamw" else 0.0
    # With master weights the optimizer holds fp32 copies of bf16 weights, and of all gradients at
    # once while it steps.
    state_weights = 2 * weights if master_weights else weights
    moments.append(
        _Moment(
            phase="optimizer",
            gradients=weights,
            activations=0.0,
            # On CUDA torch's default AdamW (foreach) holds the square root of the whole second
            # moment; on a CPU it takes one tensor at a time, and the fused kernel needs nothing.
            temporaries=update + (state_weights if master_weights else 0.0),
        )
    )
    peak = max(moments, key=lambda moment: moment.num_bytes)
    fragmentation = CUDA_FRAGMENTATION if on_cuda else 0.0
    lost = fragmentation * (peak.activations + peak.temporaries)
    shared = num_sharing_ranks if sharding != "none" else 1
    is_fsdp = sharding not in ("none", "zero1")
    bucket_gradients = weights if num_ranks > 1 and not (gradient_as_bucket_view or is_fsdp) else 0
    held_weights, gradients = float(weights), peak.gradients + bucket_gradients
    if is_fsdp:
        # grad_op gathers all weights for the whole step, the others a block at a time.
        gathered = weights if sharding == "grad_op" else profile.gathered_weights
        held_weights = weights / shared + gathered
        # Over several micro-batches FSDP adds up unsharded gradients.
        if num_microbatches == 1:
            gradients = peak.gradients / shared + profile.gathered_weights
    # Adam's means of the gradient and of its square, and master weights.
    state = (2 + master_weights) * state_weights
    ema_weights = weights * 2 if precision == "bf16" else weights
    return MemoryEstimate(
        process=GPU_PROCESS_GIB if on_cuda else CPU_PROCESS_GIB,
        unet_weights=held_weights / BYTES_PER_GIB,
        encoder_weights=profile.encoder_weights / BYTES_PER_GIB,
        optimizer_state=state / shared / BYTES_PER_GIB,
        ema=use_ema * ema_weights / shared / BYTES_PER_GIB,
        gradients=gradients / BYTES_PER_GIB,
        activations=peak.activations / BYTES_PER_GIB,
        temporaries=(peak.temporaries + lost) / BYTES_PER_GIB,
        phase=peak.phase,
    )


@dataclass(frozen=True)
class _Moment:
    """Bytes at one time of a step beyond what is always there."""

    phase: str
    gradients: float
    activations: float
    temporaries: float

    @property
    def num_bytes(self) -> float:
        return self.gradients + self.activations + self.temporaries


@functools.cache
def _profile_step(architecture: Architecture, **options: Any) -> _StepProfile:
    """Replay a step, or read the replay that an earlier process has kept."""
    path = private_folder("replayed-steps") / f"{_fingerprint(architecture, options)}.json"
    try:
        return _StepProfile(**json.loads(path.read_text()))
    except (OSError, ValueError):  # not there, or cut off
        profile = _replay_step(architecture, **options)
    with contextlib.suppress(OSError), new_file(path) as new:  # a full or read-only disk
        new.write_text(json.dumps(dataclasses.asdict(profile)))
    return profile


def _fingerprint(architecture: Architecture, options: dict[str, Any]) -> str:
    """Hash of all that a replay depends on: the step, this code, and the libraries."""
    parts = (architecture.unet, architecture.vae, architecture.text_encoder, architecture.scheduler)
    modules = (torch, diffusers, transformers)
    versions = [sys.version, *(module.__version__ for module in modules)]
    digest = hashlib.sha256(repr((parts, architecture.tokenizer, options, versions)).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _replay_step(
    architecture: Architecture,
    *,
    image_size: int,
    precision: str,
    encoder_dtype: str,
    attention: str,
    on_cuda: bool,
    online: bool,
    activation_checkpointing: str,
) -> _StepProfile:
    with FakeTensorMode():
        model = build_stable_diffusion(
            # Without the weights of a folder, which are not needed.
            dataclasses.replace(architecture, weights_folder=None),
            seed=None,
            precision=precision,
            encoder_dtype=encoder_dtype,
            memory_format="contiguous",
            # All fused kernels keep the same tensors, and a GPU's take no fake CPU tensors.
            attention="eager" if attention == "eager" else "sdpa",
            encoders=online,
        )
        # Recomputation in the backward pass does not see the modes that are active around it.
        rules = _CudaAutocastRules if on_cuda else None
        checkpoint_activations(model.unet, which=activation_checkpointing, recompute=rules)
        num_images = _choose_num_images(model)
        make_batch = functools.partial(
            _make_batch, architecture, num_images=num_images, image_size=image_size, online=online
        )
        timeline, unet_start = _replay(model, make_batch, num_images=num_images, on_cuda=on_cuda)
        unet_weights, all_weights = _num_bytes(model.unet), _num_bytes(model)
        gathered_weights = _num_gathered_bytes(model.unet)
    return _StepProfile(
        timeline=timeline,
        unet_start=unet_start,
        unet_weights=unet_weights,
        encoder_weights=all_weights - unet_weights,
        gathered_weights=gathered_weights,
    )


def _choose_num_images(model: StableDiffusion) -> int:
    """Images of the replayed step: a prime that divides the size of no weight.

    It divides the size of every tensor that grows with the images, and of none that is as large as
    a weight (a gradient, a copy in another type).
    """
    sizes = {tensor.numel() for tensor in (*model.parameters(), *model.buffers())}
    return next(prime for prime in PRIMES if all(size % prime for size in sizes))


def _replay(
    model: StableDiffusion,
    make_batch: Callable[[], dict[str, torch.Tensor]],
    *,
    num_images: int,
    on_cuda: bool,
) -> tuple[list[tuple[int, int, int]], int]:
    """Run one step on fake tensors; return `timeline` and `unet_start` of its profile."""
    log = _AllocationLog([*model.parameters(), *model.buffers()], num_images=num_images)
    unet_starts: list[int] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(log.gradient_ready)
        for parameter in model.unet.parameters()
    ]
    handles.append(
        model.unet.register_forward_pre_hook(lambda *_: unet_starts.append(len(log.timeline)))
    )
    rules = _CudaAutocastRules() if on_cuda else contextlib.nullcontext()
    with log, rules:
        model.loss(*model(make_batch())).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return log.timeline, unet_starts[0]


def _make_batch(
    architecture: Architecture, *, num_images: int, image_size: int, online: bool
) -> dict[str, torch.Tensor]:
    num_tokens = architecture.text_encoder["max_position_embeddings"]
    if online:
        image_shape = (num_images, architecture.vae["in_channels"], image_size, image_size)
        return {
            "image": torch.empty(image_shape, dtype=torch.uint8),
            "input_ids": torch.empty(num_images, num_tokens, dtype=torch.int64),
        }
    latent_size = image_size // architecture.latent_factor
    latent_shape = (num_images, architecture.unet["in_channels"], latent_size, latent_size)
    width = architecture.unet["cross_attention_dim"]
    return {
        "latent_mean": torch.empty(latent_shape),
        "latent_logvar": torch.empty(latent_shape),
        "text_embedding": torch.empty(num_images, num_tokens, width),
    }


def _num_gathered_bytes(unet: torch.nn.Module) -> int:
    sizes = [_num_bytes(module) for module in unet.modules() if isinstance(module, SHARDED_BLOCKS)]
    return _num_bytes(unet) - sum(sizes) + 2 * max(sizes)


def _num_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
