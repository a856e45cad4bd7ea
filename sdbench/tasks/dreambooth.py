"""`encode_once` encodes the pictures of a DreamBooth subject before the first step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sdbench.base.errors import RunError
from sdbench.base.progress import Progress
from sdbench.data import subject
from sdbench.data.pipeline.batches import BatchReader
from sdbench.data.pipeline.order import Key
from sdbench.data.pipeline.tokenizer import CaptionTokenizer
from sdbench.engines.job import TrainJob
from sdbench.models.stable_diffusion import StableDiffusion
from sdbench.plan.resolve import Plan
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks


def encode_once(job: TrainJob, plan: Plan, *, keeps_encoders: bool = False) -> TrainJob:
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
        new_token = plan.architecture.text_encoder["vocab_size"]
    pictures = [
        functools.partial(_read, reader, index, new_token=token)
        for mirrored in (False, True)[: 2 if config.horizontal_flip_probability else 1]
        for token, source in zip((new_token, None), sources, strict=False)
        for reader in [subject.open_pictures(source, mirrored=mirrored)]
        for index in range(reader.num_samples)
    ]
    encoded = _encode_pictures(model, pictures, batch_size=batch_size, ranks=plan.ranks)
    no_caption = CaptionTokenizer.of(plan.architecture)([""])
    encoded["input_ids"] = torch.cat([encoded["input_ids"], torch.from_numpy(no_caption)])
    tables = {name: table.to(device) for name, table in encoded.items()}
    if not trains_text:
        tables |= _encode_captions(model, tables.pop("input_ids"), batch_size=batch_size)
    if not keeps_encoders:
        model.vae = None
        if not trains_text:
            model.text_encoder = None
    return dataclasses.replace(job, prepare=functools.partial(_look_up, tables))


def _look_up(tables: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Look up the input of `StableDiffusion.forward` for a batch of `pairs.build`.

    The tables are ``latent_mean`` and ``latent_logvar`` (N, 4, H/8, W/8) and ``input_ids`` (N, 77)
    of all pictures, the latter with a last row of the empty caption; or instead of it ``caption``
    (N,), the number of each picture's caption, and ``text_embedding`` (M, 77, D) of the captions.
    """
    found = {name: tables[name][batch["index"]] for name in ("latent_mean", "latent_logvar")}
    if "caption" in tables:
        found["text_embedding"] = tables["text_embedding"][tables["caption"][batch["caption"]]]
    else:
        found["input_ids"] = tables["input_ids"][batch["caption"]]
    return found | {"loss_weight": batch["loss_weight"]}


def _read(reader: BatchReader, index: int, *, new_token: int | None) -> dict[str, Tensor]:
    """``image`` (1, 3, S, S) and ``input_ids`` (1, 77) of a picture."""
    # The number of a picture decides its random crop, so that each run has the same.
    batch = reader([Key(0, index)])
    if isinstance(batch, RunError):
        raise batch
    if new_token is not None and new_token not in batch.tensors["input_ids"]:
        raise RunError(f"the caption of {reader.name(index)} lacks the --learned_token")
    return batch.tensors


@torch.no_grad()
def _encode_pictures(
    model: StableDiffusion, pictures: Sequence[Any], *, batch_size: int, ranks: Ranks
) -> dict[str, Tensor]:
    """`latent_mean`, `latent_logvar` and `input_ids` of all pictures, on the CPU of every rank."""
    device = next(model.parameters()).device
    # Which pictures are encoded together does not depend on the number of ranks.
    groups = [pictures[first : first + batch_size] for first in range(0, len(pictures), batch_size)]
    mine: dict[int, list[Tensor]] = {}
    with Progress(len(groups), unit="batch of pictures", enabled=ranks.rank == 0) as progress:
        for number in range(ranks.rank, len(groups), ranks.world_size):
            group = [read() for read in groups[number]]
            images, input_ids = (
                torch.cat([one[name] for one in group]) for name in ("image", "input_ids")
            )
            mean, logvar = model.moments(images.to(device))
            mine[number] = [mean.cpu(), logvar.cpu(), input_ids]
            progress.advance(min(ranks.world_size, len(groups) - number))
    columns = zip(*distributed.gather_numbered(mine, ranks), strict=True)
    names = ("latent_mean", "latent_logvar", "input_ids")
    return dict(zip(names, map(torch.cat, columns), strict=True))


@torch.no_grad()
def _encode_captions(
    model: StableDiffusion, input_ids: Tensor, *, batch_size: int
) -> dict[str, Tensor]:
    """Encode each distinct caption once: ``caption`` and ``text_embedding`` of `_look_up`."""
    distinct, caption = torch.unique(input_ids, dim=0, return_inverse=True)
    states = [model.text_states({"input_ids": some}) for some in distinct.split(batch_size)]
    return {"caption": caption, "text_embedding": torch.cat(states)}
