"""The command verify-data: checks the files of a data set, and on request every sample."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError, RunError
from sdbench.data import read_columns
from sdbench.data.formats.files import StoredFile, read_whole
from sdbench.data.formats.mds_entries import INDEX_NAME, check_shard, files_of
from sdbench.data.formats.mds_index import MdsPlace, copied_file, locate_mds
from sdbench.data.formats.missing_latents import describe_missing
from sdbench.data.identity import PROVENANCE_NAME
from sdbench.data.latent_columns import find_image_sizes
from sdbench.data.prepare.flags import VerifyFlags, blamed_on_place
from sdbench.data.prepare.pool import Work, WorkReport, run_work
from sdbench.data.prepare.rows import RowReader, describe_source, open_rows
from sdbench.data.remote import explain, is_url
from sdbench.data.samples import BadSampleError, MissingLatentError
from sdbench.data.source import SourceConfig
from sdbench.settings.data import ONLINE, PRECOMPUTED
from sdbench.settings.request import parse

EPILOG = """\
examples:
  every shard against index.json:   python -m sdbench verify-data data/pairs
  and every sample:                 python -m sdbench verify-data data/pairs --deep
  in an object store:               python -m sdbench verify-data s3://bucket/pairs --local /cache

exit codes: 0 all is well, 1 something is broken, 2 bad input, 130 stopped
"""

# Samples of a format without an index that a process opens in a row.
SAMPLES_PER_PIECE = 256


def main(argv: list[str] | None = None) -> int:
    """Verify as the command line says; return the exit code."""
    flags = parse(
        VerifyFlags,
        argv,
        prog="python -m sdbench verify-data",
        description="Compare the files of a data set with its index, and open its samples.",
        epilog=EPILOG,
    ).config
    with blamed_on_place("PLACE", VerifyFlags):
        # The shards' hashes are compared here, all of them.
        config = describe_source(
            flags.place, data_format=flags.data_format, flags=flags, validate_hash="none"
        )
        verify = verify_mds if config.data_format == "mds" else verify_samples
        num_broken = verify(config, deep=flags.deep, num_workers=flags.num_workers)
    return 1 if num_broken else 0


def verify_mds(config: SourceConfig, *, deep: bool, num_workers: int | None) -> int:
    """Compare the shards of an MDS data set with its index.json, and print what is broken.

    With `deep` every sample is opened, if all shards are sound. Returns the number of faults.
    """
    (place,) = locate_mds(config)
    try:
        shards = place.shards
    except ConfigError as error:
        print(f"broken: {error.value}: {error.what}.")
        return _conclude(1)
    for name in _find_orphans(place):
        print(f"note: {name} is not named in {INDEX_NAME}")
    # It imports torch, which --help does without.
    from sdbench.data.formats.mds_shards import make_streams

    # A compressed copy is gone once it is unpacked.
    (stream,) = make_streams(dataclasses.replace(config, validate_hash="auto"))
    work = functools.partial(_verify_shard, place, stream)
    num_broken = _work_through(
        work, len(shards), num_samples=place.num_samples, num_workers=num_workers
    )
    if not num_broken:
        for sentence in describe_missing(place):
            print(f"note: {sentence}")
    if num_broken or not deep:
        return _conclude(num_broken, checked=f"{len(shards)} shards are what {INDEX_NAME} says")
    return verify_samples(config, deep=True, num_workers=num_workers)


def verify_samples(config: SourceConfig, *, deep: bool, num_workers: int | None) -> int:
    """Open a data set as training does, and with `deep` its samples, and print what is broken.

    Returns the number of faults.
    """
    try:
        rows = open_rows(tell_kind(config))
    except RunError as error:
        print(f"broken: {error}")
        return _conclude(1)
    if not deep:
        return _conclude(0, checked=f"{len(rows)} samples are listed (--deep opens them)")
    work = functools.partial(_verify_samples, rows)
    num_pieces = -(-len(rows) // SAMPLES_PER_PIECE)
    num_broken = _work_through(work, num_pieces, num_samples=len(rows), num_workers=num_workers)
    return _conclude(num_broken, checked=f"each of the {len(rows)} samples can be used")


def tell_kind(config: SourceConfig) -> SourceConfig:
    """Return the same data set, with `latents` as its columns show it."""
    holds_latents = find_image_sizes(read_columns(config))
    return dataclasses.replace(config, latents=PRECOMPUTED if holds_latents else ONLINE)


def _verify_shard(place: MdsPlace, stream: Any, number: int) -> WorkReport:
    """Verify a shard of MDS by its number; `stream` is Streaming's description of the data set."""
    shard = place.shards[number]
    faults = [] if is_url(place.source) else _verify_files(place, shard)
    if place.remote is not None and not faults:
        faults = _verify_copy(place, stream, number)
    return WorkReport(shard["samples"], faults)


