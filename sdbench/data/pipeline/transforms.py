"""Image files to RGB pixels of a shape, a square or another.

Every image mode becomes RGB; the largest box of the shape's proportions, rounded to whole pixels,
is cropped (never squashed) and resized with antialiasing.

torchvision decodes files for which it gives the same pixels as PIL, and torch resizes them: both
are faster. PIL does the rest: files with transparency, a palette, a colour profile or an
orientation, and JPEG files at least four times as large as needed, which it decodes at a half, a
quarter or an eighth of their size. A factor of two is left to the resizing, as in PIL's thumbnail:
the decoder's own reduction averages blocks, which alone differs visibly from resizing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torchvision.io import ImageReadMode
from torchvision.io import decode_image as decode_with_torchvision

from sdbench.base.shape import Shape
from sdbench.data.image_files import open_image

# Kinds that torchvision turns into the same RGB as PIL.
FAST_KINDS = {(kind, mode) for kind in ("JPEG", "PNG", "WEBP") for mode in ("RGB", "L")}

# Orientations of EXIF that exchange width and height.
TURNING = (5, 6, 7, 8)

# A JPEG is decoded at a fraction of its size, but at least at this multiple of the wanted one:
# `reducing_gap` of PIL's `Image.thumbnail`, which has the same default.
REDUCING_GAP = 2

Phase = Callable[[str], AbstractContextManager[None]]


class Decoded(NamedTuple):
    """An upright RGB picture that PIL has decoded, and where the file's pixels lie in it.

    A decoder that reduces by 8 makes 126 columns of 1,001, of which the last stands for one pixel.
    """

    image: Image.Image
    size: tuple[int, int]  # of the upright picture, in the file's pixels
    scale: float = 1.0  # pixels of the file per pixel of the image, along a side
    # Where the picture begins in the image; may be a fraction if it was turned.
    left: float = 0.0
    top: float = 0.0


def decode_image(data: bytes, **options: Any) -> np.ndarray:
    """Decode an image file to (3, height, width) uint8, RGB, as `decode_picture` does."""
    return decode_picture(data, **options)[0]


def decode_picture(
    data: bytes,
    *,
    shape: Shape,
    crop: tuple[float, float] | None = None,
    flip: bool = False,
    read_avif: bool = False,
    phase: Phase = contextlib.nullcontext,
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Decode an image file to (3, height, width) uint8, RGB, and its `conditions.SIZES`.

    The array is channels_last in memory. `crop` says where the largest box is cut out along each
    side, from 0 (left, top) to 1; None is the centre. `phase` makes the contexts of the phases
    ``decode`` and ``transform``.

    Raises:
        OSError: The image is truncated or damaged.
        ValueError: The file is of an unsupported kind, or the image has too many pixels.
    """
    with phase("decode"), open_image(data, read_avif=read_avif) as image:
        if is_fast(image, data, shape=shape):
            decoded = _decode_fast(data)
        else:
            decoded = _decode_any(image, shape=shape)
    with phase("transform"):
        is_by_pil = isinstance(decoded, Decoded)
        cut_out = _cut_out if is_by_pil else _cut_out_fast
        array = cut_out(decoded, shape=shape, crop=crop)
        width, height = decoded.size if is_by_pil else (decoded.shape[2], decoded.shape[1])
        sizes = find_sizes(width, height, shape=shape, crop=crop, flip=flip)
        return array[:, :, ::-1] if flip else array, sizes


def measure_image(data: bytes, *, read_avif: bool = False) -> tuple[int, int]:
    """Decode an image wholly, which finds truncated ones; return its upright width and height."""
    with open_image(data, read_avif=read_avif) as image:
        _load(image)
        return ImageOps.exif_transpose(image).size


def read_size(data: bytes, *, read_avif: bool = False) -> tuple[int, int]:
    """Return an image's upright width and height, from its header where that tells.

    Raises as `decode_picture`.
    """
    with open_image(data, read_avif=read_avif) as image:
        if is_upright(image, data):
            return image.size
        if image.format == "JPEG":
            is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) in TURNING
            return image.size[::-1] if is_turned else image.size
    return measure_image(data, read_avif=read_avif)


def is_fast(image: Image.Image, data: bytes, *, shape: Shape) -> bool:
    """Return True if torchvision decodes a file as PIL would, and all of it is needed.

    `image` is open, but not loaded.
    """
    reduction = min(image.width / shape.width, image.height / shape.height)
    if image.format == "JPEG" and reduction >= 2 * REDUCING_GAP:
        return False
    return (
        (image.format, image.mode) in FAST_KINDS
        # Only the raw mode, RGB;16B, shows 16 bits per channel, which PIL brings to 8.
        and not (image.format == "PNG" and image.tile[0].args != image.mode)
        and not image.has_transparency_data
        and not getattr(image, "is_animated", False)
        # libpng prints a warning for each file with a profile that it does not like.
        and "icc_profile" not in image.info
        and is_upright(image, data)
    )


