"""`python -m sdbench score`: FID and CLIP score of the pictures in a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sdbench.base.errors import ConfigError
from sdbench.base.files import write_json
from sdbench.base.progress import Progress
from sdbench.settings.kinds import POSITIVE, TEXT
from sdbench.settings.recipe import WatchSettings
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting, shared

RESULT_NAME = "score.json"
EPILOG = """\
examples:
  python generate.py --model_name runs/first/model --prompt_file prompts.csv --folder drawn
  python -m sdbench score drawn --clip_network clip-vit-large-patch14
  python -m sdbench score drawn --reference held-out --fid_network inception-2015-12-05.pt

Networks see squares as large as the first picture allows: the centres of pictures of other shapes,
drawn or of the reference.

FID is comparable between sets of the same number of pictures, by the same network.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreFlags:
    """Flags of the command."""

    folder: str = setting(
        TEXT,
        REQUIRED,
        "loose pictures of generate.py, or a folder with captions.csv",
        is_positional=True,
    )
    reference: str | None = setting(
        TEXT, None, "pictures that FID compares with: a data set as for training"
    )
    fid_network: str | None = shared(WatchSettings, "fid_network")
    clip_network: str | None = shared(WatchSettings, "clip_network")
    batch_size: int = setting(POSITIVE, 32, "pictures per batch", spelling="device_batch_size")


def main(argv: Sequence[str] | None = None) -> int:
    """Score the pictures of a folder, at the size of the first one; return the exit code."""
    flags = parse(
        ScoreFlags, argv, description=__doc__, epilog=EPILOG, prog="python -m sdbench score"
    ).config
    from sdbench.data.batches.transforms import open_picture
    from sdbench.data.formats.pictures import list_pictures
    from sdbench.evaluate.networks import open_networks
    from sdbench.evaluate.scores import Scores, describe, open_listed, open_pictures, read_pictures
    from sdbench.ranks.distributed import ALONE

    rows = list_pictures(Path(flags.folder))
    if len(rows) < 2:
        raise ConfigError(
            "scores need two pictures",
            value=len(rows),
            allowed="a folder with 2 or more",
            flag="FOLDER",
        )
    if (flags.reference is None) != (flags.fid_network is None):
        raise ConfigError(
            "FID compares pictures with others by a network",
            value=flags.reference,
            allowed="a data set and a network, or neither",
            flag="--reference or --fid_network",
        )
    image_size = min(open_picture(rows[0][0]).size)
    places = {"fid": flags.fid_network, "clip": flags.clip_network}
    scores = Scores(open_networks(places, image_size=image_size))
    sources = [(open_listed(rows, image_size=image_size), scores.add_generated)]
    if flags.reference is not None:
        reference = open_pictures(flags.reference, flag="--reference", image_size=image_size)
        sources.append((reference, scores.add_reference))
    with Progress(sum(one.num_samples for one, _ in sources), unit="picture") as progress:
        for reader, add in sources:
            for batch in read_pictures(reader, batch_size=flags.batch_size):
                add(batch)
                progress.advance(len(batch.numbers))
    facts = scores.compute(ALONE) | {"image_size": image_size, "reference": flags.reference}
    path = Path(flags.folder, RESULT_NAME)
    write_json(path, facts)
    print(f"{describe(facts)}: {path}")
    return 0
