"""`Scores`: FID and CLIP score of pictures that are given batch by batch, on one rank or more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sdbench.base.errors import RunError
from sdbench.data.pipeline.transforms import decode_image
from sdbench.data.samples import BadSampleError, ImageSample, check_whole, undecodable
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks
from sdbench.tasks.score.networks import Networks


class PictureBatch(NamedTuple):
    """Pictures with their numbers, as uint8 (B, 3, S, S), and their captions."""

    numbers: Sequence[int]
    pictures: Tensor
    captions: Sequence[str]


def read_pictures(
    read: Callable[[int], ImageSample],
    numbers: Sequence[int],
    *,
    image_size: int,
    batch_size: int,
    read_avif: bool = False,
    skips_bad: bool = False,
) -> Iterator[PictureBatch]:
    """Read pictures with captions, squares cut out of their centres as in training.

    Args:
        read: Gives the sample of a number.
        numbers: Which samples.
        image_size: Side of the pictures in pixels.
        batch_size: Samples that are read for a batch.
        read_avif: Value of ``--read_avif``.
        skips_bad: Leave out a sample that cannot be used.

    Raises:
        RunError: A sample cannot be used, and may not be left out.
    """
    for first in range(0, len(numbers), batch_size):
        good = []
        for number in numbers[first : first + batch_size]:
            try:
                decoded = _decode(read(number), image_size=image_size, read_avif=read_avif)
                good.append((number, *decoded))
            except BadSampleError as error:
                if not skips_bad:
                    raise RunError(str(error)) from error
        if good:
            known, pictures, captions = zip(*good, strict=True)
            yield PictureBatch(known, torch.from_numpy(np.stack(pictures)), captions)


def _decode(sample: ImageSample, *, image_size: int, read_avif: bool) -> tuple[np.ndarray, str]:
    check_whole(sample)
    assert sample.image is not None and sample.caption is not None
    try:
        picture = decode_image(sample.image, image_size=image_size, read_avif=read_avif)
    except (OSError, ValueError) as error:
        raise undecodable(sample.name, error) from error
    return picture, sample.caption


class Scores:
    """What the networks say of the pictures that this rank has."""

    def __init__(self, networks: Networks) -> None:
        """Begin without pictures."""
        self._networks = networks
        self._reference: dict[int, np.ndarray] = {}
        self._features: dict[int, np.ndarray] = {}
        self._similarities: dict[int, float] = {}

    def add_reference(self, batch: PictureBatch) -> None:
        """Look at pictures that others are compared with."""
        if self._networks.fid is not None:
            features = self._networks.fid.features(batch.pictures)
            self._reference |= zip(batch.numbers, features, strict=True)

    def add_drawn(self, batch: PictureBatch) -> None:
        """Look at pictures that are compared, and at their captions."""
        fid, clip = self._networks
        if fid is not None:
            self._features |= zip(batch.numbers, fid.features(batch.pictures), strict=True)
        if clip is not None:
            found = clip.similarities(batch.pictures, batch.captions).tolist()
            self._similarities |= zip(batch.numbers, found, strict=True)

    def compute(self, ranks: Ranks) -> dict[str, Any]:
        """The scores of the pictures of all ranks.

        Args:
            ranks: The place of this process; every rank has to call. Each number of a picture is
                on one of them.

        Returns:
            On every rank `num_pictures`, and by network its facts, as `_fid_facts` and
            `_clip_facts` give them.

        Raises:
            RunError: There are fewer than two pictures, or a network gives what is not finite.
        """
        parts = (self._reference, self._features, self._similarities)
        reference, features, similarities = (
            distributed.gather_numbered(part, ranks) for part in parts
        )
        facts: dict[str, Any] = {}
        if ranks.rank == 0:  # the others have nothing to do meanwhile, and wait
            facts["num_pictures"] = max(len(features), len(similarities))
            if self._networks.fid is not None:
                facts |= _fid_facts(reference, features)
                facts["fid_network"] = self._networks.fid.describe()
            if self._networks.clip is not None:
                facts |= _clip_facts(similarities)
                facts["clip_network"] = self._networks.clip.describe()
        return distributed.broadcast(facts, ranks)


def frechet_distance(reference: np.ndarray, features: np.ndarray) -> float:
    """The Frechet distance of two sets of features, taken for normal distributions.

    |m1 - m2|^2 + Tr(C1 + C2 - 2 (C1 C2)^(1/2)) with unbiased covariances (arXiv 1706.08500). With
    C1 = A^T A and C2 = B^T B the trace of the root is the sum of the singular values of A B^T.
    That needs no root of rounding errors where pictures are fewer than features: on two equal sets
    of 256 x 2048 features torchmetrics 1.7.4, which takes the eigenvalues of C1 C2, gives -0.3.

    Args:
        reference: (N, D), N at least 2.
        features: (M, D), M at least 2.
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


def tell(facts: dict[str, Any]) -> str:
    """Scores in words."""
    told = [f"{facts['num_pictures']} pictures"]
    if "fid" in facts:
        told.append(f"FID {facts['fid']:.4g} against {facts['num_reference']} of the reference")
    if "clip_score" in facts:
        told.append(f"CLIP score {facts['clip_score']:.2f} +- {facts['clip_score_error']:.2f}")
    notes = [f" ({facts['fid_note']})"] if facts.get("fid_note") else []
    return "".join([", ".join(told), *notes])


def _fid_facts(reference: list[np.ndarray], features: list[np.ndarray]) -> dict[str, Any]:
    """`fid`, `num_reference`, `num_features`, and `fid_note`: None, or what is wrong with it."""
    _check_enough(len(reference))
    _check_enough(len(features))
    num_features = len(features[0])
    fid = frechet_distance(np.stack(reference), np.stack(features))
    _check_finite([fid], "FID")
    fewest = min(len(reference), len(features))
    note = None
    if fewest <= num_features:
        note = (
            f"{fewest} pictures do not determine the covariance of {num_features} features: this "
            "FID is biased, and comparable only at the same number of pictures"
        )
    return {
        "fid": fid,
        "num_reference": len(reference),
        "num_features": num_features,
        "fid_note": note,
    }


def _clip_facts(similarities: list[float]) -> dict[str, float]:
    """`clip_score` and its standard error `clip_score_error`.

    The mean over pictures of 100 max(cos, 0), as is usual for text to image. CLIPScore itself
    (arXiv 2104.08718) is 2.5 max(cos, 0), with "A photo depicts" before each caption.
    """
    _check_enough(len(similarities))
    scores = 100 * np.maximum(similarities, 0.0)
    _check_finite(scores, "the CLIP score")
    return {
        "clip_score": float(scores.mean()),
        "clip_score_error": float(scores.std(ddof=1) / math.sqrt(len(scores))),
    }


def _check_enough(num_pictures: int) -> None:
    if num_pictures < 2:
        raise RunError(f"Scores need two pictures and there are {num_pictures}.")


def _check_finite(values: Iterable[float], what: str) -> None:
    if not np.isfinite(values).all():
        raise RunError(f"{what} is not finite: the network gives no finite numbers.")
