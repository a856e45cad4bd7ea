"""Image files to RGB pixels of a shape, a square or another.

Every image mode becomes RGB, and every colour profile sRGB; the largest box of the shape's
proportions, rounded to whole pixels, is cropped (never squashed) and resized with antialiasing.

torchvision decodes files for which it gives the same pixels as PIL, and torch resizes them: both
are faster. PIL does the rest: files with transparency or a palette, CMYK, and JPEG files at least
four times as large as needed, which it decodes at a half, a quarter or an eighth of their size. A
factor of two is left to the resizing, as in PIL's thumbnail: the decoder's own reduction averages
blocks, which alone differs visibly from resizing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode
from torchvision.io import decode_image as decode_with_torchvision

from sdbench.base.errors import RunError
from sdbench.base.shape import Shape
from sdbench.data.batches.colours import find_conversion
from sdbench.data.formats.image_files import TURNING, OpenImage, open_image
from sdbench.data.formats.rgb import to_rgb
from sdbench.data.samples import BadSampleError, decoding

# Kinds that torchvision turns into the same RGB as PIL.
FAST_KINDS = {(kind, mode) for kind in ("JPEG", "PNG", "WEBP") for mode in ("RGB", "L")}

# How PIL turns a picture upright, by the orientation of EXIF.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# How libjpeg and libpng tell that they make pixels up.
DAMAGE_TOLD = (
    b"Corrupt JPEG data",
    b"Premature end of JPEG",
    b"Inconsistent progression",
    b"libpng error",
)
# What they tell of odd headers, unused palettes, or bytes behind the last pixel: they decode all
# pixels.
HARMLESS_TOLD = (
    b"Invalid SOS parameters",
    b"Unknown Adobe color",
    b"Warning: unknown JFIF",
    b"libpng warning",
)
_STDERR_TAKEN = threading.Lock()

# A JPEG is decoded at a fraction of its size, but at least at this multiple of the wanted one:
# `reducing_gap` of PIL's `Image.thumbnail`, which has the same default.
REDUCING_GAP = 2

Phase = Callable[[str], AbstractContextManager[None]]


class Decoded(NamedTuple):
    """An upright picture that PIL has decoded, and where the file's pixels lie in it.

    A decoder that reduces by 8 makes 126 columns of 1,001, of which the last stands for one pixel.
    """

    image: Image.Image
    size: tuple[int, int]  # of the upright picture, in the file's pixels
    scale: float = 1.0  # pixels of the file per pixel of the image, along a side
    # Where the picture begins in the image; may be a fraction if it was turned.
    left: float = 0.0
    top: float = 0.0


class Picture(NamedTuple):
    """A picture as a sample has it.

    `pixels` is (3, height, width) uint8, RGB, channels_last in memory. `sizes` is its
    `conditions.SIZES`. `profile` says what was done about its colour profile (see
    `colours.Conversion`); None: it is sRGB.
    """

    pixels: np.ndarray
    sizes: tuple[int, ...]
    profile: str | None


def decode_image(data: bytes, **options: Any) -> np.ndarray:
    """Decode an image file to (3, height, width) uint8, RGB, as `decode_picture` does."""
    return decode_picture(data, **options).pixels


def decode_picture(
    data: bytes,
    *,
    shape: Shape,
    crop: tuple[float, float] | None = None,
    flip: bool = False,
    read_avif: bool = False,
    phase: Phase = contextlib.nullcontext,
) -> Picture:
    """Decode an image file; for a damaged one an error of any type is raised (see `decoding`).

    `crop` says where the largest box is cut out along each side, from 0 (left, top) to 1; None is
    the centre. `phase` makes the contexts of the phases ``decode`` and ``transform``.
    """
    with phase("decode"):
        file = open_image(data, read_avif=read_avif)
        conversion = find_conversion(file.profile, file.image.mode)
        is_by_pil = not is_fast(file, shape=shape)
        if is_by_pil:
            is_cmyk = conversion is not None and conversion.mode == "CMYK"
            decoded = _decode_any(file, shape=shape, mode="CMYK" if is_cmyk else "RGB")
            width, height = decoded.size
        else:
            decoded = _decode_fast(file)
            width, height = decoded.shape[2], decoded.shape[1]
    with phase("transform"):
        cut_out = _cut_out if is_by_pil else _cut_out_fast
        array = cut_out(decoded, shape=shape, crop=crop)
        if conversion is not None:
            array = conversion.apply(array)
        sizes = find_sizes(width, height, shape=shape, crop=crop, flip=flip)
        profile = None if conversion is None else conversion.profile
        return Picture(array[:, :, ::-1] if flip else array, sizes, profile)


def decode_whole(data: bytes) -> Image.Image:
    """Decode an image file to an upright picture of its own size, in sRGB."""
    pixels = decode_image(data, shape=Shape(*open_image(data).size))
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def open_picture(path: Path) -> Image.Image:
    """Return `decode_whole` of a file; a `RunError` if it is not a sound image."""
    try:
        with decoding(str(path)):
            return decode_whole(path.read_bytes())
    except BadSampleError as error:
        raise RunError(str(error)) from error


class Measured(NamedTuple):
    """Upright width and height of a picture, and `Picture.profile`."""

    size: tuple[int, int]
    profile: str | None


def measure_image(data: bytes, *, read_avif: bool = False) -> Measured:
    """Decode an image wholly, which finds damaged ones, and measure it."""
    file = open_image(data, read_avif=read_avif)
    if is_fast(file):
        _decode_fast(file)
    else:
        _load(file)
    conversion = find_conversion(file.profile, file.image.mode)
    return Measured(file.size, None if conversion is None else conversion.profile)


def is_fast(file: OpenImage, *, shape: Shape | None = None) -> bool:
    """Return True if torchvision decodes a file as PIL would, and all of it is needed."""
    image = file.image
    if shape is not None and image.format == "JPEG":
        width, height = file.size
        if min(width / shape.width, height / shape.height) >= 2 * REDUCING_GAP:
            return False
    return (
        (image.format, image.mode) in FAST_KINDS
        # Only the raw mode, RGB;16B, shows 16 bits per channel, which PIL brings to 8.
        and not (image.format == "PNG" and image.tile[0].args != image.mode)
        and not image.has_transparency_data
        and not getattr(image, "is_animated", False)
    )


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


def _decode_fast(file: OpenImage) -> torch.Tensor:
    """Decode to (3, H, W) uint8, upright; rows of pixels in memory, as the decoder writes them."""
    picture = _decode_by_torchvision(file, mode=ImageReadMode.RGB)
    # As `TURNS` turns them.
    if file.orientation in TURNING:
        picture = picture.transpose(1, 2)
    mirrored = {1: file.orientation in (3, 4, 7, 8), 2: file.orientation in (2, 3, 6, 7)}
    sides = [side for side, is_mirrored in mirrored.items() if is_mirrored]
    return picture.flip(sides) if sides else picture


def _decode_by_torchvision(file: OpenImage, *, mode: ImageReadMode) -> torch.Tensor:
    """Decode to (channels, H, W) as the file has it; an OSError if a decoder tells of damage."""
    # A copy, because torch warns of memory that it must not write to.
    encoded = torch.frombuffer(bytearray(file.pixels), dtype=torch.uint8)
    with _damage_raised():
        return decode_with_torchvision(encoded, mode=mode)


def _load(file: OpenImage) -> None:
    """Decode with PIL, and find what it passes over: rows that a PNG lacks, damage in CMYK.

    It passes over damage in a JPEG that it reduces, too; to find that would take the whole file.
    """
    if file.image.format == "PNG" or (file.image.format, file.image.mode) == ("JPEG", "CMYK"):
        _decode_by_torchvision(file, mode=ImageReadMode.UNCHANGED)
    file.image.load()


@contextlib.contextmanager
def _damage_raised() -> Iterator[None]:
    """Raise as an OSError what libjpeg and libpng tell of damage in the block.

    They write it to the file descriptor 2 alone, and libjpeg goes on with pixels that it makes up.
    What others have written there meanwhile is written after the block.
    """
    # One thread at a time: each would take the file of the other for the descriptor to restore.
    with _STDERR_TAKEN, tempfile.TemporaryFile() as sink:
        try:
            kept = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            sink.seek(0)
            lines = sink.readlines()
            told = [line for line in lines if line.startswith(DAMAGE_TOLD)]
            known = (*DAMAGE_TOLD, *HARMLESS_TOLD)
            if others := b"".join(line for line in lines if not line.startswith(known)):
                os.write(2, others)
            if told:
                raise OSError(told[0].decode(errors="replace").strip())


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


def _decode_any(file: OpenImage, *, shape: Shape, mode: str) -> Decoded:
    """Decode a picture to a mode, RGB or its own, a JPEG reduced as far as it may be."""
    image, orientation = file.image, file.orientation
    width, height = image.size
    wanted = shape[::-1] if orientation in TURNING else shape
    reduced = image.draft("RGB", tuple(REDUCING_GAP * side for side in wanted))
    _load(file)
    if orientation in TURNS:
        image = image.transpose(TURNS[orientation])
    image = to_rgb(image) if mode == "RGB" else image
    if reduced is None:
        return Decoded(image, image.size)
    _, (_, _, box_width, box_height) = reduced
    # The orientations listed below turn the file's right or bottom edge to the left or top, and
    # with it the margin that the reduction adds.
    if orientation in TURNING:
        width, height, box_width, box_height = height, width, box_height, box_width
    left = image.width - box_width if orientation in (2, 3, 6, 7) else 0.0
    top = image.height - box_height if orientation in (3, 4, 7, 8) else 0.0
    return Decoded(image, (width, height), width / box_width, left, top)


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


def to_float(image: np.ndarray) -> np.ndarray:
    """Bring uint8 pixels to float32 in [-1, 1]: x / 127.5 - 1, so that 0 is -1 and 255 is 1."""
    return image.astype(np.float32) / np.float32(127.5) - np.float32(1)
