"""`build`: the job of training a diffusion model."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sdbench import data
from sdbench.data.batches import pairs
from sdbench.data.batches.tokenizer import CaptionTokenizer
from sdbench.engines.job import EmaSpec, TrainedModule, TrainJob
from sdbench.engines.optimizers import make_optimizer
from sdbench.models.diffusion import DiffusionModel, PhaseObserver, build_model
from sdbench.models.lora import Lora
from sdbench.models.objective import PLAIN, Objective
from sdbench.models.replay import Step, count_flops
from sdbench.plan.draft import Plan
from sdbench.settings.recipe import EngineConfig
from sdbench.settings.training import EMA_HALF_LIFE_BATCHES
from sdbench.training.tuning import tune_model

if TYPE_CHECKING:
    from sdbench.data.batches.loader import CheckedLoader


def build(
    plan: Plan[EngineConfig], *, phase: PhaseObserver, objective: Objective = PLAIN
) -> TrainJob:
    """Build model and loader, and describe the rest."""
    config = plan.config
    initial_token_id = None
    if config.learned_token is not None:
        (initial_token_id,) = CaptionTokenizer.of(plan.architecture).read_word(config.initial_token)
    model = build_model(
        plan.architecture,
        seed=config.seed_of_weights,
        precision=config.precision,
        encoder_dtype=config.encoder_dtype,
        memory_format=config.memory_format,
        attention=config.attention,
        vae_attention=config.attention_of_vae,
        encoders=config.step_has_encoders,
        trained=config.trained_parts,
        lora=Lora.of(config, plan.architecture),
        frozen_bits=config.frozen_bits,
        initial_token_id=initial_token_id,
        device=plan.machine.device_type,
        phase=phase,
        objective=objective,
    )
    num_shapes = 1
    if plan.mixture is not None:
        # Held-out pictures and samples may have others.
        drawn = getattr(config, "sample_shapes", None) or ""
        num_shapes = len(plan.mixture.shapes) + len(plan.shapes.shapes) + drawn.count("x")
    tune_model(model, config, num_shapes=num_shapes)
    # Encodes the whole batch of a rank. Otherwise the step encodes each micro-batch, or
    # `dreambooth.encode_once` encodes a subject.
    prepare = None
    encodes_images = Step.of(config, plan.architecture, on_cuda=False).encodes_images
    if encodes_images and config.encoder_batch_size != "microbatch":
        prepare = functools.partial(model.encode, encoder_batch_size=config.encoder_batch_size)
    return describe_job(
        plan,
        model,
        loss=_loss,
        loader=_build_loader(plan),
        prepare=prepare,
        sharded_blocks=model.network.sharded_blocks,
        casts_inputs=model.network.casts_inputs,
    )


def describe_job(plan: Plan[EngineConfig], model: nn.Module, **options: Any) -> TrainJob:
    """The job of training a built model; `options` are the further fields of `TrainJob`."""
    config = plan.config
    ema = EmaSpec(config.ema_impl, EMA_HALF_LIFE_BATCHES, config.ema_interval_batches)
    parameters = list(model.parameters())
    return TrainJob(
        model=model,
        trained={
            name: TrainedModule(getattr(model, name), config.lr, config.weight_decay)
            for name in plan.architecture.modules_of(config.trained_parts)
        },
        make_optimizer=functools.partial(make_optimizer, config=config),
        schedule=lambda step: 1.0,
        ema=ema if config.use_ema else None,
        images_per_step=config.batch_size,
        num_steps=plan.max_num_steps,
        flops_per_image=_count_flops_per_image(plan),
        num_parameters=sum(one.numel() for one in parameters),
        num_trainable_parameters=sum(one.numel() for one in parameters if one.requires_grad),
        **options,
    )


def _count_flops_per_image(plan: Plan[EngineConfig]) -> float:
    """FLOPs of a step per image, the mean over the buckets, as `replay.count_flops`."""
    if plan.mixture is None:
        return count_flops(Step.of(plan.config, plan.architecture, on_cuda=False))
    # Shapes of as many pixels, such as 640x384 and 384x640, take as many.
    by_pixels = {shape.num_pixels: shape for shape in plan.mixture.shapes}
    flops = {
        num_pixels: count_flops(Step.of(plan.config, plan.architecture, on_cuda=False, shape=shape))
        for num_pixels, shape in by_pixels.items()
    }
    return plan.mixture.mean([flops[shape.num_pixels] for shape in plan.mixture.shapes])


def _build_loader(plan: Plan[EngineConfig]) -> CheckedLoader:
    config = plan.config
    if config.has_subject:
        return pairs.build(
            plan.source, plan.class_source, prior_loss_weight=config.prior_loss_weight
        )
    if not config.online_preprocessing:
        return data.build(plan.source)
    from sdbench.encoding.online import OnlineLoader
    from sdbench.ranks import ray_cluster

    ray_cluster.connect(config.ray_address)
    return OnlineLoader(
        plan.source,
        config,
        architecture=plan.architecture,
        weights_seed=config.seed_of_weights,
        ranks=plan.ranks,
        num_batches=plan.max_num_steps,
    )


def _loss(output: tuple[Tensor, Tensor]) -> Tensor:
    return DiffusionModel.loss(*output)
