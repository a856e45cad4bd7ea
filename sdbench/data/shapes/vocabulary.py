"""The vocabulary of the pictures: colours, shapes, sizes, places, captions."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import numpy as np

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
# Side of the square around the shape, in parts of the picture's side.
SIZES = {"small": 0.34, "large": 0.52}
# Centre from the left and from the top, likewise.
PLACES = {
    "on the left": (0.32, 0.5),
    "on the right": (0.68, 0.5),
    "at the top": (0.5, 0.32),
    "at the bottom": (0.5, 0.68),
    "in the middle": (0.5, 0.5),
}
CAPTION = re.compile(rf"\b({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})\b")


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


def list_scenes() -> list[Scene]:
    """All scenes, 8 x 4 x 2 x 5."""
    return [Scene(*names) for names in itertools.product(COLOURS, SHAPES, SIZES, PLACES)]


def find_colour_and_shape(caption: str) -> tuple[str, str] | None:
    """Return the colour and the shape that a caption asks for, or None."""
    found = CAPTION.search(caption)
    return None if found is None else (found[1], found[2])


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
