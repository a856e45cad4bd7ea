"""`python -m sdbench shapes`: a data set of coloured shapes, for training on a small scale."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sdbench.base.errors import ConfigError
from sdbench.base.files import check_folder
from sdbench.base.shape import Shape
from sdbench.base.units import counted
from sdbench.data.formats.identity import write_provenance
from sdbench.settings.kinds import NOT_NEGATIVE, POSITIVE, TEXT, read_shapes
from sdbench.settings.kinds import SHAPES as LIST_OF_SHAPES
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting

# RGB. Any two are at least 150 apart, and from the white background.
COLOURS = {
    "red": (220, 0, 0),
    "green": (0, 160, 0),
    "blue": (0, 0, 220),
    "yellow": (255, 220, 0),
    "cyan": (0, 200, 220),
    "purple": (140, 0, 160),
    "pink": (255, 105, 180),
    "black": (0, 0, 0),
}
BACKGROUND = (255, 255, 255)
SHAPES = ("circle", "square", "triangle", "cross")
# Side of the square around the shape, in parts of the picture's shorter side.
SIZES = {"small": 0.34, "large": 0.52}
# Centre from the left and from the top, likewise, in a square picture. In others the distance from
# the edge that is named stays the same: on a wide one, a square crop cuts what is on the left.
PLACES = {
    "on the left": (0.32, 0.5),
    "on the right": (0.68, 0.5),
    "at the top": (0.5, 0.32),
    "at the bottom": (0.5, 0.68),
    "in the middle": (0.5, 0.5),
}
TABLE_NAME, PROMPTS_NAME = "captions.csv", "prompts.txt"
TRAIN_NAME, VALIDATION_NAME = "train", "validation"
# Of the ten scenes with one colour and shape, these are left out of the training data: 64 in all.
NUM_HELD_OUT_EACH = 2
# Largest change of a size, and of a place in parts of the picture's shorter side.
SIZE_JITTER, PLACE_JITTER = 0.1, 0.05
# With --canvases, pixels between an object and each edge: it can be judged whether all is there.
MARGIN = 1
# Side of the smallest canvas that leaves these beside the largest object.
MIN_SIDE = 5
# Points along a pixel's side: edges are smooth.
POINTS_PER_PIXEL = 4
EPILOG = """\
examples:
  python -m sdbench shapes --folder shapes
      shapes/train and shapes/validation, folders of pictures with captions.csv, and
      shapes/prompts.txt, captions of the scenes that are not in shapes/train
  python -m sdbench shapes --folder shapes_canvases --canvases 80x48,48x80
      the same on wide and on tall pictures, as many of each

then:
  python train.py --config configs/shapes_vae.yaml
  python train.py --config configs/shapes.yaml
