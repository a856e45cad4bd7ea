"""`estimate_peak_memory`: an estimate of the peak memory of one rank.

One replay of a training step serves any micro-batch: after each operation a constant number of
bytes is live (gradients, weight copies), plus a number per image (activations).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sdbench.base.units import BYTES_PER_GIB
from sdbench.models.replay import Step, StepProfile, profile_step
from sdbench.ranks.distributed import Ranks
from sdbench.settings.parallel import FSDP, GATHERED_ONCE, LOW_BIT_ADAMW, WITHIN_NODE
from sdbench.settings.recipe import EngineConfig

# Resident size of Python with libraries, and what oneDNN and OpenMP hold, by engine: the peak of
# `tiny` and of `small` without encoders less the estimate of the rest, measured with torch 2.7.0.
CPU_PROCESS_GIB = {"torch": 0.73, "composer": 0.80, "ray": 0.91}
# Not measured: about 0.5 GiB for a CUDA context and as much for workspaces of cuBLAS and cuDNN.
GPU_PROCESS_GIB = 1.0

# What an allocator holds and does not use, as a share of the activations (on CUDA with the
# temporaries) at the peak. On a CPU 1, the bound where the C library's heap uses nothing again of
# what is freed between activations: 0.86 and 0.88 were measured (LoRA on SDXL at 512 px in fp32).
# On CUDA not measured by itself: the only step without compiled code that was measured on a GPU,
# that of `seed` on an H200, had 0.12 more than its tensors; --device_train_microbatch_size auto
# leaves a tenth of the memory free besides.
CPU_MARGIN = 1.0
CUDA_MARGIN = 0.05

# torchao's `_AdamBase`: numbers in a block, and the size from which a state has blocks.
LOW_BIT_BLOCKS, MIN_LOW_BIT_SIZE = {8: 256, 4: 128}, 4096
# Bytes for each number of a weight while it is updated on a CPU, measured with 16.8 million: 8 bits
# are compiled; of 4 bits each operation has a result, and the search for codes several in int64.
LOW_BIT_UPDATE_BYTES = {8: 8, 4: 54}


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one rank by use at the time of its peak, in GiB.

    `process` is that of libraries on a CPU, of CUDA context and workspaces on a GPU. `temporaries`
    are weights cast by autocast, the optimizer's, and memory that an allocator holds and does not
    use. `phase` is encoders, backward or optimizer.
    """

    process: float
    trained_weights: float = 0.0
    frozen_weights: float = 0.0
    optimizer_state: float = 0.0
    ema: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    temporaries: float = 0.0
    phase: str

    @property
    def total_gib(self) -> float:
        """The peak."""
        return sum(self.parts().values())

    def describe(self) -> str:
        """The parts as text, largest first."""
        parts = sorted(self.parts().items(), key=lambda part: -part[1])
        return ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in parts)

    def parts(self) -> dict[str, float]:
        """The parts by name, in GiB."""
        return {name: value for name, value in vars(self).items() if name != "phase"}


class _Moment(NamedTuple):
    """Bytes at one time of a step, without weights and state."""

    phase: str
    gradients: float
    activations: float
    temporaries: float


def estimate_peak_memory(
    step: Step, config: EngineConfig, ranks: Ranks, *, micro_batch: int
) -> MemoryEstimate:
    """Estimate the peak memory of one rank in training with AdamW, by its parts.

    `config` has the settings of the run, of which --sharding was measured with `small` only.
    """
    profile, shards = profile_step(step), 1
    if config.sharding != "none":
        shards = ranks.local_world_size if config.sharding in WITHIN_NODE else ranks.world_size
    weights = float(profile.trained_weights)
    has_masters = config.master_weights == "fp32"
    state_weights = 2 * weights if has_masters else weights
    device_batch = config.batch_size // ranks.world_size
    adds_up = micro_batch < device_batch  # over several micro-batches
    num_encoded = micro_batch
    if step.encodes_images and config.encoder_batch_size != "microbatch":
        num_encoded = min(config.encoder_batch_size, device_batch)
    # With updates in the backward pass there is one gradient at a time, at most the largest.
    element_bytes = weights / sum(profile.trained_sizes)
    largest = element_bytes * max(profile.trained_sizes)
    is_early = config.update_in_backward
    is_fsdp = config.sharding in FSDP
    moments = _moments(
        profile,
        step,
        num_images=micro_batch,
        num_encoded=num_encoded,
        # From an earlier micro-batch, or in DDP's buckets.
        keeps_gradients=adds_up or (ranks.world_size > 1 and not is_fsdp),
        max_gradients=largest if is_early else weights,
        keeps_heap=not step.on_cuda and config.cpu_allocator != "return",
    )
    # On CUDA torch's default AdamW (foreach) holds the square root of the whole second moment; on a
    # CPU it takes one tensor at a time, and the fused kernel needs nothing.
    temporaries = weights if step.on_cuda and config.optimizer == "adamw" else 0.0
    # With master weights the optimizer holds fp32 copies of bf16 weights, and of all gradients at
    # once while it steps; FSDP's gradients are fp32 already.
    if has_masters and not is_fsdp:
        temporaries += 2 * (largest if is_early else weights / shards)
    if config.optimizer in LOW_BIT_ADAMW and not step.on_cuda:
        bits = LOW_BIT_ADAMW[config.optimizer]
        temporaries += LOW_BIT_UPDATE_BYTES[bits] * max(profile.trained_sizes)
    moments.append(
        _Moment(
            "optimizer",
            largest if is_early else weights,
            activations=0.0,
            temporaries=temporaries,
        )
    )
    peak = max(moments, key=lambda moment: sum(moment[1:]))
    lost = CUDA_MARGIN * (peak.activations + peak.temporaries) if step.on_cuda else 0.0
    held_weights, frozen_weights = weights, float(profile.frozen_weights)
    gradients = peak.gradients
    if is_fsdp:
        # The frozen weights beside LoRA are sharded as well. grad_op gathers all weights for the
        # whole step, the others a block at a time.
        beside = profile.frozen_beside
        gathers_all = config.sharding in GATHERED_ONCE
        # The shards of master weights count as state of the optimizer.
        held_weights = 0.0 if has_masters else weights / shards
        held_weights += weights if gathers_all else profile.gathered_weights
        frozen_weights += beside / shards - beside
        frozen_weights += beside if gathers_all else profile.gathered_beside
        if not adds_up:  # else FSDP adds up unsharded gradients
            of_shards = peak.gradients * (state_weights / weights)
            gradients = of_shards / shards + profile.gathered_weights
    elif ranks.world_size > 1 and not config.gradient_as_bucket_view:
        gradients += weights  # DDP's buckets
    # Adam's means of the gradient and of its square, and master weights.
    state = 2 * _state_bytes(profile, state_weights, config.optimizer)
    state += has_masters * state_weights
    # The average is in fp32, as the weights of LoRA and of a token are.
    has_bf16 = step.precision == "bf16" and step.lora is None and not step.learns_token
    ema = config.use_ema * (weights * 2 if has_bf16 else weights)
    sizes = {
        "trained_weights": held_weights,
        "frozen_weights": frozen_weights,
        "optimizer_state": state / shards,
        "ema": ema / shards,
        "gradients": gradients,
        "activations": peak.activations,
        "temporaries": peak.temporaries + lost,
    }
    process = GPU_PROCESS_GIB if step.on_cuda else CPU_PROCESS_GIB[config.engine]
    found = _make_estimate(process, peak.phase, sizes)
    if not config.has_subject:
        return found
    encoding = _estimate_encoding(step, config, process=process, micro_batch=micro_batch)
    return max(found, encoding, key=lambda one: one.total_gib)


