"""`estimate_peak_memory`: an estimate of the peak memory of one rank.

It is made from one replay of a training step for any micro-batch: after each operation a constant
number of bytes is live (gradients, weight copies), plus a number per image (activations).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from sdbench.base.units import BYTES_PER_GIB
from sdbench.models.architecture import Architecture
from sdbench.models.lora import Lora
from sdbench.models.replay import profile_step
from sdbench.settings.parallel import FSDP, GATHERED_ONCE

# Resident size of Python with torch, composer, streaming, diffusers and transformers imported,
# measured with torch 2.7.0: 0.74 GiB, and 0.81 with oneDNN's and OpenMP's after a step of `tiny`.
CPU_PROCESS_GIB = 0.78
# Not measured: about 0.5 GiB for a CUDA context and as much for workspaces of cuBLAS and cuDNN.
GPU_PROCESS_GIB = 1.0

# Not measured: share of a step's memory that CUDA's caching allocator reserves and does not use.
CUDA_FRAGMENTATION = 0.05


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of one rank by use, in GiB.

    Attributes:
        process: Libraries on a CPU; CUDA context and workspaces on a GPU.
        trained_weights: That get gradients.
        frozen_weights: Of the others in the step.
        optimizer_state: The two moments of Adam, and master weights.
        ema: Averaged copy of the trained weights.
        gradients: Gradients at the time of the peak, with DDP's copy of them.
        activations: Tensors that grow with the micro-batch, at the time of the peak.
        temporaries: Other tensors at that time: weights cast by autocast, the optimizer's
            temporaries, and memory that CUDA's allocator reserves and does not use.
        phase: Phase of the peak: encoders, backward or optimizer.
    """

    process: float
    trained_weights: float
    frozen_weights: float
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


def estimate_peak_memory(
    architecture: Architecture,
    *,
    image_size: int,
    micro_batch: int,
    precision: str,
    encoder_dtype: str,
    attention: str,
    vae_attention: str,
    optimizer: str,
    use_ema: bool,
    num_ranks: int,
    device_type: str,
    encoders: bool,
    trained: tuple[str, ...] = ("unet",),
    lora: Lora | None = None,
    learns_token: bool = False,
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
        attention: `eager`, which keeps the attention matrices, `by_shape`, which keeps the
            smaller ones, or another, which keeps none.
        vae_attention: As `attention`, in the VAE.
        optimizer: `adamw`, `adamw_fused` or `adamw_one_pass`.
        use_ema: Whether a moving average of the trained weights is kept, in fp32.
        num_ranks: With more than one, DDP holds a second copy of the gradients in its buckets.
        device_type: `cpu` or `cuda`.
        encoders: Whether images and captions are encoded in the step. Without, it has a text
            encoder only where that is trained.
        trained: The sub-models that are trained: ``unet``, with or without ``text_encoder``; or
            ``vae`` alone, without the others.
        lora: What is trained of them in place of their weights.
        learns_token: Only a new token of ``text_encoder`` is trained, in fp32.
        num_microbatches: Forward passes per optimizer step; with more than one the gradients
            outlive the backward pass.
        encoder_batch: Images per call of the encoders ahead of the micro-batches; None: the
            encoders run in each micro-batch.
        activation_checkpointing: One of those of `blocks.checkpoint_activations`.
        master_weights: Whether the optimizer holds fp32 copies of the weights.
        gradient_as_bucket_view: Whether gradients are views of DDP's buckets.
        sharding: A value of --sharding; measured with `tiny` only.
        num_sharing_ranks: Ranks that hold one copy of the sharded state together.

    Returns:
        The peak by its parts.
    """
    on_cuda = device_type == "cuda"
    profile = profile_step(
        architecture,
        trained=trained,
        lora=lora,
        learns_token=learns_token,
        image_size=image_size,
        precision=precision,
        encoder_dtype=encoder_dtype,
        attention=attention,
        vae_attention=vae_attention,
        on_cuda=on_cuda,
        online=encoders,
        activation_checkpointing=activation_checkpointing,
    )
    weights = profile.trained_weights
    constant, slope, complete = torch.tensor(profile.timeline).T
    num_images = torch.full_like(slope, micro_batch)
    if encoder_batch is not None:
        num_images[: profile.trained_start] = encoder_batch
    activations = num_images * slope

    def moment(index: int, gradients: float) -> _Moment:
        return _Moment(
            phase="encoders" if index < profile.trained_start else "backward",
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
    shared = num_sharing_ranks if sharding != "none" else 1
    is_fsdp = sharding in FSDP
    # With master weights the optimizer holds fp32 copies of bf16 weights, and of all gradients at
    # once while it steps, unless it makes one pass; FSDP's gradients are fp32 already.
    state_weights = 2 * weights if master_weights else weights
    has_copies = master_weights and optimizer != "adamw_one_pass" and not is_fsdp
    copied_gradients = state_weights / shared if has_copies else 0.0
    moments.append(
        _Moment(
            phase="optimizer",
            gradients=weights,
            activations=0.0,
            # On CUDA torch's default AdamW (foreach) holds the square root of the whole second
            # moment; on a CPU it takes one tensor at a time, and the fused kernel needs nothing.
            temporaries=update + copied_gradients,
        )
    )
    peak = max(moments, key=lambda moment: moment.num_bytes)
    fragmentation = CUDA_FRAGMENTATION if on_cuda else 0.0
    lost = fragmentation * (peak.activations + peak.temporaries)
    bucket_gradients = weights if num_ranks > 1 and not (gradient_as_bucket_view or is_fsdp) else 0
    held_weights, gradients = float(weights), peak.gradients + bucket_gradients
    frozen_weights = float(profile.frozen_weights)
    if is_fsdp:
        # The frozen weights beside LoRA are shared out as well. grad_op gathers all weights for the
        # whole step, the others a block at a time.
        beside = profile.frozen_beside
        gathers_all = sharding in GATHERED_ONCE
        # The shards of master weights count as state of the optimizer.
        shards = 0.0 if master_weights else weights / shared
        held_weights = shards + (weights if gathers_all else profile.gathered_weights)
        frozen_weights += beside / shared - beside
        frozen_weights += beside if gathers_all else profile.gathered_beside
        # Over several micro-batches FSDP adds up unsharded gradients.
        if num_microbatches == 1:
            of_shards = peak.gradients * (state_weights / weights)
            gradients = of_shards / shared + profile.gathered_weights
    # Adam's means of the gradient and of its square, and master weights.
    state = (2 + master_weights) * state_weights
    # The average is in fp32, as the weights of LoRA and of a token are.
    has_bf16 = precision == "bf16" and lora is None and not learns_token
    ema_weights = weights * 2 if has_bf16 else weights
    return MemoryEstimate(
        process=GPU_PROCESS_GIB if on_cuda else CPU_PROCESS_GIB,
        trained_weights=held_weights / BYTES_PER_GIB,
        frozen_weights=frozen_weights / BYTES_PER_GIB,
        optimizer_state=state / shared / BYTES_PER_GIB,
        ema=use_ema * ema_weights / shared / BYTES_PER_GIB,
        gradients=gradients / BYTES_PER_GIB,
        activations=peak.activations / BYTES_PER_GIB,
        temporaries=(peak.temporaries + lost) / BYTES_PER_GIB,
        phase=peak.phase,
    )


@dataclass(frozen=True)
class _Moment:
    """Bytes at one time of a step, without weights and state."""

    phase: str
    gradients: float
    activations: float
    temporaries: float

    @property
    def num_bytes(self) -> float:
        return self.gradients + self.activations + self.temporaries
