"""How do tar files or a folder of images become a data set that streams?"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sdbench.errors import ConfigError, RunError
from sdbench.sources import readers
from sdbench.sources.checks import check_shard_file, read_shards

EPILOG = """\
examples:
  one tar:            python -m sdbench convert pairs.tar data/pairs
  many tars:          python -m sdbench convert 'laion/{00000..00127}.tar' data/laion
  a folder:           python -m sdbench convert photos data/photos
                      (photos/a.jpg with photos/a.txt, or photos/captions.csv: file,caption)
then train on it:     composer benchmark.py --remote data/pairs
"""

MDS_TYPES = {"jpg": "bytes", "caption": "str", "width": "int", "height": "int"}

# Seconds between two progress lines where the output is no terminal.
LINE_INTERVAL_S = 10.0


@dataclass(kw_only=True)
class Conversion:
    """What a conversion did.

    Attributes:
        num_written: Pairs in the new data set.
        bad: One sentence for each pair that was left out, with its name.
    """

    num_written: int = 0
    bad: list[str] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Convert as the command line says; return the exit code.

    Raises:
        ConfigError: The source or the target cannot be used.
        RunError: A bad image was met and ``--skip_bad`` was not given.
    """
    flags = _parse(argv)
    for name in ("max_images", "shard_size_mib"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise ConfigError("Too small", value=value, allowed="1 or more", flag=f"--{name}")
    num_images, pairs = open_source(flags.source, source_format=flags.format)
    num_expected = min(num_images, flags.max_images or num_images)
    started_s = time.monotonic()
    conversion = convert(
        report_progress(pairs, num_expected=num_expected),
        Path(flags.out),
        max_images=flags.max_images,
        shard_size_mib=flags.shard_size_mib,
        skip_bad=flags.skip_bad,
    )
    duration_s = time.monotonic() - started_s
    print(
        f"Wrote {conversion.num_written} pairs to {flags.out} in {duration_s:.1f} s "
        f"({conversion.num_written / duration_s:.1f} images/s); "
        f"{len(conversion.bad)} bad ones left out."
    )
    for sentence in conversion.bad:
        print(f"  {sentence}")
    return 0


def open_source(source: str, *, source_format: str) -> tuple[int, Iterable[readers.Pair]]:
    """Find out what `source` is.

    Args:
        source: A folder, a tar, or a brace expression of tars.
        source_format: ``auto``, ``webdataset`` or ``folder``.

    Returns:
        How many images it holds, and its pairs.

    Raises:
        ConfigError: There are no images.
    """
    if source_format == "auto":
        folder = Path(source)
        is_folder = not source.endswith(".tar") and not any(folder.glob("*.tar"))
        source_format = "folder" if is_folder else "webdataset"
    if source_format == "folder":
        num_images = len(readers.list_folder(Path(source)))
        pairs = readers.read_folder(Path(source))
    else:
        tars = readers.find_tars(source)
        num_images = readers.count_tar_images(tars)
        pairs = readers.read_tars(tars)
    if not num_images:
        raise ConfigError(
            "The source holds no images",
            value=source,
            allowed=f"files ending in {', '.join(readers.IMAGE_EXTENSIONS)}",
            flag="SOURCE or --format",
        )
    return num_images, pairs


def convert(
    pairs: Iterable[readers.Pair],
    out: Path,
    *,
    max_images: int | None = None,
    shard_size_mib: int = 64,
    skip_bad: bool = False,
) -> Conversion:
    """Write pairs as an MDS data set.

    The shards are written to ``OUT.partial``, which becomes ``OUT`` when all is well: what a killed
    conversion leaves is never taken for a data set.

    Args:
        pairs: What to write.
        out: Folder of the data set; must be absent or empty.
        max_images: Stop after so many pairs were written.
        shard_size_mib: Size of a shard file.
        skip_bad: Leave bad pairs out and report them, instead of stopping at the first.

    Raises:
        ConfigError: `out` is not empty, or another conversion's ``OUT.partial`` is in the way.
        RunError: A pair is bad and `skip_bad` is not set, or nothing good was found.
    """
    from streaming import MDSWriter

    partial = _reserve(out)
    conversion = Conversion()
    with MDSWriter(
        out=str(partial), columns=MDS_TYPES, size_limit=shard_size_mib * 2**20
    ) as writer:
        for pair in pairs:
            if conversion.num_written == max_images:
                break
            try:
                row = make_row(pair)
            except ValueError as error:
                if not skip_bad:
                    raise RunError(
                        f"{error} Nothing was made of {out}; the flag --skip_bad leaves bad "
                        f"pairs out and reports them (delete {partial} first)."
                    ) from error
                conversion.bad.append(str(error))
                continue
            writer.write(row)
            conversion.num_written += 1
    if not conversion.num_written:
        raise RunError(f"All {len(conversion.bad)} pairs are bad, the first: {conversion.bad[:1]}")
    verify(partial, num_samples=conversion.num_written)
    partial.rename(out)
    return conversion


def make_row(pair: readers.Pair) -> dict[str, object]:
    """Check a pair and lay it out in columns.

    Raises:
        ValueError: The image is missing, empty or undecodable, or there is no caption.
    """
    from sdbench.sources.transforms import measure_image

    if pair.image is None:
        raise ValueError(f"{pair.name}: no image.")
    if not pair.image:
        raise ValueError(f"{pair.name}: the image has 0 bytes.")
    if pair.caption is None:
        raise ValueError(f"{pair.name}: no caption.")
    try:
        width, height = measure_image(pair.image)
    except Exception as error:
        # PIL's decoders raise many types; each means that this file cannot be trained on.
        raise ValueError(f"{pair.name}: the image cannot be decoded ({error}).") from error
    return {"jpg": pair.image, "caption": pair.caption, "width": width, "height": height}


def verify(folder: Path, *, num_samples: int) -> None:
    """Check that a new data set is complete: every shard's size, and the number of samples.

    Raises:
        ConfigError: A shard is missing or short.
        RunError: The index holds another number of samples than was written.
    """
    shards = read_shards(folder)
    for shard in shards:
        check_shard_file(folder, shard)
    num_found = sum(shard["samples"] for shard in shards)
    if num_found != num_samples:
        raise RunError(
            f"{num_samples} pairs were written and the index of {folder} has {num_found}"
        )


def report_progress(pairs: Iterable[readers.Pair], *, num_expected: int) -> Iterator[readers.Pair]:
    """Pass pairs on, showing rate and time left: a bar on a terminal, else a line now and then."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(pairs, total=num_expected, unit=" images")
        return
    started_s = last_line_s = time.monotonic()
    for num_read, pair in enumerate(pairs):
        yield pair
        now_s = time.monotonic()
        if now_s - last_line_s >= LINE_INTERVAL_S:
            last_line_s = now_s
            rate = (num_read + 1) / (now_s - started_s)
            left_s = max(num_expected - num_read - 1, 0) / rate
            state = f"{num_read + 1} of {num_expected} images, {rate:.1f} images/s"
            print(f"{state}, {left_s:.0f} s left", file=sys.stderr)


def _reserve(out: Path) -> Path:
    """Make and return ``OUT.partial``."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            "The output exists", value=str(out), allowed="a new or an empty folder", flag="OUT"
        )
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError(
            "Another conversion to this folder is running, or was stopped and left its shards",
            value=str(partial),
            allowed="delete that folder if nothing runs, or take another name",
            flag="OUT",
        ) from error
    return partial


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sdbench convert",
        description="Turn WebDataset tars, or a folder of images with captions, into MDS shards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="a tar, tars in braces, or a folder")
    parser.add_argument("out", metavar="OUT", help="folder of the new data set")
    parser.add_argument(
        "--format",
        choices=("auto", "webdataset", "folder"),
        default="auto",
        help="what SOURCE is; auto takes a folder without tars for a folder of images",
    )
    parser.add_argument(
        "--shard_size_mib", type=int, default=64, help="size of a shard file (default: 64)"
    )
    parser.add_argument("--max_images", type=int, help="stop after so many pairs (default: all)")
    parser.add_argument(
        "--skip_bad",
        action="store_true",
        help="leave out pairs that cannot be used, and report them (default: stop at the first)",
    )
    return parser.parse_args(argv)
