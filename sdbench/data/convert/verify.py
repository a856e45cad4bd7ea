"""The command verify-data: checks the files of a data set, and on request every sample.

With --count it writes the number of samples of each tar.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.units import counted
from sdbench.data.batches.colours import describe_profiles
from sdbench.data.convert.count import count_tars
from sdbench.data.convert.flags import VerifyFlags, blamed_on_place
from sdbench.data.convert.pool import Shards, Work, WorkReport, run_work
from sdbench.data.convert.rows import LatentRowReader, RowReader, describe_source, open_rows
from sdbench.data.formats.data_formats import read_columns
from sdbench.data.formats.latent_columns import find_resolutions
from sdbench.data.formats.mds_entries import INDEX_NAME, check_shard, files_of
from sdbench.data.formats.mds_index import MdsPlace, copied_file, describe_missing, locate_mds
from sdbench.data.order.mixture import mix
from sdbench.data.places.place_files import StoredFile, read_whole
from sdbench.data.places.remote import errors_named, is_url
from sdbench.data.samples import BadSampleError, MissingLatentError
from sdbench.data.source import SourceConfig
from sdbench.settings.data import KEEP, ONLINE, PRECOMPUTED
from sdbench.settings.request import parse
from sdbench.settings.rules import check

EPILOG = """\
examples:
  every shard against index.json:   python -m sdbench verify-data data/pairs
  and every sample:                 python -m sdbench verify-data data/pairs --deep
  in an object store:               python -m sdbench verify-data s3://bucket/pairs --local /cache
  tars, so that they are streamed:  python -m sdbench verify-data 's3://bucket/{00..15}.tar' \\
                                      --count --out sizes.json

With --count every tar is read once, from its first byte to its last, and nothing of it is kept. One
that cannot be read is named, and left out of the file; each call counts all of its tars anew.

exit codes: 0 all is well, 1 something is broken, 2 bad input, 130 stopped
"""

# Samples that a process opens in one piece of work.
SAMPLES_PER_PIECE = 256


def main(argv: list[str] | None = None) -> int:
    """Verify as the command line says; return the exit code."""
    request = parse(
        VerifyFlags,
        argv,
        prog="python -m sdbench verify-data",
        description="Compare the files of a data set with its index, and open its samples.",
        epilog=EPILOG,
    )
    check(request)
    flags = request.config
    if flags.count:
        count_tars(flags.place, flags.out, read_avif=flags.read_avif)
        return 0
    with blamed_on_place(VerifyFlags):
        # All hashes of the shards are compared below instead.
        config = describe_source(
            flags.place, data_format=flags.data_format, flags=flags, validate_hash="none"
        )
        verify = verify_mds if config.data_format == "mds" else verify_samples
        num_broken, checked = verify(config, flags)
    if num_broken:
        print(f"{counted(num_broken, 'broken thing was', 'broken things were')} found.")
        return 1
    print(f"All is well: {checked}.")
    return 0


def verify_mds(config: SourceConfig, flags: VerifyFlags) -> tuple[int, str]:
    """Compare the shards of an MDS data set with its index.json, and print what is broken.

    With --deep every sample is opened, if all shards are sound. Returns the number of faults, and a
    sentence on what was checked for when there are none.
    """
    (place,) = locate_mds(config)
    try:
        shards = place.shards
    except ConfigError as error:
        print(f"broken: {error.value}: {error.what}.")
        return 1, ""
    # It imports torch, which --help does without.
    from sdbench.data.formats.mds_shards import make_streams

    (stream,) = make_streams(config)
    work = functools.partial(_verify_shard, place, stream)
    num_broken = _work_through(work, len(shards), place.num_samples, flags)
    if not num_broken:
        for sentence in describe_missing(place):
            print(f"note: {sentence}")
    if num_broken or not flags.deep:
        rows = None if num_broken else open_rows(tell_kind(config))
        if isinstance(rows, LatentRowReader):
            _print_buckets(rows)
        found = counted(len(shards), "shard is", "shards are")
        return num_broken, f"{found} what {INDEX_NAME} says (only --deep looks at samples)"
    return verify_samples(config, flags)


def verify_samples(config: SourceConfig, flags: VerifyFlags) -> tuple[int, str]:
    """Open a data set as training does, and look at its samples; returns as `verify_mds`.

    With --deep they are read; else only the captions of pictures are looked at.
    """
    try:
        rows = open_rows(tell_kind(config))
    except RunError as error:
        print(f"broken: {error}")
        return 1, ""
    if isinstance(rows, LatentRowReader):
        _print_buckets(rows)
    if flags.deep:
        look, checked = rows.read, f"each of the {len(rows)} samples can be used"
    else:
        checked = f"{counted(len(rows), 'sample is', 'samples are')} listed"
        if isinstance(rows, LatentRowReader):
            return 0, f"{checked} (--deep opens them)"
        look = rows.check_caption
        checked += ", and no caption is missing"
        checked += " or empty" if flags.empty_captions != KEEP else ""
        checked += " (--deep opens the pictures)"
    pieces = Shards(num_samples=len(rows), samples_per_shard=SAMPLES_PER_PIECE)
    work = functools.partial(_verify_samples, rows, look, pieces)
    return _work_through(work, pieces.num_shards, len(rows), flags), checked


def _print_buckets(rows: LatentRowReader) -> None:
    """Print how many samples of each shape there are, where shapes differ."""
    for config, samples in rows.resolutions:
        if config.buckets is not None:
            mixture = mix(samples, dataclasses.replace(config, max_bad_fraction=1.0))
            counts = zip(mixture.shapes, mixture.counts, strict=True)
            listed = ", ".join(f"{shape} {count}" for shape, count in counts)
            print(f"Samples of each shape ({config.resolution}): {listed}.")


def tell_kind(config: SourceConfig) -> SourceConfig:
    """Return the same source with `latents` set by its columns."""
    holds_latents = find_resolutions(read_columns(config))
    return dataclasses.replace(config, latents=PRECOMPUTED if holds_latents else ONLINE)


def _verify_shard(place: MdsPlace, stream: Any, number: int) -> WorkReport:
    """Verify a shard of MDS by its number; `stream` is Streaming's description of the data set."""
    shard = place.shards[number]
    faults = [] if is_url(place.source) else _verify_files(place, shard)
    if place.remote is not None and not faults:
        faults = _verify_copy(place, stream, number)
    return WorkReport(shard["samples"], faults)


