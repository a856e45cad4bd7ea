"""`build`: the job of training the VAE alone."""

from __future__ import annotations

import functools
from typing import Any

from sdbench import data
from sdbench.engines.job import TrainedModule, TrainJob
from sdbench.engines.optimizers import make_optimizer
from sdbench.models.autoencoder import build_autoencoder
from sdbench.models.flops import count_vae_flops
from sdbench.plan.resolve import Plan
from sdbench.tasks.pretrain import constant
from sdbench.tasks.tuning import tune_blocks


def build(plan: Plan) -> TrainJob:
    """Build model and loader of a run of train.py, and describe the rest."""
    config: Any = plan.config
    model = build_autoencoder(
        plan.architecture,
        seed=config.seed if config.weights_seed is None else config.weights_seed,
        precision=config.precision,
        memory_format=config.memory_format,
        attention=config.attention_of_vae,
        kl_weight=config.kl_weight,
        device=plan.machine.device_type,
    )
    tune_blocks(model.vae, config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return TrainJob(
        model=model,
        trained={"vae": TrainedModule(model.vae, config.lr, config.weight_decay)},
        loss=lambda output: model.loss(*output),
        loader=data.build(plan.source),
        make_optimizer=functools.partial(make_optimizer, config=config),
        schedule=constant,
        ema=None,
        images_per_step=config.batch_size,
        num_steps=plan.max_num_steps,
        flops_per_image=count_vae_flops(plan.architecture, image_size=config.image_size),
        num_parameters=num_parameters,
        num_trainable_parameters=num_parameters,
    )
