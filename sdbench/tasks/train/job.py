"""`build`: the training job of train.py, with schedule, optimizer and average of a real run."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from sdbench.engines.job import EmaSpec, TrainJob
from sdbench.engines.optimizers import make_optimizer
from sdbench.models.objective import Objective
from sdbench.models.stable_diffusion import PhaseObserver
from sdbench.plan.resolve import Plan
from sdbench.tasks import autoencoding, pretrain


def build(plan: Plan, *, phase: PhaseObserver) -> TrainJob:
    """Build model and loader of a run of train.py, and describe the rest."""
    config: Any = plan.config
    ema = None
    if config.use_ema:
        ema = EmaSpec(
            config.ema_impl,
            _ema_half_life_batches(config),
            config.ema_interval_batches,
            warms_up=config.ema_warmup,
        )
    return dataclasses.replace(
        _build_parts(plan, phase=phase),
        schedule=functools.partial(
            learning_rate_factor,
            schedule=config.lr_schedule,
            num_warmup_steps=config.lr_warmup_batches,
            num_steps=plan.num_steps,
            end=config.lr_end_factor,
        ),
        ema=ema,
        make_optimizer=functools.partial(
            make_optimizer,
            config=config,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
        ),
        max_gradient_norm=config.clip_norm,
    )


def _ema_half_life_batches(config: Any) -> float:
    """The half-life h of the moving average; for a decay d per step, d ** h = 0.5."""
    if config.ema_decay is not None:
        return math.log(0.5) / math.log(config.ema_decay)
    return config.ema_half_life_batches or pretrain.EMA_HALF_LIFE_BATCHES


def _build_parts(plan: Plan, *, phase: PhaseObserver) -> TrainJob:
    """The job for the VAE or for the U-Net, with the optimizer of a measurement."""
    config: Any = plan.config
    if config.train == "vae":
        return autoencoding.build(plan)
    return pretrain.build(
        plan,
        phase=phase,
        objective=make_objective(config),
        text_encoder_lr_factor=config.text_encoder_lr_factor,
    )


def make_objective(config: Any) -> Objective:
    """The objective that a `TrainConfig` asks for."""
    return Objective(
        prediction_type=config.prediction_type,
        min_snr_gamma=config.min_snr_gamma,
        offset_noise=config.noise_offset,
        zero_terminal_snr=config.zero_terminal_snr,
    )


def learning_rate_factor(
    step: int, *, schedule: str, num_warmup_steps: int, num_steps: int, end: float
) -> float:
    """The multiplier of the learning rate of a step; steps count from 0.

    It rises as (step + 1) / num_warmup_steps. Then ``constant`` stays at 1, and ``cosine`` and
    ``linear`` fall to `end` in the last step.
    """
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - num_warmup_steps) / max(1, num_steps - 1 - num_warmup_steps))
    share = 1.0 - progress if schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return end + (1.0 - end) * share
