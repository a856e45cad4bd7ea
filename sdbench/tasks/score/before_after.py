"""`python -m sdbench before-after`: pictures of a subject before and after its training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError
from sdbench.base.files import write_json
from sdbench.data.pictures import AFTER, BEFORE, SHEET_NAME, list_pictures, open_picture
from sdbench.settings.kinds import POSITIVE, TEXT
from sdbench.settings.likeness import LikenessSettings
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting

if TYPE_CHECKING:
    from PIL import Image

    from sdbench.tasks.score.scores import Pictures

RESULT_NAME = "dreambooth.json"
EPILOG = """\
examples:
  python -m sdbench before-after runs/my-dog --subject my-dog --prompt "photo of a unqtkn dog" \\
      --class_prompt "photo of a dog" --clip_network clip-vit-large-patch14

`before` and `after` are folders of generate.py, drawn for the same prompts with the same seeds.
before_after.png has them side by side, and dreambooth.json, with networks, how alike they are.
"""

Listed = list[tuple[Path, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeforeAfterFlags(LikenessSettings):
    """Flags of the command."""

    folder: str = setting(
        TEXT,
        REQUIRED,
        f"folder with the pictures in {BEFORE} and {AFTER}; the results go there",
        is_positional=True,
    )
    subject: str = setting(
        TEXT, REQUIRED, "the subject's own pictures: a data set as training takes it"
    )
    batch_size: int = setting(
        POSITIVE, 32, "pictures that a network looks at together", spelling="device_batch_size"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Set pictures side by side, and score them by the given networks; return the exit code.

    Raises:
        ConfigError: Pictures or a network cannot be used.
        RunError: A picture cannot be decoded, or a network gives no finite numbers.
    """
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
        from sdbench.report.tables import to_terminal
        from sdbench.tasks.score.similarity import make_similarity_table

        facts = score(flags, before, after)
        write_json(folder / RESULT_NAME, facts)
        print(f"\n{to_terminal(make_similarity_table(facts['scores']))}")
        print(f"\n{facts['num_subject_pictures']} pictures of the subject: {folder / RESULT_NAME}")
    return 0


def score(flags: BeforeAfterFlags, before: Listed, after: Listed) -> dict[str, Any]:
    """The content of dreambooth.json; pictures are compared at the size of the first one.

    Args:
        flags: Of the command.
        before: Pictures with their captions.
        after: Pictures with the same captions.

    Raises:
        ConfigError: As `main`.
        RunError: As `main`.
    """
    from sdbench.tasks.score.networks import open_networks
    from sdbench.tasks.score.scores import open_pictures, side_of
    from sdbench.tasks.score.similarity import UNIT, compare, embed

    image_size = side_of(before[0][0])
    networks = open_networks(flags, image_size=image_size, kinds=("clip", "dino"))
    drawn = [_of_prompt(listed, flags.prompt, flag="--prompt") for listed in (before, after)]
    drawn_class = None
    if flags.class_prompt is not None:
        drawn_class = [
            _of_prompt(listed, flags.class_prompt, flag="--class_prompt")
            for listed in (before, after)
        ]
    # What the subject's own captions say does not matter here.
    subject = open_pictures(flags.subject, flag="--subject", caption=flags.prompt)
    sizes = {"image_size": image_size, "batch_size": flags.batch_size}
    scores = {
        name: compare(
            subject=embed(subject, network, **sizes),
            drawn=[embed(one, network, **sizes) for one in drawn],
            drawn_class=drawn_class and [embed(one, network, **sizes) for one in drawn_class],
        )
        for name, network in networks.items()
    }
    return {
        "prompt": flags.prompt,
        "class_prompt": flags.class_prompt,
        "subject": flags.subject,
        "num_subject_pictures": subject.number,
        "num_drawn_pictures": drawn[0].number,
        "num_drawn_class_pictures": drawn_class and drawn_class[0].number,
        "image_size_px": image_size,
        "unit": UNIT,
        "networks": {name: network.describe() for name, network in networks.items()},
        "scores": scores,
    }


def _of_prompt(listed: Listed, prompt: str, *, flag: str) -> Pictures:
    from sdbench.tasks.score.scores import Pictures

    rows = [row for row in listed if row[1] == prompt.strip()]  # as generate.py strips it
    if not rows:
        captions = dict.fromkeys(caption for _, caption in listed)
        raise ConfigError(
            "no picture was drawn for this prompt",
            value=prompt,
            allowed=" | ".join(captions),
            flag=flag,
        )
    return Pictures.of(rows)


def _make_sheet(before: Listed, after: Listed) -> Image.Image:
    """A row for each prompt: its pictures from before, then those from after."""
    from sdbench.models.drawing import make_grid

    pictures, captions = [], []
    num_each = 0
    numbered = list(zip(before, after, strict=True))
    for caption, group in itertools.groupby(numbered, key=lambda pair: pair[0][1]):
        pairs = list(group)
        num_each = len(pairs)
        for when, place in ((BEFORE, 0), (AFTER, 1)):
            for pair in pairs:
                with open_picture(pair[place][0]) as picture:
                    pictures.append(picture.convert("RGB"))
            captions += [f"{when}: {caption}"] * len(pairs)
    return make_grid(pictures, num_columns=2 * num_each, captions=captions)
