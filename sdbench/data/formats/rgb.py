"""`to_rgb` brings a picture of any mode to RGB."""

from __future__ import annotations

import numpy as np
from PIL import Image


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB; transparent parts are laid on white.

    PIL converts 16-bit grey to 8 bits by clipping at 255, which makes most pictures white, so
    those are divided by 257 = 65535 / 255 first.
    """
    if image.mode.startswith("I"):
        grey = np.asarray(image, dtype=np.float64) / 257
        image = Image.fromarray(grey.round().clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")
