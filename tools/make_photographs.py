"""Makes a tar of enough large photographs to measure a data loader.

    pip install --no-deps --target packages scikit-image==0.25.2 scikit-learn==1.7.2
    export PYTHONPATH=packages
    python tools/make_photographs.py photographs-512.tar --side 512
    python tools/make_photographs.py photographs-1024.tar --side 1024

The packages get a folder of their own: in the environment, transformers would import scikit-learn
and pandas in each run.

Drawings decode several times faster than photographs. Here each picture is a crop of one of six
photographs: scaled to 0.6 to 1 times its size, mirrored at its edges until it is large enough,
cropped at random, and encoded as a JPEG of quality 90. So it keeps the detail of a camera's
picture, which enlarging would smooth away. The bits per pixel are printed: decoding time grows with
them.

The photographs come with scikit-image (astronaut, NASA, and rocket, SpaceX: public domain; chelsea,
Stefan van der Walt, and coffee, Rachel Michetti: CC0) and scikit-learn (china, danielbuechele, and
flower, vultilion: CC BY 2.0). Name them if you publish the tar.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import multiprocessing
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

# Package to the photographs in it.
PHOTOGRAPHS = {
    "skimage": ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"),
    "sklearn": ("china.jpg", "flower.jpg"),
}
FOLDERS = {"skimage": "data", "sklearn": "datasets/images"}
SCALES = (0.6, 1.0)
JPEG_QUALITY = 90
# 210 batches of 32: 200 that are measured, and what is taken before them, in one epoch.
NUM_PICTURES = 6720


def find_photographs() -> list[Path]:
    """Return the files of the photographs in the packages."""
    paths = []
    for package, names in PHOTOGRAPHS.items():
        # Not imported: only its files are wanted.
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise FileNotFoundError(f"{package} is not installed: see --help")
        folder = Path(found.origin).parent / FOLDERS[package]
        paths += [folder / name for name in names]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"missing: {', '.join(missing)}")
    return paths


@functools.cache
def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def make_picture(number: int, *, side: int, seed: int) -> tuple[bytes, str]:
    """Make the JPEG file of a square picture by its number, and its caption."""
    paths = find_photographs()
    path = paths[number % len(paths)]
    photograph = _open(path)
    generator = np.random.default_rng([seed, number])
    scale = generator.uniform(*SCALES)
    size = tuple(round(scale * length) for length in photograph.size)
    pixels = np.asarray(photograph.resize(size, Image.Resampling.LANCZOS))
    # Half of the photograph beyond the crop, so that crops differ.
    pad = [(0, max(side + length // 2 - length, 0)) for length in pixels.shape[:2]]
    pixels = np.pad(pixels, [*pad, (0, 0)], mode="symmetric")
    top, left = (int(generator.integers(length - side + 1)) for length in pixels.shape[:2])
    buffer = io.BytesIO()
    crop = Image.fromarray(pixels[top : top + side, left : left + side])
    crop.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue(), f"{path.stem}, crop {number}"


def write_tar(path: Path, *, num_pictures: int, side: int, seed: int) -> float:
    """Write pictures with captions as a WebDataset tar; return their mean bits per pixel."""
    make = functools.partial(make_picture, side=side, seed=seed)
    num_bytes = 0
    with tarfile.open(path, "w") as tar, multiprocessing.Pool() as pool:
        for number, (picture, caption) in enumerate(pool.imap(make, range(num_pictures), 16)):
            for extension, content in (("jpg", picture), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{number:06d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            num_bytes += len(picture)
    return num_bytes * 8 / (num_pictures * side**2)


def main(argv: Sequence[str] | None = None) -> int:
    """Write a tar as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tar", type=Path, help="the new file")
    parser.add_argument("--side", type=int, default=512, help="pixels (default: 512)")
    parser.add_argument(
        "--num_pictures", type=int, default=NUM_PICTURES, help=f"default: {NUM_PICTURES}"
    )
    parser.add_argument("--seed", type=int, default=17, help="default: 17")
    flags = parser.parse_args(argv)
    bits = write_tar(flags.tar, num_pictures=flags.num_pictures, side=flags.side, seed=flags.seed)
    print(f"{flags.num_pictures} pictures of {flags.side} px, {bits:.2f} bits per pixel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
