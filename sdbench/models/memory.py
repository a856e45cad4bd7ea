"""How much memory will one rank need at its peak?

The training step is replayed without memory or arithmetic, on torch's fake tensors, and every
allocation is counted. Allocations are linear in the micro-batch, so two replays (2 and 3 images)
give the peak for any size: at each moment a constant (gradients, weight copies) plus a slope times
the number of images (activations).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sdbench.models.architecture import Architecture
from sdbench.models.stable_diffusion import StableDiffusion, build_stable_diffusion

BYTES_PER_GIB = 2**30

# Resident size of Python with torch, composer, streaming, diffusers and transformers imported:
# measured 0.74 GiB with torch 2.7.0, 0.81 with oneDNN's and OpenMP's own after a step of `tiny`.
CPU_PROCESS_GIB = 0.78
# A CUDA context takes about 0.5 GiB, the workspaces of cuBLAS and cuDNN about as much again. Not
# calibrated: rounded from common experience.
GPU_PROCESS_GIB = 1.0

# Share of a step's memory that CUDA's caching allocator reserves beyond what is used. Not measured.
CUDA_FRAGMENTATION = 0.05

# torch's autocast on CUDA computes these in fp32 (its documentation: "CUDA Ops that can autocast to
# float32"); on a CPU they take what they are given.
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
    """Peak memory of one rank by what it is used for, in GiB.

    Attributes:
        process: Libraries on a CPU, context and libraries' workspaces on a GPU.
        unet_weights: Trained weights.
        encoder_weights: Frozen weights of VAE and text encoder.
        optimizer_state: The two moments of Adam.
        ema: Averaged copy of the trained weights.
        gradients: Held at the moment of the peak, with DDP's copy of them.
        activations: Everything that grows with the micro-batch, at the moment of the peak.
        temporaries: The rest of that moment: weights cast by autocast, the optimizer's temporaries,
            and what CUDA's allocator reserves beyond use.
        phase: Where the peak lies: encoders, backward or optimizer.
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
        """The parts in words, largest first."""
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
    """Bytes beyond the weights after each operation of a step: constant + slope x images.

    Attributes:
        constant: (operations,) live bytes whatever the micro-batch: weight copies, gradients.
        slope: (operations,) live bytes per image.
        gradients: (operations,) bytes of the gradients that are complete; part of `constant`.
        unet_start: Index of the first operation of the U-Net.
        unet_weights: Bytes of the trained weights, and so of all their gradients.
        encoder_weights: Bytes of the frozen weights.
    """

    constant: torch.Tensor
    slope: torch.Tensor
    gradients: torch.Tensor
    unet_start: int
    unet_weights: int
    encoder_weights: int