def is_upright(image: Image.Image, data: bytes) -> bool:
    """Return True if the file cannot ask for a rotation, as far as its header tells."""
    if "xmp" in image.info or "XML:com.adobe.xmp" in image.info:
        return False
    if image.format == "PNG":
        # Its chunk may come after the pixels, and PIL knows it only once they are loaded.
        return b"eXIf" not in data
    return "exif" not in image.info or image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def find_box(
    width: int, height: int, *, shape: Shape, crop: tuple[float, float] | None
) -> tuple[int, int, int, int]:
    """Return left, top, width and height of the largest box: in the centre, or where `crop` says.

    Its proportions are those of the shape, rounded to whole pixels of the picture.
    """
    box_width = max(1, min(width, round(height * shape.width / shape.height)))
    box_height = max(1, min(height, round(width * shape.height / shape.width)))
    if crop is None:
        return (width - box_width) // 2, (height - box_height) // 2, box_width, box_height
    left, top = round(crop[0] * (width - box_width)), round(crop[1] * (height - box_height))
    return left, top, box_width, box_height


def find_sizes(
    width: int, height: int, *, shape: Shape, crop: tuple[float, float] | None, flip: bool
) -> tuple[int, ...]:
    """Return the `conditions.SIZES` of an upright picture, as diffusers' script for SDXL does.

    It mirrors a picture before it crops it.
    """
    left, top, box_width, box_height = find_box(width, height, shape=shape, crop=crop)
    if flip:
        left = width - box_width - left
    corner = round(top * shape.height / box_height), round(left * shape.width / box_width)
    return height, width, *corner, shape.height, shape.width


def _decode_fast(data: bytes) -> torch.Tensor:
    """(3, H, W) uint8; rows of pixels in memory, as the decoder wrote them."""
    # A copy, because torch warns of memory that it must not write to.
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        return decode_with_torchvision(encoded, mode=ImageReadMode.RGB)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


def _cut_out_fast(
    picture: torch.Tensor, *, shape: Shape, crop: tuple[float, float] | None
) -> np.ndarray:
    """Cut the box out of (3, H, W) uint8 and resize it to (3, height, width)."""
    left, top, width, height = find_box(picture.shape[2], picture.shape[1], shape=shape, crop=crop)
    # A batch of one with the strides of channels_last, which a view (3, H, W) cannot show: torch
    # then resizes without separating the channels.
    batch = picture.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    box = batch[:, :, top : top + height, left : left + width]
    if (width, height) != shape:
        box = torch.nn.functional.interpolate(
            box, size=(shape.height, shape.width), mode="bicubic", antialias=True
        )
    return box[0].numpy()


def _decode_any(image: Image.Image, *, shape: Shape) -> Decoded:
    """Decode a picture of any mode, a JPEG reduced as far as it may be."""
    width, height = image.size
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    wanted = shape[::-1] if orientation in TURNING else shape
    reduced = image.draft("RGB", tuple(REDUCING_GAP * side for side in wanted))
    _load(image)
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    rgb = to_rgb(ImageOps.exif_transpose(image))
    if reduced is None:
        return Decoded(rgb, rgb.size)
    _, (_, _, box_width, box_height) = reduced
    # The orientations listed below turn the file's right or bottom edge to the left or top, and
    # with it the margin that the reduction adds.
    if orientation in TURNING:
        width, height, box_width, box_height = height, width, box_height, box_width
    left = rgb.width - box_width if orientation in (2, 3, 6, 7) else 0.0
    top = rgb.height - box_height if orientation in (3, 4, 7, 8) else 0.0
    return Decoded(rgb, (width, height), width / box_width, left, top)


def _cut_out(decoded: Decoded, *, shape: Shape, crop: tuple[float, float] | None) -> np.ndarray:
    """Cut out the box, whose edges may lie between pixels, and resize it."""
    left, top, width, height = (
        value / decoded.scale for value in find_box(*decoded.size, shape=shape, crop=crop)
    )
    left, top = left + decoded.left, top + decoded.top
    # Rounding of a division may lead out of the picture by 1e-13 of a pixel.
    right, bottom = min(left + width, decoded.image.width), min(top + height, decoded.image.height)
    small = decoded.image.resize(
        shape,
        Image.Resampling.BICUBIC,
        box=(max(left, 0.0), max(top, 0.0), right, bottom),
    )
    return np.array(small).transpose(2, 0, 1)


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except SyntaxError as error:
        # PIL raises it for a broken PNG.
        raise OSError(str(error)) from error


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


def to_float(image: np.ndarray) -> np.ndarray:
    """Bring uint8 pixels to float32 in [-1, 1]: x / 127.5 - 1, so that 0 is -1 and 255 is 1."""
    return image.astype(np.float32) / np.float32(127.5) - np.float32(1)
