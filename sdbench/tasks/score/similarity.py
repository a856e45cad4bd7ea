"""Similarity of generated pictures to those of a subject, before and after its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sdbench.base.errors import RunError
from sdbench.report.tables import Table, make_cell, make_table
from sdbench.tasks.score.networks import ImageNetwork
from sdbench.tasks.score.scores import Pictures, read_pictures

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


def embed(
    pictures: Pictures, network: ImageNetwork, *, image_size: int, batch_size: int
) -> np.ndarray:
    """Embeddings (N, D) of the centred squares of pictures.

    Raises:
        RunError: A picture cannot be decoded, or the network gives no finite numbers.
    """
    batches = read_pictures(
        pictures.read, range(pictures.number), image_size=image_size, batch_size=batch_size
    )
    embeddings = np.concatenate([network.embeddings(batch.pictures) for batch in batches])
    if not np.isfinite(embeddings).all():
        raise RunError("The similarity of pictures is not finite: the network gives such numbers.")
    return embeddings


def compare(
    *,
    subject: np.ndarray,
    drawn: Sequence[np.ndarray],
    drawn_class: Sequence[np.ndarray] | None,
) -> dict[str, dict[str, Any]]:
    """The similarity of pictures before and after a training, from embeddings (N, D) of length 1.

    As in the paper of DreamBooth (arXiv 2208.12242) each figure is the mean cosine of all pairs.
    Among class pictures, pairs of the same seed are left out, which are similar for that reason.

    Args:
        subject: Of the subject's own pictures.
        drawn: Of the pictures for its prompt, before and after.
        drawn_class: Of the pictures for the prompt of its class, before and after by the same seeds
            in the same order; None: not compared.

    Returns:
        `subject` and, with class pictures, `class` and `class_to_subject` (see `MEANINGS`), each
        with `before`, `after` and their numbers of pairs. Figures without a pair are None.
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
    """The mean cosine of all pairs from two sets, and the number of pairs."""
    return float(one.mean(0) @ other.mean(0)), len(one) * len(other)


def _of_other_seeds(one: np.ndarray, other: np.ndarray) -> Mean:
    """As `_across` for two sets in the same order of seeds, without the pairs of one seed."""
    num_pairs = len(one) * (len(one) - 1)
    if not num_pairs:
        return None, 0
    all_pairs, of_same_seed = one.sum(0) @ other.sum(0), (one * other).sum()
    return float((all_pairs - of_same_seed) / num_pairs), num_pairs


def make_similarity_table(scores: Mapping[str, Mapping[str, Any]]) -> Table:
    """The scores of each network as a table for a person."""
    rows = []
    for network, facts in scores.items():
        for name, values in facts.items():
            compared, meaning = MEANINGS[name]
            rows.append(
                {
                    "network": network,
                    "how alike (1: the same)": compared,
                    "before": make_cell(values["before"], num_digits=3),
                    "after": make_cell(values["after"], num_digits=3),
                    "pairs": make_cell(values["num_pairs_after"]),
                    "what it says": meaning,
                }
            )
    return make_table(rows)
