"""`python -m sdbench before-after`: pictures of a subject before and after its training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.files import write_json
from sdbench.base.units import counted
from sdbench.data.pictures import (
    AFTER,
    BEFORE,
    RESULT_NAME,
    SHEET_NAME,
    list_pictures,
)
from sdbench.settings.kinds import POSITIVE, TEXT
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting
from sdbench.settings.similarity import SimilaritySettings

if TYPE_CHECKING:
    from PIL import Image

    from sdbench.data.pipeline.batches import BatchReader

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
EPILOG = """\
examples:
  python -m sdbench before-after runs/my-dog --subject my-dog --prompt "photo of a unqtkn dog" \\
      --class_prompt "photo of a dog" --clip_network clip-vit-large-patch14

`before` and `after` are folders of generate.py, drawn for the same prompts with the same seeds.
before_after.png shows them side by side. With networks, dreambooth.json has their similarities.
"""

Listed = list[tuple[Path, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeforeAfterFlags(SimilaritySettings):
    """Flags of the command."""

    folder: str = setting(
        TEXT,
        REQUIRED,
        f"folder with the pictures in {BEFORE} and {AFTER}; the results go there",
        is_positional=True,
    )
    subject: str = setting(TEXT, REQUIRED, "the subject's own pictures: a data set as for training")
    batch_size: int = setting(POSITIVE, 32, "pictures per batch", spelling="device_batch_size")


def main(argv: Sequence[str] | None = None) -> int:
    """Set pictures side by side, and score them by the given networks; return the exit code."""
    flags = parse(
        BeforeAfterFlags,
        argv,
        description=__doc__,
        epilog=EPILOG,
        prog="python -m sdbench before-after",
    ).config
    folder = Path(flags.folder)
    before, after = (list_pictures(folder / name) for name in (BEFORE, AFTER))
    if [caption for _, caption in before] != [caption for _, caption in after]:
        raise ConfigError(
            "pictures before and after are of different prompts",
            value=str(folder),
            allowed=f"{BEFORE} and {AFTER} drawn for the same prompts",
            flag="FOLDER",
        )
    sheet = _make_sheet(before, after)
    sheet.save(folder / SHEET_NAME)
    print(f"Before and after: {folder / SHEET_NAME}")
    if flags.clip_network is not None or flags.dino_network is not None:
        facts = score(flags, before, after)
        write_json(folder / RESULT_NAME, facts)
        print(f"\n{_describe_scores(facts['scores'])}")
        pictures = counted(facts["num_subject_pictures"], "picture")
        print(f"\n{pictures} of the subject: {folder / RESULT_NAME}")
    return 0


def score(flags: BeforeAfterFlags, before: Listed, after: Listed) -> dict[str, Any]:
    """The content of dreambooth.json; pictures are compared at the size of the first one."""
    from sdbench.data.pipeline.transforms import open_picture
    from sdbench.evaluate.networks import open_networks
    from sdbench.evaluate.scores import open_listed, open_pictures, read_pictures

    image_size = min(open_picture(before[0][0]).size)
    networks = open_networks(flags, image_size=image_size, kinds=("clip", "dino"))

    def open_drawn(prompt: str, *, flag: str) -> list[BatchReader]:
        drawn = [_of_prompt(listed, prompt, flag=flag) for listed in (before, after)]
        return [open_listed(rows, image_size=image_size) for rows in drawn]

    def embed(network: Any, pictures: BatchReader) -> np.ndarray:
        batches = read_pictures(pictures, batch_size=flags.batch_size)
        return np.concatenate([network.embeddings(batch.pictures) for batch in batches])

    generated, generated_class = open_drawn(flags.prompt, flag="--prompt"), []
    if flags.class_prompt is not None:
        generated_class = open_drawn(flags.class_prompt, flag="--class_prompt")
    subject = open_pictures(
        flags.subject, flag="--subject", image_size=image_size, caption=flags.prompt
    )
    scores = {}
    for name, network in networks.items():
        embedded = [embed(network, one) for one in (subject, *generated, *generated_class)]
        if not all(np.isfinite(one).all() for one in embedded):
            raise RunError(
                "The similarity of pictures is not finite: the network gives no finite numbers."
            )
        scores[name] = compare(embedded[0], generated=embedded[1:3], generated_class=embedded[3:])
    return {
        "prompt": flags.prompt,
        "class_prompt": flags.class_prompt,
        "subject": flags.subject,
        "num_subject_pictures": subject.num_samples,
        "num_drawn_pictures": generated[0].num_samples,
        "num_drawn_class_pictures": generated_class[0].num_samples if generated_class else None,
        "image_size_px": image_size,
        "unit": UNIT,
        "networks": {name: network.describe() for name, network in networks.items()},
        "scores": scores,
    }


def compare(
    subject: np.ndarray, *, generated: Sequence[np.ndarray], generated_class: Sequence[np.ndarray]
) -> dict[str, dict[str, Any]]:
    """The similarity of pictures before and after a training, from embeddings (N, D) of length 1.

    Each figure is the mean cosine of all pairs, as in the DreamBooth paper (arXiv 2208.12242).
    Among class pictures, pairs of the same seed are left out, which are similar for that reason.
    Both lists have the pictures before and after; class pictures have the same seeds in the same
    order. Returns the figures of `MEANINGS`, without class pictures only the first.
    """
    means = {"subject": [_mean_cosine(one, subject) for one in generated]}
    if generated_class:
        means["class"] = [
            _mean_cosine(one, generated_class[0], of_same_seeds=True) for one in generated_class
        ]
        means["class_to_subject"] = [_mean_cosine(one, subject) for one in generated_class]
    return {
        name: {
            "before": before,
            "after": after,
            "num_pairs_before": num_before,
            "num_pairs_after": num_after,
        }
        for name, ((before, num_before), (after, num_after)) in means.items()
    }


def _mean_cosine(
    one: np.ndarray, other: np.ndarray, *, of_same_seeds: bool = False
) -> tuple[float | None, int]:
    """The mean cosine of all pairs from two sets, and the number of pairs.

    With `of_same_seeds` both sets have the same seeds in the same order, and pairs of one seed are
    left out.
    """
    total, num_pairs = one.sum(0) @ other.sum(0), len(one) * len(other)
    if of_same_seeds:
        total, num_pairs = total - (one * other).sum(), num_pairs - len(one)
    return (float(total / num_pairs) if num_pairs else None), num_pairs


def _describe_scores(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """The scores of each network as a table for a terminal."""
    from sdbench.report.tables import make_cell, make_table, to_terminal

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
    return to_terminal(make_table(rows))


def _of_prompt(listed: Listed, prompt: str, *, flag: str) -> Listed:
    rows = [row for row in listed if row[1] == prompt.strip()]  # as generate.py strips it
    if not rows:
        captions = dict.fromkeys(caption for _, caption in listed)
        raise ConfigError(
            "no picture was drawn for this prompt",
            value=prompt,
            allowed=" | ".join(captions),
            flag=flag,
        )
    return rows


def _make_sheet(before: Listed, after: Listed) -> Image.Image:
    """A row for each prompt: its pictures from before, then those from after."""
    from sdbench.data.pipeline.transforms import open_picture
    from sdbench.models.drawing import make_grid

    pictures, captions = [], []
    num_each = 0
    numbered = list(zip(before, after, strict=True))
    for caption, group in itertools.groupby(numbered, key=lambda pair: pair[0][1]):
        pairs = list(group)
        num_each = len(pairs)
        for when, place in ((BEFORE, 0), (AFTER, 1)):
            for pair in pairs:
                pictures.append(open_picture(pair[place][0]))
            captions += [f"{when}: {caption}"] * len(pairs)
    return make_grid(pictures, num_columns=2 * num_each, captions=captions)
