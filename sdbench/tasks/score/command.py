"""`python -m sdbench score`: FID and CLIP score of the pictures in a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError, blamed_on
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
        TEXT, None, "pictures that FID compares with: a data set as training takes it"
    )
    fid_network: str | None = shared(WatchSettings, "fid_network")
    clip_network: str | None = shared(WatchSettings, "clip_network")
    batch_size: int = setting(
        POSITIVE, 32, "pictures that are looked at together", spelling="device_batch_size"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Score the pictures of a folder.

    Args:
        argv: Command-line arguments; None takes those of the process.

    Returns:
        The exit code.

    Raises:
        ConfigError: There are no pictures, or no networks.
        RunError: A picture cannot be decoded, or a network gives no finite numbers.
    """
    flags = parse(
        ScoreFlags, argv, description=__doc__, epilog=EPILOG, prog="python -m sdbench score"
    ).config
    from sdbench.tasks.score.scores import tell

    facts = score_folder(flags)
    path = Path(flags.folder, RESULT_NAME)
    write_json(path, facts)
    print(f"{tell(facts)}: {path}")
    return 0


def score_folder(flags: ScoreFlags) -> dict[str, Any]:
    """Score the pictures of a folder, at the size that the first of them has.

    Raises:
        ConfigError: As `main`.
        RunError: As `main`.
    """
    import torch

    from sdbench import data
    from sdbench.data.pictures import list_pictures, open_picture, reader_of
    from sdbench.data.prepare.rows import describe_source
    from sdbench.ranks.distributed import Ranks
    from sdbench.tasks.score.networks import open_networks, try_out
    from sdbench.tasks.score.scores import Scores, read_pictures

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
    with open_picture(rows[0][0]) as first:
        image_size = min(first.size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    networks = open_networks(flags, device=device)
    try_out(networks, image_size=image_size)
    scores = Scores(networks)
    sources = [(reader_of(rows), len(rows), scores.add_drawn)]
    if flags.reference is not None:
        with blamed_on("--reference"):
            samples = data.open_samples(describe_source(flags.reference, data_format="auto"))
        sources.append((samples.read, len(samples), scores.add_reference))
    with Progress(sum(count for _, count, _ in sources), unit="picture") as progress:
        for read, count, add in sources:
            batches = read_pictures(
                read, range(count), image_size=image_size, batch_size=flags.batch_size
            )
            for batch in batches:
                add(batch)
                progress.advance(len(batch.numbers))
    alone = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
    return scores.compute(alone) | {"image_size": image_size, "reference": flags.reference}
