"""How does an image file become a training sample?

Every image mode becomes RGB, the largest centred square is cut out (never squashed), and that is
resized. PIL and numpy only.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps


def decode_image(data: bytes, *, image_size: int) -> np.ndarray:
    """Decode any image file that PIL reads.

    Args:
        data: The file's bytes.
        image_size: Side of the result in pixels.

    Returns:
        (3, image_size, image_size) uint8, RGB.

    Raises:
        OSError: The bytes are no image, or a truncated one.
    """
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
        square = crop_to_square(to_rgb(upright))
    resized = square.resize((image_size, image_size), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(resized).transpose(2, 0, 1))


def measure_image(data: bytes) -> tuple[int, int]:
    """Decode an image wholly, which finds truncated ones, and return its upright (width, height).

    Raises:
        OSError: The bytes are no image, or a truncated one.
    """
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return ImageOps.exif_transpose(image).size


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


def crop_to_square(image: Image.Image) -> Image.Image:
    """Cut out the largest square around the centre."""
    side = min(image.size)
    left = (image.width - side) // 2
    top = (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def to_float(image: np.ndarray) -> np.ndarray:
    """Bring uint8 pixels to float32 in [-1, 1]: x / 127.5 - 1, so that 0 is -1 and 255 is 1."""
    return image.astype(np.float32) / np.float32(127.5) - np.float32(1)