class _AllocationLog(TorchDispatchMode):
    """Notes the bytes of all live tensors, but for existing ones, after each operation."""

    def __init__(self, existing: list[torch.Tensor]) -> None:
        super().__init__()
        self.timeline: list[tuple[int, int]] = []
        self.gradient_bytes = 0
        self._live_bytes = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in existing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        self.timeline.append((self._live_bytes, self.gradient_bytes))
        return result

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Hook for a parameter whose gradient is complete."""
        self.gradient_bytes += parameter.grad.nbytes

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        num_bytes = storage.nbytes()
        self._live_bytes += num_bytes
        weakref.finalize(storage, self._subtract, num_bytes)

    def _subtract(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes


class _CudaAutocastRules(TorchFunctionMode):
    """Makes autocast on fake CPU tensors allocate as it would on CUDA."""

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
) -> MemoryEstimate:
    """Estimate the peak of a steady step with AdamW, weights replicated on each rank.

    Args:
        architecture: What is trained.
        image_size: Side of the square image in pixels.
        micro_batch: Images per forward pass.
        precision: One of `PRECISIONS`.
        encoder_dtype: One of `ENCODER_DTYPES`.
        attention: `sdpa` or `eager`, which keeps the attention matrices.
        optimizer: `adamw` or `adamw_fused`.
        use_ema: Whether an average of the trained weights is kept. Composer's EMA and torch's
            AveragedModel need the same: they work tensor by tensor or in place.
        num_ranks: With more than one, DDP keeps a second copy of the gradients, as Composer does
            not set gradient_as_bucket_view.
        device_type: `cpu`, where the process itself counts, or `cuda`.
        latents: `online` (encoders in the step) or `precomputed`.
        num_microbatches: Forward passes per optimizer step; with more than one the gradients
            outlive the backward pass.

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
    )
    weights = profile.unet_weights
    live = profile.constant + micro_batch * profile.slope
    moments = [_moment(profile, int(live.argmax()), micro_batch=micro_batch)]
    # Gradients of an earlier micro-batch are there from the start. On a CPU the gradients cannot
    # use what the activations leave: the C library's heap keeps it in pieces of other sizes.
    # Measured with glibc, sd2-base at 256 px, micro-batches 2 and 8, fp32 and amp_bf16: resident
    # memory peaks at all gradients plus the largest rest, to 4 %.
    if num_microbatches > 1 or not on_cuda:
        index = int((live - profile.gradients).argmax())
        moment = _moment(profile, index, micro_batch=micro_batch)
        moments.append(dataclasses.replace(moment, gradients=weights))
    moments.append(
        _Moment(
            phase="optimizer",
            gradients=weights,
            activations=0.0,
            # torch's AdamW walks over tensors on a CPU and its fused kernel needs nothing; on CUDA
            # the foreach default holds the square root of the whole second moment at once.
            temporaries=weights if on_cuda and optimizer == "adamw" else 0.0,
        )
    )
    peak = max(moments, key=lambda moment: moment.num_bytes)
    fragmentation = CUDA_FRAGMENTATION if on_cuda else 0.0
    lost = fragmentation * (peak.activations + peak.temporaries)
    bucket_gradients = weights if num_ranks > 1 else 0
    return MemoryEstimate(
        process=GPU_PROCESS_GIB if on_cuda else CPU_PROCESS_GIB,
        unet_weights=weights / BYTES_PER_GIB,
        encoder_weights=profile.encoder_weights / BYTES_PER_GIB,
        # Adam keeps the mean of the gradient and of its square, both in the weights' type.
        optimizer_state=2 * weights / BYTES_PER_GIB,
        ema=weights * use_ema / BYTES_PER_GIB,
        gradients=(peak.gradients + bucket_gradients) / BYTES_PER_GIB,
        activations=peak.activations / BYTES_PER_GIB,
        temporaries=(peak.temporaries + lost) / BYTES_PER_GIB,
        phase=peak.phase,
    )


@dataclass(frozen=True)
class _Moment:
    """Bytes held at one moment of a step beyond what is always there."""

    phase: str
    gradients: float
    activations: float
    temporaries: float

    @property
    def num_bytes(self) -> float:
        return self.gradients + self.activations + self.temporaries


def _moment(profile: _StepProfile, index: int, *, micro_batch: int) -> _Moment:
    gradients = float(profile.gradients[index])
    return _Moment(
        phase="encoders" if index < profile.unet_start else "backward",
        gradients=gradients,
        activations=micro_batch * float(profile.slope[index]),
        temporaries=float(profile.constant[index]) - gradients,
    )


@functools.cache
def _profile_step(
    architecture: Architecture,
    *,
    image_size: int,
    precision: str,
    encoder_dtype: str,
    attention: str,
    on_cuda: bool,
    online: bool,
) -> _StepProfile:
    """Replay a step with 2 and with 3 images; 1 is a special case in some of torch's kernels."""
    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        model = build_stable_diffusion(
            # Fake weights: those of a folder are not read.
            dataclasses.replace(architecture, weights_folder=None),
            seed=0,
            precision=precision,
            encoder_dtype=encoder_dtype,
            memory_format="contiguous",
            attention=attention,
            encoders=online,
        )
        runs = [
            _replay(
                model,
                functools.partial(
                    _make_batch,
                    architecture,
                    num_images=num_images,
                    image_size=image_size,
                    online=online,
                ),
                on_cuda=on_cuda,
            )
            for num_images in (2, 3)
        ]
        unet_weights, all_weights = _num_bytes(model.unet), _num_bytes(model)
    unet_start = runs[0][1]
    two, three = (torch.tensor(timeline) for timeline, _ in runs)
    assert two.shape == three.shape, "a step takes the same operations for 2 and 3 images"
    slope = three[:, 0] - two[:, 0]
    return _StepProfile(
        constant=two[:, 0] - 2 * slope,
        slope=slope,
        gradients=two[:, 1],
        unet_start=unet_start,
        unet_weights=unet_weights,
        encoder_weights=all_weights - unet_weights,
    )


def _replay(
    model: StableDiffusion, make_batch: Callable[[], dict[str, torch.Tensor]], *, on_cuda: bool
) -> tuple[list[tuple[int, int]], int]:
    """Run one step on fake tensors.

    Returns:
        Live bytes and bytes of gradients after each operation, and the index of the U-Net's first.
    """
    log = _AllocationLog([*model.parameters(), *model.buffers()])
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


def _num_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
