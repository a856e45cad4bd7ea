"""`encode_once` encodes the pictures of a DreamBooth subject before the first step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sdbench.base.errors import RunError
from sdbench.base.files import new_file
from sdbench.base.progress import Progress
from sdbench.data import subject
from sdbench.data.pipeline.batches import BatchReader
from sdbench.data.pipeline.order import Key
from sdbench.engines.job import TrainJob
from sdbench.models.stable_diffusion import StableDiffusion
from sdbench.plan.resolve import Plan
from sdbench.ranks import distributed

# In the folder of a run: the latents, and what they were made of.
LATENTS_NAME = "latents.safetensors"
MADE_OF = "made_of_sha256"


def encode_once(
    job: TrainJob, plan: Plan, *, folder: Path | None = None, keeps_encoders: bool = False
) -> TrainJob:
    """Encode the pictures of a subject; a job without a subject is returned as it is.

    The encoders that are not trained leave the memory.

    Args:
        job: The job of `pretrain.build`, whose model has its weights. Its loader says which
            pictures are in a batch.
        plan: The resolved run.
        folder: Where latents are kept for resuming, if pictures and VAE stay the same; None: they
            are not kept.
        keeps_encoders: Keep the encoders, for evaluations during training.

    Returns:
        The job, which looks up the latents of a batch.

    Raises:
        RunError: A picture cannot be used.
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
    sources = [plan.source, plan.class_source]
    pictures = Pictures([subject.open_pictures(one) for one in sources if one is not None])
    latents, input_ids = _encode_pictures(
        model, pictures, plan, batch_size=batch_size, folder=folder
    )
    tables = {name: table.to(device) for name, table in latents.items()}
    tables["input_ids"] = input_ids.to(device)
    if not trains_text:
        tables |= _encode_captions(model, tables.pop("input_ids"), batch_size=batch_size)
    if not keeps_encoders:
        model.vae = None
        if not trains_text:
            model.text_encoder = None
    return dataclasses.replace(job, prepare=functools.partial(look_up, tables))


