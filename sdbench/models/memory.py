"""`estimate_peak_memory`: an estimate of the peak memory of one rank.

One replay of a training step serves any micro-batch: after each operation a constant number of
bytes is live (gradients, weight copies), plus a number per image (activations).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sdbench.base.units import BYTES_PER_GIB
from sdbench.models.replay import Step, StepProfile, profile_step
from sdbench.settings.parallel import FSDP, GATHERED_ONCE

# Resident size of Python with torch, composer, streaming, diffusers and transformers imported,
# measured with torch 2.7.0: 0.74 GiB, and 0.81 with oneDNN's and OpenMP's after a step of `tiny`.
CPU_PROCESS_GIB = 0.78
# Not measured: about 0.5 GiB for a CUDA context and as much for workspaces of cuBLAS and cuDNN.
GPU_PROCESS_GIB = 1.0

# Not measured: share of a step's memory that CUDA's caching allocator reserves and does not use.
CUDA_FRAGMENTATION = 0.05


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What a rank holds and computes in a step, beside the operations of `Step`.

    Attributes:
        micro_batch: Images per forward pass.
        num_microbatches: Forward passes per optimizer step.
        encoder_batch: Images per call of the encoders ahead of the micro-batches; None: the
            encoders run in each micro-batch.
        optimizer: A value of --optimizer.
        master_weights: Whether the optimizer holds fp32 copies of the weights.
        use_ema: Whether a moving average of the trained weights is kept, in fp32.
        num_ranks: Of the run.
        gradient_as_bucket_view: Whether gradients are views of DDP's buckets.
        sharding: A value of --sharding; measured with `tiny` only.
        num_sharing_ranks: Ranks that hold one copy of the sharded state together.
    """

    micro_batch: int
    num_microbatches: int = 1
    encoder_batch: int | None = None
    optimizer: str
    master_weights: bool = False
    use_ema: bool
    num_ranks: int
    gradient_as_bucket_view: bool = False
    sharding: str = "none"
    num_sharing_ranks: int = 1

    @property
    def num_shards(self) -> int:
        """Ranks that share the optimizer's state and the average."""
        return self.num_sharing_ranks if self.sharding != "none" else 1


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one rank by use at the time of its peak, in GiB.

    `process` is that of libraries on a CPU, of CUDA context and workspaces on a GPU. Activations
    grow with the micro-batch. `temporaries` are the other tensors: weights cast by autocast, the
    optimizer's, and memory that CUDA's allocator reserves and does not use. `phase` is encoders,
    backward or optimizer.
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
        return sum(self._parts().values())

    def describe(self) -> str:
        """The parts as text, largest first."""
        parts = sorted(self._parts().items(), key=lambda part: -part[1])
        return ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in parts)

    def _parts(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "phase"}


class _Moment(NamedTuple):
    """Bytes at one time of a step, without weights and state."""

    phase: str
    gradients: float
    activations: float
    temporaries: float


def estimate_peak_memory(step: Step, options: RankOptions) -> MemoryEstimate:
    """Estimate the peak memory of one rank in training with AdamW, by its parts."""
    profile, shards = profile_step(step), options.num_shards
    weights = float(profile.trained_weights)
    state_weights = 2 * weights if options.master_weights else weights
    peak = max(_moments(profile, step, options), key=lambda moment: sum(moment[1:]))
    lost = CUDA_FRAGMENTATION * (peak.activations + peak.temporaries) if step.on_cuda else 0.0
    held_weights, frozen_weights = weights, float(profile.frozen_weights)
    gradients = peak.gradients
    if options.sharding in FSDP:
        # The frozen weights beside LoRA are sharded as well. grad_op gathers all weights for the
        # whole step, the others a block at a time.
        beside = profile.frozen_beside
        gathers_all = options.sharding in GATHERED_ONCE
        # The shards of master weights count as state of the optimizer.
        held_weights = 0.0 if options.master_weights else weights / shards
        held_weights += weights if gathers_all else profile.gathered_weights
        frozen_weights += beside / shards - beside
        frozen_weights += beside if gathers_all else profile.gathered_beside
        # Over several micro-batches FSDP adds up unsharded gradients.
        if options.num_microbatches == 1:
            of_shards = peak.gradients * (state_weights / weights)
            gradients = of_shards / shards + profile.gathered_weights
    elif options.num_ranks > 1 and not options.gradient_as_bucket_view:
        gradients += weights  # DDP's buckets
    # Adam's means of the gradient and of its square, and master weights.
    state = (2 + options.master_weights) * state_weights
    # The average is in fp32, as the weights of LoRA and of a token are.
    has_bf16 = step.precision == "bf16" and step.lora is None and not step.learns_token
    ema = options.use_ema * (weights * 2 if has_bf16 else weights)
    sizes = {
        "trained_weights": held_weights,
        "frozen_weights": frozen_weights,
        "optimizer_state": state / shards,
        "ema": ema / shards,
        "gradients": gradients,
        "activations": peak.activations,
        "temporaries": peak.temporaries + lost,
    }
    return MemoryEstimate(
        process=GPU_PROCESS_GIB if step.on_cuda else CPU_PROCESS_GIB,
        phase=peak.phase,
        **{name: size / BYTES_PER_GIB for name, size in sizes.items()},
    )


def _moments(profile: StepProfile, step: Step, options: RankOptions) -> list[_Moment]:
    weights = profile.trained_weights
    constant, slope, complete = torch.tensor(profile.timeline).T
    num_images = torch.full_like(slope, options.micro_batch)
    if options.encoder_batch is not None:
        num_images[: profile.trained_start] = options.encoder_batch
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
    if options.num_microbatches > 1 or not step.on_cuda:
        moments.append(moment(int((constant + activations - complete).argmax()), weights))
    # On CUDA torch's default AdamW (foreach) holds the square root of the whole second moment; on a
    # CPU it takes one tensor at a time, and the fused kernel needs nothing.
    temporaries = weights if step.on_cuda and options.optimizer == "adamw" else 0.0
    # With master weights the optimizer holds fp32 copies of bf16 weights, and of all gradients at
    # once while it steps, unless it makes one pass; FSDP's gradients are fp32 already.
    one_pass = options.optimizer == "adamw_one_pass"
    if options.master_weights and not (one_pass or options.sharding in FSDP):
        temporaries += 2 * weights / options.num_shards
    moments.append(_Moment("optimizer", weights, activations=0.0, temporaries=temporaries))
    return moments