def _make_estimate(process: float, phase: str, sizes: Mapping[str, float]) -> MemoryEstimate:
    """An estimate of parts in bytes, but for the process in GiB; a part that is not given is 0."""
    return MemoryEstimate(
        process=process,
        phase=phase,
        **{name: size / BYTES_PER_GIB for name, size in sizes.items()},
    )


def _estimate_encoding(
    step: Step, config: EngineConfig, *, process: float, micro_batch: int
) -> MemoryEstimate:
    """Estimate the memory while pictures of a subject are encoded, before the first step.

    All sub-models are there; encoders that are not trained are freed afterwards.
    """
    profile = profile_step(dataclasses.replace(step, encodes_images=True))
    num_images = config.encoder_batch_size
    num_images = micro_batch if num_images == "microbatch" else num_images
    constant, slope, _ = torch.tensor(profile.timeline[: profile.trained_start]).T
    index = int((constant + num_images * slope).argmax())
    sizes = {
        "trained_weights": profile.trained_weights,
        "frozen_weights": profile.frozen_weights,
        "activations": float(num_images * slope[index]),
        "temporaries": float(constant[index]),
    }
    return _make_estimate(process, "encoders", sizes)


def _state_bytes(profile: StepProfile, weights: float, optimizer: str) -> float:
    """Bytes of one number of state for each weight, for weights of so many bytes."""
    bits = LOW_BIT_ADAMW.get(optimizer)
    if bits is None:
        return weights
    block = LOW_BIT_BLOCKS[bits]
    element_bytes = weights / sum(profile.trained_sizes)
    return sum(
        size * (bits / 8 + 4 / block)  # a scale in fp32 for each block
        if size >= MIN_LOW_BIT_SIZE and size % block == 0
        else size * element_bytes
        for size in profile.trained_sizes
    )


def _moments(
    profile: StepProfile,
    step: Step,
    *,
    num_images: int,
    num_encoded: int,
    keeps_gradients: bool,
    max_gradients: float,
    keeps_heap: bool,
) -> list[_Moment]:
    """The moments before the optimizer's step at which most memory may be used.

    There are at most `max_gradients` bytes of complete gradients at a time, with `keeps_gradients`
    always. `keeps_heap`: the C library keeps freed blocks.
    """
    constant, slope, complete = torch.tensor(profile.timeline).T
    activations = num_images * slope
    activations[: profile.trained_start] = num_encoded * slope[: profile.trained_start]

    def moment(index: int, gradients: float) -> _Moment:
        return _Moment(
            phase="encoders" if index < profile.trained_start else "backward",
            gradients=gradients,
            activations=float(activations[index]),
            temporaries=float(constant[index] - complete[index]),
        )

    gradients = complete.clamp(min=max_gradients * keeps_gradients, max=max_gradients)
    index = int((constant - complete + gradients + activations).argmax())
    whole = moment(index, float(gradients[index]))
    if not keeps_heap:
        return [whole]
    lost = CPU_MARGIN * whole.activations
    # The gradients cannot use what activations free: the heap holds it in pieces of other sizes.
    # Measured with glibc, sd2-base at 256 px, micro-batches 2 and 8, fp32 and amp_bf16: resident
    # memory peaks at all gradients plus the largest rest, to 4 %.
    late = moment(int((constant + activations - complete).argmax()), max_gradients)
    return [whole, whole._replace(temporaries=whole.temporaries + lost), late]
