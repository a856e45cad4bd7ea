"""How alike pictures are, as networks see them: drawn ones and a subject's, before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sdbench.base.errors import RunError
from sdbench.data.samples import ImageSample
from sdbench.report.tables import Cell, Table, make_cell, make_table
from sdbench.settings.likeness import LikenessSettings
from sdbench.tasks.score.networks import ClipNetwork, DinoNetwork
from sdbench.tasks.score.scores import read_pictures

UNIT = "mean cosine of image embeddings over pairs of pictures, from -1 to 1"
# What the rows of the table say, by the names in the JSON file.
MEANINGS = {
    "subject": (
        "subject's prompt: the subject's own pictures",
        "it rises as the subject comes out",
    ),
    "class": ("class prompt: class pictures from before", "it falls as the class drifts"),
    "class_to_subject": (
        "class prompt: the subject's own pictures",
        "it rises as the class turns into the subject",
    ),
}


class ImageNetwork(Protocol):
    """A network that sees how alike pictures are."""

    def try_out(self) -> None:
        """Look at a blank picture; a ConfigError says why it cannot."""

    def embeddings(self, pictures: Tensor) -> np.ndarray:
        """Embeddings (B, D) of uint8 pictures (B, 3, H, W), of length 1."""

    def describe(self) -> dict[str, str]:
        """Name and sha256."""


class Pictures(NamedTuple):
    """Pictures that are read by number."""

    read: Callable[[int], ImageSample]
    number: int


def open_image_networks(settings: LikenessSettings) -> dict[str, ImageNetwork]:
    """Load the networks that were asked for, and let each look at a blank picture.

    Raises:
        ConfigError: One cannot be used.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places = {"clip": (ClipNetwork, settings.clip_network)}
    places["dino"] = (DinoNetwork, settings.dino_network)
    networks = {
        name: kind(Path(place), device=device)
        for name, (kind, place) in places.items()
        if place is not None
    }
    for network in networks.values():
        network.try_out()
    return networks


def embed(
    pictures: Pictures, network: ImageNetwork, *, image_size: int, batch_size: int
) -> np.ndarray:
    """Embeddings (N, D) of squares cut out of the centres of pictures.

    Raises:
        RunError: A picture cannot be decoded, or the network gives no finite numbers.
    """
    batches = read_pictures(
        pictures.read, range(pictures.number), image_size=image_size, batch_size=batch_size
    )
    embeddings = np.concatenate([network.embeddings(batch.pictures) for batch in batches])
    if not np.isfinite(embeddings).all():
        raise RunError("The likeness of pictures is not finite: the network gives such numbers.")
    return embeddings


def compare(
    *,
    subject: np.ndarray,
    drawn: Sequence[np.ndarray],
    drawn_class: Sequence[np.ndarray] | None,
) -> dict[str, dict[str, Any]]:
    """The likeness of pictures before and after a training, from embeddings (N, D) of length 1.

    As in the paper of DreamBooth (arXiv 2208.12242) each figure is the mean cosine of all pairs;
    of those of class pictures with class pictures, without a picture and itself before, and without
    two of the same seed after, which are alike for that reason.

    Args:
        subject: Of the subject's own pictures.
        drawn: Of those drawn for its prompt, before and after.
        drawn_class: Of those drawn for the prompt of its class, before and after by the same seeds
            in the same order; None: there are none.

    Returns:
        `subject` and, with class pictures, `class` and `class_to_subject` (see `MEANINGS`), each
        with `before` and `after` and the number of pairs of either. Those of `class` are None where
        there is one class picture.
    """
    facts = {"subject": _facts(*(_across(one, subject) for one in drawn))}
    if drawn_class is not None:
        before, after = drawn_class
        facts["class"] = _facts(_of_other_seeds(before, before), _of_other_seeds(after, before))
        facts["class_to_subject"] = _facts(*(_across(one, subject) for one in drawn_class))
    return facts


Mean = tuple[float | None, int]


def _facts(before: Mean, after: Mean) -> dict[str, Any]:
    return {
        "before": before[0],
        "after": after[0],
        "num_pairs_before": before[1],
        "num_pairs_after": after[1],
    }


def _across(one: np.ndarray, other: np.ndarray) -> Mean:
    """The mean cosine of each of one set with each of another, and the number of pairs."""
    return float(one.mean(0) @ other.mean(0)), len(one) * len(other)


def _of_other_seeds(one: np.ndarray, other: np.ndarray) -> Mean:
    """As `_across`, of sets in the same order of seeds: pairs of different seeds alone."""
    num_pairs = len(one) * (len(one) - 1)
    if not num_pairs:
        return None, 0
    all_pairs, of_same_seed = one.sum(0) @ other.sum(0), (one * other).sum()
    return float((all_pairs - of_same_seed) / num_pairs), num_pairs


def make_likeness_table(scores: Mapping[str, Mapping[str, Any]]) -> Table:
    """The scores of each network as a table for a person."""
    rows = []
    for network, facts in scores.items():
        for name, values in facts.items():
            compared, meaning = MEANINGS[name]
            rows.append(
                {
                    "network": network,
                    "how alike (1: the same)": compared,
                    "before": _cell(values["before"]),
                    "after": _cell(values["after"]),
                    "pairs": make_cell(values["num_pairs_after"]),
                    "what it says": meaning,
                }
            )
    return make_table(rows)


def _cell(value: float | None) -> Cell:
    return make_cell(value, num_digits=3)
