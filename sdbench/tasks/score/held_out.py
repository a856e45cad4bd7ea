"""Scores of a model in training, by pictures generated for the captions of held-out pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from sdbench import data
from sdbench.base.errors import ConfigError
from sdbench.data.samples import Samples
from sdbench.data.source import SourceConfig
from sdbench.models.drawing import DrawingSettings, Tokenize, draw_share
from sdbench.models.stable_diffusion import StableDiffusion
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks
from sdbench.tasks.score.networks import open_networks
from sdbench.tasks.score.scores import PictureBatch, Scores, read_pictures


def check_scores(config: Any, source: SourceConfig) -> None:
    """Check networks and held-out pictures before any weights are built.

    Raises:
        ConfigError: A network cannot be used, or there are fewer than two pictures.
    """
    open_networks(config, image_size=config.image_size, device="cpu")
    num_samples = data.check(source)
    if num_samples is not None and num_samples < 2:
        raise ConfigError(
            "scores need two held-out pictures",
            value=num_samples,
            allowed="2 or more",
            flag="--validation_remote",
        )


def score_model(
    model: StableDiffusion,
    samples: Samples,
    *,
    networks: Mapping[str, Any],
    num_images: int,
    read_avif: bool = False,
    skips_bad: bool,
    seed: int,
    tokenize: Tokenize,
    settings: DrawingSettings,
    ranks: Ranks,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Generate a picture for the caption of each held-out picture, and score them.

    Args:
        model: The same on every rank, or sharded; every rank has to call.
        samples: The held-out pictures.
        networks: As `Scores` takes them.
        num_images: Most held-out pictures to take, from the first on.
        read_avif: Value of ``--read_avif``.
        skips_bad: Leave out held-out pictures that are bad.
        seed: Of the first picture.
        tokenize: As of `draw_samples`.
        settings: As of `draw_samples`.
        ranks: The place of this process.
        check: Called before each batch that all ranks have, and each step of a drawing; may raise.

    Returns:
        The facts of `Scores.compute`, the same for any number of ranks, and of the drawing.

    Raises:
        RunError: A held-out picture is bad and may not be left out, or as `Scores.compute`.
    """
    num_images = min(num_images, len(samples))
    scores = Scores(networks)
    captions: dict[int, str] = {}
    num_common = num_images // ranks.world_size // settings.batch_size
    for number, batch in enumerate(
        read_pictures(
            samples.read,
            range(ranks.rank, num_images, ranks.world_size),
            image_size=settings.image_size,
            batch_size=settings.batch_size,
            read_avif=read_avif,
            skips_bad=skips_bad,
        )
    ):
        if number < num_common:
            check()
        scores.add_reference(batch)
        captions |= zip(batch.numbers, batch.captions, strict=True)
    prompts = distributed.gather_numbered(captions, ranks)
    for numbers, pictures in draw_share(
        model, prompts, seed=seed, tokenize=tokenize, settings=settings, ranks=ranks, check=check
    ):
        pixels = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
        generated = PictureBatch(
            numbers, pixels.permute(0, 3, 1, 2), [prompts[number] for number in numbers]
        )
        scores.add_generated(generated)
    how = {
        "num_bad_samples": num_images - len(prompts),
        "image_size": settings.image_size,
        "sampler": settings.sampler,
        "num_steps": settings.num_steps,
        "guidance_scale": settings.guidance_scale,
    }
    return scores.compute(ranks) | how
