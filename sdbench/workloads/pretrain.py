"""What does pre-training Stable Diffusion consist of?"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sdbench import sources
from sdbench.host_memory import keep_freed_memory
from sdbench.models.flops import count_flops
from sdbench.models.stable_diffusion import (
    PhaseObserver,
    StableDiffusion,
    build_stable_diffusion,
)
from sdbench.parts import EmaSpec, Parts
from sdbench.resolve import Plan

# mosaicml/diffusion-benchmark @c7f3cff: EMA(half_life="1000ba").
EMA_HALF_LIFE_BATCHES = 1000


def build(plan: Plan, *, phase: PhaseObserver) -> Parts:
    """Build model and loader, and describe the rest.

    Args:
        plan: The resolved run.
        phase: The model enters it around the work of each of its parts.

    Returns:
        The parts for an engine.
    """
    config = plan.config
    if config.cpu_allocator == "keep":
        keep_freed_memory()
    model = build_stable_diffusion(
        plan.architecture,
        seed=config.seed,
        precision=config.precision,
        encoder_dtype=config.encoder_dtype,
        memory_format=config.memory_format,
        attention=config.attention,
        encoders=config.latents == "online",
        phase=phase,
    )
    flops = count_flops(plan.architecture, image_size=config.image_size)
    flops_per_image = flops.unet_forward_backward
    if config.latents == "online":
        flops_per_image += flops.vae_encode + flops.text_encode
    return Parts(
        model=model,
        trained=model.unet,
        loss=_loss,
        loader=sources.build(plan.source),
        make_optimizer=functools.partial(_make_optimizer, config=config),
        schedule=_constant,
        ema=EmaSpec(config.ema_impl, EMA_HALF_LIFE_BATCHES) if config.use_ema else None,
        images_per_step=config.batch_size,
        num_steps=plan.max_num_steps,
        flops_per_image=flops_per_image,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_trainable_parameters=sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        ),
    )


def _loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return StableDiffusion.loss(*output)


def _constant(step: int) -> float:
    return 1.0


def _make_optimizer(model: torch.nn.Module, *, config: Any) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if config.optimizer_params == "trainable":
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
    # fused=None leaves torch its default: a foreach loop on a GPU, a loop over tensors on a CPU.
    fused = True if config.optimizer == "adamw_fused" else None
    return torch.optim.AdamW(
        parameters, lr=config.lr, weight_decay=config.weight_decay, fused=fused
    )


def set_matmul_precision(precision: str) -> None:
    """Let fp32 mean fp32: torch allows TF32 in convolutions unless told otherwise."""
    uses_tf32 = precision == "tf32"
    if precision in ("fp32", "tf32"):
        torch.backends.cuda.matmul.allow_tf32 = uses_tf32
        torch.backends.cudnn.allow_tf32 = uses_tf32
