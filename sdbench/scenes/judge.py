"""`python -m sdbench judge`: the share of pictures with the colour and the shape asked for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sdbench.base.errors import ConfigError
from sdbench.base.files import write_json
from sdbench.base.units import counted
from sdbench.data.formats.pictures import list_pictures
from sdbench.scenes.write import BACKGROUND, COLOURS, SHAPES, cover
from sdbench.settings.kinds import TEXT
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting

# The colour and the shape that a caption asks for.
CAPTION = re.compile(rf"\b({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})\b")
VERDICT_NAME = "judge.json"
# Distance in RGB, of at most 442, from which a pixel is not background.
MIN_DISTANCE = 60.0
# Share of the square of a picture's shorter side below which there is no shape in it.
MIN_AREA = 0.01
EPILOG = """\
examples:
  python generate.py --model_name runs/shapes/model --prompt_file shapes/prompts.txt \\
      --guidance_scale 1.5 --folder drawn
  python -m sdbench judge drawn
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeFlags:
    """Flags of the command."""

    folder: str = setting(
        TEXT, REQUIRED, "pictures of generate.py, or a folder with captions.csv", is_positional=True
    )


class Seen(NamedTuple):
    """The content of a picture; None for what was not recognized.

    A shape is whole if a pixel or more is between it and each edge.
    """

    colour: str | None
    shape: str | None
    is_whole: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the pictures of a folder; return the exit code."""
    from sdbench.data.batches.transforms import open_picture  # with torch

    flags = parse(
        JudgeFlags, argv, description=__doc__, epilog=EPILOG, prog="python -m sdbench judge"
    ).config
    folder = Path(flags.folder)
    verdicts, rights = [], []
    for path, caption in list_pictures(folder):
        asked = CAPTION.search(caption)
        if asked is None:
            raise ConfigError(
                "a caption names no colour and shape",
                value=caption,
                allowed="a folder with pictures of coloured shapes",
                flag="FOLDER",
            )
        seen = look_at(np.asarray(open_picture(path)))
        right_colour, right_shape = seen.colour == asked[1], seen.shape == asked[2]
        rights.append((right_colour, right_shape, seen.is_whole))
        facts = {"file": path.name, "caption": caption, **seen._asdict()}
        verdicts.append(facts | {"colour_is_right": right_colour, "shape_is_right": right_shape})
    colour_share, shape_share, whole_share = np.mean(rights, axis=0).tolist()
    summary = {
        "num_pictures": len(verdicts),
        "colour_share": colour_share,
        "shape_share": shape_share,
        "both_share": float(np.mean([colour and shape for colour, shape, _ in rights])),
        "whole_share": whole_share,
    }
    write_json(folder / VERDICT_NAME, {**summary, "pictures": verdicts})
    pictures = counted(len(verdicts), "picture")
    print(
        f"{pictures}: the colour is right in {colour_share:.1%}, the shape in "
        f"{shape_share:.1%}, both in {summary['both_share']:.1%}; the shape lies wholly inside in "
        f"{whole_share:.1%}"
    )
    return 0


def look_at(picture: np.ndarray) -> Seen:
    """Return what a picture, RGB uint8 (H, W, 3) on a white background, shows.

    The colour is the nearest to the median of the pixels of the shape. The shape is the one with
    the largest intersection over union with these pixels, within the box around them.
    """
    from scipy import ndimage

    pixels = picture.astype(float)
    rough = _distance(pixels, BACKGROUND) > MIN_DISTANCE
    min_pixels = MIN_AREA * min(rough.shape) ** 2
    if rough.sum() < min_pixels:
        return Seen(None, None)
    median = np.median(pixels[rough], axis=0)
    colour = min(COLOURS, key=lambda name: _distance(median, COLOURS[name]))
    # The edge is where background and colour have equal shares; specks are left out.
    parts, _ = ndimage.label(_distance(pixels, median) < _distance(pixels, BACKGROUND))
    sizes = np.bincount(parts.ravel())
    sizes[0] = 0
    largest = int(sizes.argmax())
    if sizes[largest] < min_pixels:
        return Seen(colour, None)
    box = ndimage.find_objects(parts)[largest - 1]
    is_whole = all(
        part.start > 0 and part.stop < side for part, side in zip(box, parts.shape, strict=True)
    )
    return Seen(colour, _find_shape(parts[box] == largest), is_whole)


def _find_shape(mask: np.ndarray) -> str:
    """Return the shape of a mask that it fills from edge to edge."""
    y, x = (2 * (np.arange(side) + 0.5) / side - 1 for side in mask.shape)
    overlaps = {}
    for shape in SHAPES:
        ideal = cover(shape, x[None, :], y[:, None])
        overlaps[shape] = (mask & ideal).sum() / (mask | ideal).sum()
    return max(overlaps, key=lambda shape: overlaps[shape])


def _distance(pixels: np.ndarray, colour: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.linalg.norm(pixels - np.asarray(colour, dtype=float), axis=-1)
