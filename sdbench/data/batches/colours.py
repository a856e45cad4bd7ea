"""Colour profiles of pictures: `find_conversion` to sRGB, and `describe_profiles` for people."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sdbench.base.escape import for_terminal
from sdbench.base.units import counted

# The mode of PIL of pictures whose profile is of a colour space, and other modes that suit it.
MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
SUITING = {"RGB": None, "L": ("L", "LA", "1", "I", "I;16"), "CMYK": ("CMYK",)}
# A profile that changes no colour by more is taken for sRGB: makers write its curve differently.
MAX_LEVELS = 2
# Profiles that a process keeps: cameras and programs have few.
NUM_KEPT = 32
MAX_NAME_LENGTH = 60


class Conversion(NamedTuple):
    """How the colours of a picture become sRGB.

    `profile` says so for a person. `mode` is the mode of PIL that the picture has to have; None:
    its profile cannot be used, and its colours are taken for sRGB.
    """

    profile: str
    mode: str | None = None
    transform: Any = None

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """Convert uint8 (C, H, W) to sRGB (3, H, W), channels_last in memory."""
        from PIL import Image

        if self.mode is None:
            return pixels
        channels = pixels[:1] if self.mode == "L" else pixels
        size = pixels.shape[:0:-1]
        picture = Image.frombytes(self.mode, size, channels.transpose(1, 2, 0).tobytes())
        return np.array(self.transform.apply(picture)).transpose(2, 0, 1)


def find_conversion(profile: bytes, mode: str) -> Conversion | None:
    """Return how a picture of a mode of PIL with this profile becomes sRGB; None if it is sRGB."""
    found = _open(profile) if profile else None
    if found is None or found.mode is None:
        return found
    suiting = SUITING[found.mode]
    suits = mode != "CMYK" if suiting is None else mode in suiting
    return found if suits else Conversion(f"{found.profile} for other pictures, not used")


@functools.lru_cache(maxsize=NUM_KEPT)
def _open(profile: bytes) -> Conversion | None:
    from PIL import ImageCms

    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        name = for_terminal(opened.profile.profile_description or "without a name")
        mode = MODES[opened.profile.xcolor_space.strip()]
        srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        transform = ImageCms.ImageCmsTransform(opened, srgb, mode, "RGB")
    except Exception:  # of any type for a damaged profile
        return Conversion("that cannot be read, not used")
    conversion = Conversion(f"{name[:MAX_NAME_LENGTH]}, converted to sRGB", mode, transform)
    if mode != "CMYK":
        # Nine levels of each channel, or all greys.
        colours = np.indices((9, 9, 9), dtype=np.uint8).reshape(3, 1, -1) * np.uint8(31)
        if mode == "L":
            colours = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
        change = conversion.apply(colours).astype(int) - colours
        if np.abs(change).max() <= MAX_LEVELS:
            return None
    return conversion


def describe_profiles(profiles: Mapping[str, int]) -> str:
    """Say in a sentence how many pictures have each `Conversion.profile`."""
    found = (
        f"{counted(number, 'picture has', 'pictures have')} the colour profile {profile}"
        for profile, number in profiles.items()
    )
    return f"{'; '.join(found)}."
