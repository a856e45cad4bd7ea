"""`Shape`, the width and height of pictures in pixels."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Width and height of a picture in pixels; as text ``640x384``, width first."""

    width: int
    height: int

    @classmethod
    def square(cls, side: int) -> Shape:
        """The square with this side."""
        return cls(side, side)

    @property
    def num_pixels(self) -> int:
        """Width times height."""
        return self.width * self.height

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"
