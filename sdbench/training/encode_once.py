"""`encode_once` encodes the pictures of a DreamBooth subject before the first step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sdbench.base.conditions import SIZES
from sdbench.base.errors import RunError
from sdbench.base.progress import Progress
from sdbench.data import subject
from sdbench.data.batches.batches import BatchReader
from sdbench.data.batches.tokenizer import CaptionTokenizers
from sdbench.data.order.epochs import Key
from sdbench.engines.job import TrainJob
from sdbench.models.diffusion import DiffusionModel
from sdbench.plan.draft import Plan
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks
from sdbench.settings.recipe import EngineConfig

# The table of numbers of captions, and the tables with a row for each picture.
CAPTION = "caption"
OF_PICTURES = ("latent_mean", "latent_logvar", SIZES)


def encode_once(
    job: TrainJob, plan: Plan[EngineConfig], *, keeps_encoders: bool = False
) -> TrainJob:
    """Encode the pictures of a subject; a job without a subject is returned as it is.

    The new job looks up the latents of a batch. Encoders that are not trained are freed, unless
    `keeps_encoders` keeps them for evaluations.
    """
    config = plan.config
    if not config.has_subject:
        return job
    model: Any = job.model
    device = next(model.parameters()).device
    trains_text = "text_encoder" in config.trained_parts
    batch_size = config.encoder_batch_size
    if batch_size == "microbatch":
        batch_size = config.device_train_microbatch_size
    sources = [source for source in (plan.source, plan.class_source) if source is not None]
    new_token = None
    if config.learned_token is not None:
        new_token = plan.architecture.parts["text_encoder"]["vocab_size"]
    pictures = [
        functools.partial(_read, reader, index, new_token=token)
        for mirrored in (False, True)[: 2 if config.horizontal_flip_probability else 1]
        for token, source in zip((new_token, None), sources, strict=False)
        for reader in [subject.open_pictures(source, mirrored=mirrored)]
        for index in range(reader.num_samples)
    ]
    encoded = _encode_pictures(model, pictures, batch_size=batch_size, ranks=plan.ranks)
    caption_names = [one.name for one in plan.architecture.captions]
    no_caption = CaptionTokenizers.of(plan.architecture)([""])
    for name in caption_names:
        encoded[name] = torch.cat([encoded[name], torch.from_numpy(no_caption[name])])
    tables = {name: table.to(device) for name, table in encoded.items()}
    if not trains_text:
        captions = {name: tables.pop(name) for name in caption_names}
        caption, states = _encode_captions(model, captions, batch_size=batch_size)
        tables |= {CAPTION: caption, **states}
    if not keeps_encoders:
        model.drop_encoders(keeps_text=trains_text)
    return dataclasses.replace(job, prepare=functools.partial(_look_up, tables))


def _look_up(tables: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Look up the input of `DiffusionModel.forward` for a batch of `pairs.build`.

    The tables are ``latent_mean`` and ``latent_logvar`` (N, C, H/8, W/8), and ``sizes`` (N, 6) if
    the model is told them, of all pictures; and token ids (N + 1, ...) of their captions, the last
    row of the empty caption. Instead of the ids they may have ``caption`` (N + 1,), the number of
    each picture's caption, and the conditions (M, ...) of the captions.
    """
    numbers = batch["caption"]
    if CAPTION in tables:
        numbers = tables[CAPTION][numbers]
    found = {
        name: table[batch["index"] if name in OF_PICTURES else numbers]
        for name, table in tables.items()
        if name != CAPTION
    }
    return found | {"loss_weight": batch["loss_weight"]}


def _read(reader: BatchReader, index: int, *, new_token: int | None) -> dict[str, Tensor]:
    """``image`` (1, 3, S, S) and token ids (1, N) of a picture, as a batch has them."""
    # The number of a picture decides its random crop, so that each run has the same.
    batch = reader([Key(0, index)])
    if isinstance(batch, RunError):
        raise batch
    if new_token is not None and new_token not in batch.tensors["input_ids"]:
        raise RunError(f"the caption of {reader.name(index)} lacks the --learned_token")
    return batch.tensors


@torch.no_grad()
def _encode_pictures(
    model: DiffusionModel, pictures: Sequence[Any], *, batch_size: int, ranks: Ranks
) -> dict[str, Tensor]:
    """Moments, and what else a batch has beside images, of all pictures; on every rank's CPU."""
    device = next(model.parameters()).device
    # Which pictures are encoded together does not depend on the number of ranks.
    groups = [pictures[first : first + batch_size] for first in range(0, len(pictures), batch_size)]
    mine: dict[int, dict[str, Tensor]] = {}
    with Progress(len(groups), unit="batch of pictures", enabled=ranks.rank == 0) as progress:
        for number in range(ranks.rank, len(groups), ranks.world_size):
            group = [read() for read in groups[number]]
            tensors = {name: torch.cat([one[name] for one in group]) for name in group[0]}
            mean, logvar = model.moments(tensors.pop("image").to(device))
            mine[number] = {"latent_mean": mean.cpu(), "latent_logvar": logvar.cpu(), **tensors}
            progress.advance(min(ranks.world_size, len(groups) - number))
    encoded = distributed.gather_numbered(mine, ranks)
    return {name: torch.cat([one[name] for one in encoded]) for name in encoded[0]}


@torch.no_grad()
def _encode_captions(
    model: DiffusionModel, captions: Mapping[str, Tensor], *, batch_size: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Encode each distinct caption once: the number (N,) of each caption's, and their conditions.

    `captions` are token ids (N, ...) by the names of a batch, which belong together.
    """
    widths = [ids.shape[1] for ids in captions.values()]
    rows = torch.cat([*captions.values()], dim=1)
    distinct, numbers = torch.unique(rows, dim=0, return_inverse=True)
    ids = dict(zip(captions, distinct.split(widths, dim=1), strict=True))
    return numbers, model.encode_captions(ids, batch_size=batch_size)
