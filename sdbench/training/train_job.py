"""`build`: the training job of train.py, with schedule, optimizer and average of a real run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from sdbench import data
from sdbench.engines.job import EmaSpec, TrainJob
from sdbench.engines.optimizers import make_optimizer
from sdbench.models.autoencoder import build_autoencoder
from sdbench.models.diffusion import PhaseObserver
from sdbench.models.objective import Objective
from sdbench.plan.draft import Plan
from sdbench.settings.recipe import TrainConfig
from sdbench.training import pretrain
from sdbench.training.tuning import tune_blocks


def build(plan: Plan[TrainConfig], *, phase: PhaseObserver) -> TrainJob:
    """Build model and loader of a run of train.py, and describe the rest."""
    config = plan.config
    if config.train == "vae":
        job = _build_autoencoder(plan)
    else:
        job = pretrain.build(plan, phase=phase, objective=make_objective(config))
    trained = dict(job.trained)
    if config.text_encoder_lr is not None:
        text_encoder = trained["text_encoder"]
        trained["text_encoder"] = dataclasses.replace(text_encoder, lr=config.text_encoder_lr)
    ema = EmaSpec(
        config.ema_impl,
        config.half_life_batches,
        config.ema_interval_batches,
        warms_up=config.ema_warmup,
    )
    return dataclasses.replace(
        job,
        trained=trained,
        schedule=learning_rate_factor_of(config, num_steps=plan.num_steps),
        ema=ema if config.use_ema else None,
        make_optimizer=functools.partial(
            make_optimizer, config=config, betas=(config.beta1, config.beta2), eps=config.adam_eps
        ),
        max_gradient_norm=config.clip_norm,
    )


def _build_autoencoder(plan: Plan[TrainConfig]) -> TrainJob:
    config = plan.config
    model = build_autoencoder(
        plan.architecture,
        seed=config.seed_of_weights,
        precision=config.precision,
        memory_format=config.memory_format,
        attention=config.attention_of_vae,
        kl_weight=config.kl_weight,
        device=plan.machine.device_type,
    )
    tune_blocks(model.vae, config, is_compiled=False)
    return pretrain.describe_job(
        plan, model, loss=lambda output: model.loss(*output), loader=data.build(plan.source)
    )


def make_objective(config: TrainConfig) -> Objective:
    """The objective that a `TrainConfig` asks for."""
    return Objective(
        prediction_type=config.prediction_type,
        min_snr_gamma=config.min_snr_gamma,
        offset_noise=config.noise_offset,
        zero_terminal_snr=config.zero_terminal_snr,
        time_sampling=config.time_sampling,
        time_mean=config.time_mean,
        time_std=config.time_std,
        time_shift=config.time_shift,
        flow_weighting=config.flow_weighting,
        guidance_embedding=config.guidance_embedding,
    )


def learning_rate_factor_of(config: TrainConfig, *, num_steps: int) -> Callable[[int], float]:
    """The multiplier of the learning rate by step, as a `TrainConfig` asks for it."""
    return functools.partial(
        learning_rate_factor,
        schedule=config.lr_schedule,
        num_warmup_steps=config.lr_warmup_batches,
        num_steps=num_steps,
        end=config.lr_end_factor,
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
