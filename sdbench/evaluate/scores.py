"""FID and CLIP score of pictures, batch by batch, on one rank or more."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sdbench import data
from sdbench.base.errors import RunError, blamed_on
from sdbench.base.units import counted
from sdbench.data.batches.batches import BatchReader, make_batches
from sdbench.data.order.epochs import keys_of_first_epoch
from sdbench.data.samples import ImageSample, Samples, decoding
from sdbench.data.source import SourceConfig
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks

if TYPE_CHECKING:
    from sdbench.measure.watch import Alone
    from sdbench.models.diffusion import DiffusionModel
    from sdbench.models.drawing import DrawingSettings, Tokenize


class ListedPictures(Samples):
    """The pictures of `list_pictures`."""

    def __init__(self, rows: Sequence[tuple[Path, str]]) -> None:
        """Set up; nothing is read yet."""
        super().__init__([len(rows)])
        self._rows = rows

    def read(self, index: int) -> ImageSample:
        """Read a picture with its caption."""
        path, caption = self._rows[index]
        with decoding(str(path), "it"):
            return ImageSample(str(path), path.read_bytes(), caption)


def open_listed(rows: Sequence[tuple[Path, str]], *, image_size: int) -> BatchReader:
    """Open the pictures of `list_pictures`, of which none may be bad."""
    config = SourceConfig(data_format="folder", image_size=image_size, device_batch_size=1, seed=0)
    reader = make_batches(ListedPictures(rows), config=config)
    reader.may_skip = False
    return reader


def open_pictures(place: str, *, flag: str, image_size: int) -> BatchReader:
    """Open a data set of pictures, of which none may be bad."""
    with blamed_on(flag):
        config = SourceConfig(
            data_format=data.detect_format(place),
            remote=place,
            image_size=image_size,
            device_batch_size=1,
            seed=0,
        )
        reader = data.open_batches(config)
    reader.may_skip = False
    return reader


class PictureBatch(NamedTuple):
    """Pictures as uint8 (B, 3, S, S), with their numbers and captions."""

    numbers: Sequence[int]
    pictures: Tensor
    captions: Sequence[str]


def read_pictures(
    reader: BatchReader, numbers: Sequence[int] | None = None, *, batch_size: int
) -> Iterator[PictureBatch]:
    """Read the pictures of some numbers, or all, but for bad ones that may be left out."""
    numbers = range(reader.num_samples) if numbers is None else numbers
    for first in range(0, len(numbers), batch_size):
        good = reader.read_good(keys_of_first_epoch(numbers[first : first + batch_size]))
        if good.keys:
            known = [key.index for key in good.keys]
            yield PictureBatch(known, good.tensors["image"], good.captions)


class Scores:
    """Collects the features and similarities of this rank's pictures, and scores all ranks'."""

    def __init__(self, networks: Mapping[str, Any]) -> None:
        """Begin without pictures; `networks` has ``fid``, ``clip`` or both."""
        self._fid, self._clip = networks.get("fid"), networks.get("clip")
        self._reference: dict[int, np.ndarray] = {}
        self._features: dict[int, np.ndarray] = {}
        self._similarities: dict[int, float] = {}

    def add_reference(self, batch: PictureBatch) -> None:
        """Add pictures that the scored ones are compared with."""
        if self._fid is not None:
            features = self._fid.features(batch.pictures)
            self._reference |= zip(batch.numbers, features, strict=True)

    def add_generated(self, batch: PictureBatch) -> None:
        """Add pictures that are scored, with their captions."""
        if self._fid is not None:
            features = self._fid.features(batch.pictures)
            self._features |= zip(batch.numbers, features, strict=True)
        if self._clip is not None:
            found = self._clip.similarities(batch.pictures, batch.captions).tolist()
            self._similarities |= zip(batch.numbers, found, strict=True)

    def compute(self, ranks: Ranks, *, alone: Alone = contextlib.nullcontext) -> dict[str, Any]:
        """The scores of the pictures of all ranks, on every rank; each has to call."""
        parts = (self._reference, self._features, self._similarities)
        of_all = [distributed.gather_numbered(part, ranks) for part in parts]
        facts: dict[str, Any] = {}
        with alone():  # the other ranks wait
            if ranks.rank == 0:
                facts = self._facts_of(*of_all)
        return distributed.broadcast(facts, ranks)

    def _facts_of(
        self, reference: list[np.ndarray], features: list[np.ndarray], similarities: list[float]
    ) -> dict[str, Any]:
        num_pictures = max(len(features), len(similarities))
        fewest = num_pictures if self._fid is None else min(num_pictures, len(reference))
        if fewest < 2:
            raise RunError(f"Scores need two pictures and there are {fewest}.")
        facts: dict[str, Any] = {"num_pictures": num_pictures}
        if self._fid is not None:
            facts |= _fid_facts(reference, features)
            facts["fid_network"] = self._fid.describe()
        if self._clip is not None:
            facts |= _clip_facts(similarities)
            facts["clip_network"] = self._clip.describe()
        for name in ("fid", "clip_score"):
            if not math.isfinite(facts.get(name, 0.0)):
                raise RunError(f"{name} is not finite: the network gives no finite numbers.")
        return facts


def score_model(
    model: DiffusionModel,
    reader: BatchReader,
    *,
    networks: Mapping[str, Any],
    num_images: int,
    seed: int,
    tokenize: Tokenize,
    settings: DrawingSettings,
    ranks: Ranks,
    check: Callable[[], None] = lambda: None,
    alone: Alone = contextlib.nullcontext,
) -> dict[str, Any]:
    """Generate a picture for the caption of each held-out picture, and score them.

    The model is the same on every rank, or sharded; every rank has to call. At most `num_images`
    held-out pictures are taken, from the first on. They and those of `settings` are squares of one
    size. Each batch is read in a context of `alone`, and `check` is called after each denoising
    step, both equally often on every rank; they may raise. The scores are the same for any number
    of ranks.
    """
    from sdbench.models.drawing import draw_share
    from sdbench.models.samplers import default_sampler

    num_images = min(num_images, reader.num_samples)
    scores = Scores(networks)
    captions: dict[int, str] = {}
    share = range(ranks.rank, num_images, ranks.world_size)
    size = settings.batch_size
    for first in range(0, math.ceil(num_images / ranks.world_size), size):
        with alone():
            # A rank may have no picture of the last batch.
            for batch in read_pictures(reader, share[first : first + size], batch_size=size):
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
        "image_size": settings.shape.width,
        "sampler": settings.sampler or default_sampler(model.objective.config),
        "num_steps": settings.num_steps,
        "guidance_scale": settings.guidance_scale,
    }
    return scores.compute(ranks, alone=alone) | how


def _frechet_distance(reference: np.ndarray, features: np.ndarray) -> float:
    """The Frechet distance of two sets of features (N, D), as of normal distributions.

    |m1 - m2|^2 + Tr(C1 + C2 - 2 (C1 C2)^(1/2)) with unbiased covariances (arXiv 1706.08500). With
    C1 = A^T A and C2 = B^T B the trace of the root is the sum of the singular values of A B^T.
    This takes no root of rounding errors if there are fewer pictures than features. torchmetrics
    1.7.4, with the eigenvalues of C1 C2, gives -0.3 for two equal sets of 256 x 2048 features.
    """
    means, factors = [], []
    for matrix in (torch.from_numpy(reference), torch.from_numpy(features)):
        mean = matrix.mean(0)
        centred = (matrix - mean) / math.sqrt(len(matrix) - 1)
        means.append(mean)
        factors.append(torch.linalg.qr(centred, mode="r").R)
    root_trace = torch.linalg.svdvals(factors[0] @ factors[1].T).sum()
    traces = sum(factor.square().sum() for factor in factors)
    return float((means[0] - means[1]).square().sum() + traces - 2 * root_trace)


def describe(facts: dict[str, Any]) -> str:
    """Scores in words."""
    text = counted(facts["num_pictures"], "picture")
    if "fid" in facts:
        text += f", FID {facts['fid']:.4g} against {facts['num_reference']} of the reference"
    if "clip_score" in facts:
        text += f", CLIP score {facts['clip_score']:.2f} +- {facts['clip_score_error']:.2f}"
    return text + (f" ({facts['fid_note']})" if facts.get("fid_note") else "")


def _fid_facts(reference: list[np.ndarray], features: list[np.ndarray]) -> dict[str, Any]:
    """`fid`, `num_reference`, `num_features`, and `fid_note`: a caveat, or None."""
    fewest = min(len(reference), len(features))
    num_features = len(features[0])
    note = None
    if fewest <= num_features:
        note = (
            f"{fewest} pictures do not determine the covariance of {num_features} features: this "
            "FID is biased, and comparable only at the same number of pictures"
        )
    return {
        "fid": _frechet_distance(np.stack(reference), np.stack(features)),
        "num_reference": len(reference),
        "num_features": num_features,
        "fid_note": note,
    }


def _clip_facts(similarities: list[float]) -> dict[str, float]:
    """`clip_score` and its standard error `clip_score_error`.

    The mean over pictures of 100 max(cos, 0), as is usual for text to image. CLIPScore itself
    (arXiv 2104.08718) is 2.5 max(cos, 0), with "A photo depicts" before each caption.
    """
    scores = 100 * np.maximum(similarities, 0.0)
    return {
        "clip_score": float(scores.mean()),
        "clip_score_error": float(scores.std(ddof=1) / math.sqrt(len(scores))),
    }