def _verify_files(place: MdsPlace, shard: Mapping[str, Any]) -> list[str]:
    """Compare the files of a shard in the user's folder with its entry."""
    paths = {Path(place.source, file["basename"]): file for file in files_of(shard)}
    found = [path for path in paths if path.is_file()]
    if not found and place.remote is None:
        return [f"{[*paths][-1]}: missing."]
    faults = []
    for path in found:
        try:
            check_shard(path, paths[path], shard, hashes=paths[path]["hashes"])
        except ValueError as error:
            faults.append(f"{path}: {error}.")
    return faults


def _verify_copy(place: MdsPlace, stream: Any, number: int) -> list[str]:
    """Copy a shard, unless it has been, and compare it; a damaged copy is made again once."""
    from sdbench.data.compat import open_shards

    shard = place.shards[number]
    raw = shard["raw_data"]
    source = os.path.join(place.remote, copied_file(shard)["basename"])
    copied = StoredFile(Path(place.local, raw["basename"]), source=source)

    def copy(file: StoredFile) -> None:
        stream.prepare_shard(open_shards(stream)[number])

    def check(file: StoredFile) -> None:
        try:
            check_shard(file.path, raw, shard, hashes=raw["hashes"])
        except ValueError as error:
            raise RunError(f"{file}: {error}.") from error

    try:
        copy(copied)
        read_whole(copied, check, copy_again=copy)
    except RunError as error:
        return [str(error)]
    except Exception as error:
        # Each object store raises its own types; all mean that the shard cannot be copied.
        return [f"{source}: cannot be had ({explain(error)})."]
    return []


def _verify_samples(rows: RowReader, number: int) -> WorkReport:
    """Open the samples of a piece by its number."""
    first = number * SAMPLES_PER_PIECE
    indices = range(first, min(first + SAMPLES_PER_PIECE, len(rows)))
    bad = []
    for index in indices:
        try:
            rows.read(index)
        except MissingLatentError:
            # Not broken, and counted by `describe_missing`.
            continue
        except (BadSampleError, RunError) as error:
            bad.append(str(error))
    return WorkReport(len(indices), bad)


def _find_orphans(place: MdsPlace) -> list[str]:
    """Return the files in the user's folder that the index does not name."""
    if is_url(place.source):
        return []
    folder = Path(place.source)
    known = {file["basename"] for shard in place.shards for file in files_of(shard)}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return sorted(found - known - {INDEX_NAME, PROVENANCE_NAME})


def _work_through(work: Work, num_pieces: int, *, num_samples: int, num_workers: int | None) -> int:
    """Do all the work; print each broken thing as it is found, and return how many there are."""
    broken: set[str] = set()
    with run_work(
        work, range(num_pieces), num_workers=num_workers, num_samples=num_samples
    ) as reports:
        for report in reports:
            # A damaged file spoils many samples, and is named once.
            for sentence in report.bad:
                if sentence not in broken:
                    broken.add(sentence)
                    print(f"broken: {sentence}", flush=True)
    return len(broken)


def _conclude(num_broken: int, *, checked: str = "") -> int:
    """Print the last line, with what is well if nothing is broken; return `num_broken`."""
    if num_broken:
        print(f"{num_broken} broken thing{'s were' if num_broken > 1 else ' was'} found.")
    else:
        print(f"All is well: {checked}.")
    return num_broken