"""


class Scene(NamedTuple):
    """The content of a picture; each field is a key of the table of its name."""

    colour: str
    shape: str
    size: str
    place: str

    @property
    def caption(self) -> str:
        """In words."""
        return f"a {self.size} {self.colour} {self.shape} {self.place}"


def cover(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return which points a shape covers, as booleans of the joint shape.

    `x` goes from -1 on the left to 1 on the right, `y` from -1 at the top to 1 at the bottom of the
    square around the shape.
    """
    if shape == "circle":
        return x**2 + y**2 <= 1
    inside = (abs(x) <= 1) & (abs(y) <= 1)
    if shape == "triangle":
        return inside & (2 * abs(x) <= y + 1)
    if shape == "cross":
        return inside & ((abs(x) <= 1 / 3) | (abs(y) <= 1 / 3))
    assert shape == "square", shape
    return inside


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapesFlags:
    """Flags of the command."""

    folder: str = setting(TEXT, REQUIRED, "a new or an empty folder")
    num_train_images: int = setting(POSITIVE, 4096, "pictures to train with")
    num_validation_images: int = setting(POSITIVE, 256, "pictures of the held-out scenes")
    image_size: int = setting(POSITIVE, 64, "side of the square pictures in pixels")
    canvases: str | None = setting(
        LIST_OF_SHAPES,
        None,
        "shapes of the pictures, as many of each, in place of a square; objects lie wholly inside",
    )
    seed: int = setting(NOT_NEGATIVE, 0, "seed of the held-out scenes, and of sizes and places")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data set; return the exit code."""
    request = parse(
        ShapesFlags, argv, description=__doc__, epilog=EPILOG, prog="python -m sdbench shapes"
    )
    flags = request.config
    canvases = read_shapes(flags.canvases) if flags.canvases else ()
    if canvases and request.is_users("image_size"):
        raise ConfigError(
            "squares and other canvases are both asked for",
            value=flags.image_size,
            allowed="one of the two; a canvas may be a square, e.g. 64x64",
            flag="--image_size or --canvases",
        )
    for canvas in canvases:
        if min(canvas) < MIN_SIDE:
            raise ConfigError(
                "an object does not fit into a canvas",
                value=str(canvas),
                allowed=f"sides of at least {MIN_SIDE} pixels",
                flag="--canvases",
            )
    folder = Path(flags.folder)
    check_folder(folder)
    facts = {"command": "shapes", **dataclasses.asdict(flags)}
    del facts["folder"]  # the same pictures have the same note, wherever they are
    del facts["image_size" if canvases else "canvases"]
    margin = MARGIN if canvases else None
    canvases = canvases or (Shape.square(flags.image_size),)
    random = np.random.default_rng(flags.seed)
    known, held_out = split_scenes(random)
    for name, scenes, num_images in (
        (TRAIN_NAME, known, flags.num_train_images),
        (VALIDATION_NAME, held_out, flags.num_validation_images),
    ):
        _write_pictures(
            folder / name, scenes, num_images, canvases=canvases, margin=margin, random=random
        )
        write_provenance(folder / name, facts)
    prompts = "".join(f"{scene.caption}\n" for scene in held_out)
    (folder / PROMPTS_NAME).write_text(prompts, encoding="utf-8")
    print(
        f"{counted(flags.num_train_images, 'picture')} of {len(known)} scenes in "
        f"{folder / TRAIN_NAME}, "
        f"{flags.num_validation_images} of {len(held_out)} others in {folder / VALIDATION_NAME}; "
        f"captions of the held-out scenes: {folder / PROMPTS_NAME}"
    )
    return 0


def split_scenes(random: np.random.Generator) -> tuple[list[Scene], list[Scene]]:
    """Return the scenes to train with, and the held-out ones: as many of each colour and shape."""
    known: list[Scene] = []
    held_out: list[Scene] = []
    for colour, shape in itertools.product(COLOURS, SHAPES):
        scenes = [Scene(colour, shape, *names) for names in itertools.product(SIZES, PLACES)]
        chosen = set(random.permutation(len(scenes))[:NUM_HELD_OUT_EACH].tolist())
        for number, scene in enumerate(scenes):
            (held_out if number in chosen else known).append(scene)
    return known, held_out


def draw_scene(
    scene: Scene, canvas: Shape, *, random: np.random.Generator, margin: int | None = None
) -> np.ndarray:
    """Draw a scene, varying its size and place a little: RGB, uint8 (H, W, 3).

    A margin in pixels keeps the place away from the edges; None: an edge may cut off a little.
    """
    shorter = min(canvas)
    half = SIZES[scene.size] / 2 * (1 + random.uniform(-SIZE_JITTER, SIZE_JITTER))
    sides = np.divide(canvas, shorter)
    place = np.array(PLACES[scene.place])
    # What a side is longer than the shorter one is behind a place on the left, on both sides of
    # the middle, and before a place on the right.
    centre = place + (sides - 1) * (1 + np.sign(place - 0.5)) / 2
    centre = centre + random.uniform(-PLACE_JITTER, PLACE_JITTER, 2)
    if margin is not None:
        nearest = half + margin / shorter
        centre = np.clip(centre, nearest, sides - nearest)
    x, y = (
        ((np.arange(side * POINTS_PER_PIXEL) + 0.5) / (shorter * POINTS_PER_PIXEL) - middle) / half
        for side, middle in zip(canvas, centre, strict=True)
    )
    covered = cover(scene.shape, x[None, :], y[:, None])
    cells = covered.reshape(canvas.height, POINTS_PER_PIXEL, canvas.width, POINTS_PER_PIXEL)
    share = cells.mean((1, 3))[:, :, None]
    picture = share * np.array(COLOURS[scene.colour]) + (1 - share) * np.array(BACKGROUND)
    return picture.round().astype(np.uint8)


def _write_pictures(
    folder: Path,
    scenes: Sequence[Scene],
    num_images: int,
    *,
    canvases: Sequence[Shape],
    margin: int | None,
    random: np.random.Generator,
) -> None:
    """Write pictures of the scenes in turn, and their captions."""
    from PIL import Image

    folder.mkdir(parents=True)
    with (folder / TABLE_NAME).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("file", "caption"))
        for number in range(num_images):
            turn, place = divmod(number, len(scenes))
            scene = scenes[place]
            # A scene gets another canvas at each turn: no caption tells the canvas.
            canvas = canvases[(turn + place) % len(canvases)]
            name = f"{number:05d}.png"
            picture = draw_scene(scene, canvas, random=random, margin=margin)
            Image.fromarray(picture).save(folder / name)
            table.writerow((name, scene.caption))