def _verify_files(place: MdsPlace, shard: Mapping[str, Any]) -> list[str]:
    paths = {Path(place.source, file["basename"]): file for file in files_of(shard)}
    found = [path for path in paths if path.is_file()]
    if not found and place.remote is None:
        return [f"{[*paths][-1]}: missing."]
    faults = []
    for path in found:
        try:
            _compare(StoredFile(path), paths[path], shard)
        except RunError as error:
            faults.append(str(error))
    return faults


def _compare(stored: StoredFile, file: Mapping[str, Any], shard: Mapping[str, Any]) -> None:
    """Compare one of the two files of a shard with its entry."""
    try:
        check_shard(stored.path, file, shard, hashes=file["hashes"])
    except ValueError as error:
        raise RunError(f"{stored}: {error}.") from error


def _verify_copy(place: MdsPlace, stream: Any, number: int) -> list[str]:
    """Copy a shard, unless it has been, and compare it; a damaged copy is made again once."""
    from sdbench.data.formats.compat import open_shards

    shard = place.shards[number]
    raw = shard["raw_data"]
    source = os.path.join(place.remote, copied_file(shard)["basename"])
    copied = StoredFile(Path(place.local, raw["basename"]), source=source)

    def copy(file: StoredFile) -> None:
        stream.prepare_shard(open_shards(stream)[number])

    try:
        with errors_named(f"{source}: cannot be had"):
            copy(copied)
            read_whole(copied, lambda file: _compare(file, raw, shard), copy_again=copy)
    except RunError as error:
        return [str(error)]
    return []


def _verify_samples(
    rows: RowReader, look: Callable[[int], Any], pieces: Shards, number: int
) -> WorkReport:
    indices = pieces.indices(number)
    bad = []
    for index in indices:
        try:
            look(index)
        except MissingLatentError:
            # Not broken, and counted by `describe_missing`.
            continue
        except (BadSampleError, RunError) as error:
            bad.append(str(error))
    return WorkReport(len(indices), bad, rows.take_profiles())


def _work_through(work: Work, num_pieces: int, num_samples: int, flags: VerifyFlags) -> int:
    """Do all the work; print each broken thing as it is found, and return how many there are."""
    broken: set[str] = set()
    profiles: collections.Counter[str] = collections.Counter()
    numbers = range(num_pieces)
    with run_work(work, numbers, num_workers=flags.num_workers, num_samples=num_samples) as reports:
        for report in reports:
            profiles.update(report.profiles)
            # A damaged file spoils many samples, and is named once.
            for sentence in report.bad:
                if sentence not in broken:
                    broken.add(sentence)
                    print(f"broken: {sentence}", flush=True)
    if profiles:
        print(f"note: {describe_profiles(profiles)}")
    return len(broken)
