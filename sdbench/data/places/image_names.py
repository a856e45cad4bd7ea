"""Names of image files: which extensions are read, and what to do about those of phones."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

# Extensions of the image files that tars and folders are read for.
IMAGE_EXTENSIONS = ("jpg", "jpeg", "jpe", "jfif", "png", "webp")
HEIC_EXTENSIONS = (".heic", ".heif")  # what phones write


def image_extensions(*, read_avif: bool) -> tuple[str, ...]:
    """Return the extensions of the image files that tars and folders are read for."""
    return (*IMAGE_EXTENSIONS, "avif") if read_avif else IMAGE_EXTENSIONS


def has_image_name(path: str | os.PathLike[str], *, read_avif: bool) -> bool:
    """Return True for a file that is an image by its name."""
    extension = os.path.splitext(path)[1].lower().removeprefix(".")
    return extension in image_extensions(read_avif=read_avif)


def heic_to_jpeg(paths: Sequence[str]) -> str:
    """Return how to make JPEG files of those files that are HEIC by name; empty if none is."""
    heic = [path for path in paths if path.lower().endswith(HEIC_EXTENSIONS)]
    kinds = {(os.path.dirname(path) or ".", os.path.splitext(path)[1]) for path in heic}
    files = " ".join(sorted(f"{shlex.quote(folder)}/*{ending}" for folder, ending in kinds))
    return files and (
        f"to make JPEG files of HEIC: mogrify -format jpg {files} (ImageMagick; on a Mac "
        f"sips -s format jpeg {files} --out FOLDER)"
    )
