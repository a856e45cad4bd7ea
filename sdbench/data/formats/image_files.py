"""Opening of image files of supported kinds, and detection of other kinds.

A decoder is a large program that parses untrusted files, so only the needed ones are reachable.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, NamedTuple

from sdbench.data.formats.image_parts import find_orientation, take_apart

if TYPE_CHECKING:
    from PIL import Image

# PIL's name of a kind to its file extension.
EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "AVIF": "avif"}
READ_KINDS = "JPEG, PNG and WebP files are read, AVIF files with --read_avif"

# Brands of AVIF, from the fifth byte.
AVIF_BRANDS = (b"ftypavif", b"ftypavis")
# Other kinds of files found under image names, by a pattern of their first bytes.
OTHER_KINDS = {
    rb"GIF8": "a GIF file",
    rb"BM": "a BMP file",
    rb"II\*\0|MM\0\*": "a TIFF file",
    rb"P[1-7]": "a PPM, PGM or PBM file",
    rb"....ftypavi": "an AVIF file",
    rb"....ftyp(hei|mif1)": "a HEIC file (ImageMagick converts it: magick heic:FILE NEW.jpg)",
    rb"version https://git-lfs": "a pointer of Git LFS (git lfs pull fetches the file)",
    rb"<": "HTML, XML or SVG text",
}
NUM_BYTES_SHOWN = 16

# PIL warns of decompression bombs from 256 MiB as RGB (89 million pixels). A JPEG may have three
# times as many, as it is decoded at a fraction of its size: phones take pictures of 200 million.
MAX_PIXELS = 256 * 2**20 // 3
MAX_JPEG_PIXELS = 256 * 2**20

# Orientations of EXIF that exchange width and height.
TURNING = (5, 6, 7, 8)
# A WebP file of one colour may end with zeros, a byte for each 14,000 pixels.
MIN_ZEROS, PIXELS_PER_ZERO = 64, 8192


def tell_kind(data: bytes, *, read_avif: bool) -> str:
    """Return PIL's name of the kind of an image file, by its first bytes.

    A `ValueError` says what a file of another kind seems to be.
    """
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if read_avif and data[4:12] in AVIF_BRANDS:
        return "AVIF"
    found = (name for begin, name in OTHER_KINDS.items() if re.match(begin, data, re.DOTALL))
    seems = f"like {name}" if (name := next(found, None)) else f"with {data[:NUM_BYTES_SHOWN]!r}"
    raise ValueError(f"it begins {seems}, and {READ_KINDS}")


def image_extension(data: bytes) -> str:
    """Return the extension of an image of any kind that may be read, by its first bytes."""
    return EXTENSIONS[tell_kind(data, read_avif=True)]


class OpenImage(NamedTuple):
    """An image file whose pixels are not decoded yet.

    `pixels` is the file without what is beside its pixels; `profile` may be empty.
    """

    image: Image.Image
    pixels: bytes
    orientation: int  # 1 to 8, as EXIF numbers them
    profile: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright picture."""
        return self.image.size[::-1] if self.orientation in TURNING else self.image.size


def open_image(data: bytes, *, read_avif: bool = False) -> OpenImage:
    """Open an image file; an error of any type says what is wrong with it.

    PIL has some forty decoders and chooses by content; only that of the file's own kind is offered.
    """
    from PIL import Image, UnidentifiedImageError

    kind = tell_kind(data, read_avif=read_avif)
    parts = take_apart(data, kind)
    Image.MAX_IMAGE_PIXELS = MAX_JPEG_PIXELS  # PIL's own limits, above the ones here
    try:
        image = Image.open(io.BytesIO(parts.pixels), formats=[kind])
    except UnidentifiedImageError as error:
        raise OSError(f"the header of a {kind} file of {len(data)} bytes is damaged") from error
    num_pixels = image.width * image.height
    most = MAX_JPEG_PIXELS if kind == "JPEG" else MAX_PIXELS
    if num_pixels > most:
        raise ValueError(
            f"{image.width} x {image.height} pixels, at most {most} are read of a {kind} file"
        )
    if parts.num_zeros > max(MIN_ZEROS, num_pixels // PIXELS_PER_ZERO):
        raise ValueError(f"it is cut off: its pixels end with {parts.num_zeros} zeros")
    # Decoders of WebP and AVIF return what is beside pixels as it is stored.
    exif, xmp, profile = (
        found or image.info.get(name) or b""
        for name, found in (
            ("exif", parts.exif),
            ("xmp", parts.xmp),
            ("icc_profile", parts.profile),
        )
    )
    return OpenImage(image, parts.pixels, find_orientation(exif, xmp), profile)