def look_up(tables: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Look up latents and captions for a batch of `subject.build`.

    Args:
        tables: ``latent_mean`` and ``latent_logvar`` (N, 4, H/8, W/8) and ``input_ids`` (N, 77) of
            all pictures; or instead of the latter ``caption`` (N,), the number of each picture's
            caption, and ``text_embedding`` (M, 77, D) of the captions.
        batch: Picture numbers and weights.

    Returns:
        The input of `StableDiffusion.forward`.
    """
    rows = {name: table for name, table in tables.items() if name != "text_embedding"}
    found = {name: table[batch["index"]] for name, table in rows.items()}
    if "caption" in found:
        found["text_embedding"] = tables["text_embedding"][found.pop("caption")]
    return found | {"loss_weight": batch["loss_weight"]}


class Pictures:
    """All pictures of a run by number: those of the subject, then those of its class."""

    def __init__(self, readers: Sequence[BatchReader]) -> None:
        """Join the readers without reading."""
        self._places = [
            (reader, index) for reader in readers for index in range(reader.num_samples)
        ]

    def __len__(self) -> int:
        return len(self._places)

    def name(self, number: int) -> str:
        """The place of a picture."""
        reader, index = self._places[number]
        return reader.name(index)

    def read(self, number: int) -> dict[str, Tensor]:
        """``image`` (1, 3, S, S) and ``input_ids`` (1, 77) of a picture."""
        reader, index = self._places[number]
        # The number of a picture decides its random crop, so that each run has the same.
        batch = reader([Key(0, index)])
        if isinstance(batch, RunError):
            raise batch
        return batch.tensors


@torch.no_grad()
def _encode_pictures(
    model: StableDiffusion,
    pictures: Pictures,
    plan: Plan,
    *,
    batch_size: int,
    folder: Path | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Mean and log-variance of all pictures' latents, and their captions, on every rank's CPU."""
    ranks = plan.ranks
    read: Any = None
    made_of, path = "", None if folder is None else folder / LATENTS_NAME
    if ranks.rank == 0:
        made_of, input_ids = _describe(model, pictures, has_digest=path is not None)
        read = (None if path is None else _load(path, made_of=made_of), input_ids)
    latents, input_ids = distributed.broadcast(read, ranks)
    if plan.config.learned_token is not None:
        new_token = plan.architecture.text_encoder["vocab_size"]
        _check_captions(pictures, input_ids, new_token=new_token)
    if latents is not None:
        return latents, input_ids
    # Which pictures are encoded together does not depend on the number of ranks.
    groups = [
        range(first, min(first + batch_size, len(pictures)))
        for first in range(0, len(pictures), batch_size)
    ]
    device = next(model.parameters()).device
    mine: dict[int, tuple[Tensor, Tensor]] = {}
    with Progress(len(groups), unit="batch of pictures", enabled=ranks.rank == 0) as progress:
        for number in range(ranks.rank, len(groups), ranks.world_size):
            images = torch.cat([pictures.read(one)["image"] for one in groups[number]])
            moments = model.moments(images.to(device))
            mine |= {
                one: (mean.cpu(), logvar.cpu())
                for one, mean, logvar in zip(groups[number], *moments, strict=True)
            }
            progress.advance(min(ranks.world_size, len(groups) - number))
    means, logvars = zip(*distributed.gather_numbered(mine, ranks), strict=True)
    latents = {"latent_mean": torch.stack(means), "latent_logvar": torch.stack(logvars)}
    if ranks.rank == 0 and path is not None:
        _save(path, latents, made_of=made_of)
    return latents, input_ids


def _check_captions(pictures: Pictures, input_ids: Tensor, *, new_token: int) -> None:
    """Check that each caption has the token that is learned."""
    for number, ids in enumerate(input_ids):
        if new_token not in ids:
            raise RunError(f"the caption of {pictures.name(number)} lacks the --learned_token")


def _describe(
    model: StableDiffusion, pictures: Pictures, *, has_digest: bool
) -> tuple[str, Tensor]:
    """A hash of pixels and VAE, and the token ids of all captions (N, 77)."""
    assert model.vae is not None
    digest = hashlib.sha256(str(model.autocast_dtype).encode())
    captions = []
    for number in range(len(pictures)):
        picture = pictures.read(number)
        captions.append(picture["input_ids"])
        digest.update(picture["image"].contiguous().numpy())
    if has_digest:
        for name, weight in model.vae.state_dict().items():
            digest.update(f"{name} {weight.dtype}".encode())
            digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest(), torch.cat(captions)


def _load(path: Path, *, made_of: str) -> dict[str, Tensor] | None:
    """The latents of a file, if they are of these pictures and this VAE."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get(MADE_OF) == made_of:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        reason = "is of other pictures or of another VAE"
    except (OSError, SafetensorError) as error:
        reason = f"cannot be read ({error})"
    print(f"{path} {reason}: the pictures are encoded again.")
    return None


def _save(path: Path, latents: dict[str, Tensor], *, made_of: str) -> None:
    try:
        with new_file(path) as new:
            save_file(latents, new, metadata={MADE_OF: made_of})
    except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
        print(f"warning: a run that goes on will encode again: {path}: {error}", file=sys.stderr)


@torch.no_grad()
def _encode_captions(
    model: StableDiffusion, input_ids: Tensor, *, batch_size: int
) -> dict[str, Tensor]:
    """Encode each distinct caption once: ``caption`` and ``text_embedding`` of `look_up`."""
    distinct, caption = torch.unique(input_ids, dim=0, return_inverse=True)
    states = [model.text_states({"input_ids": some}) for some in distinct.split(batch_size)]
    return {"caption": caption, "text_embedding": torch.cat(states)}
