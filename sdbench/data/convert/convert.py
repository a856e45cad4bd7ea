"""The command convert: writes a data set in another format."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sdbench.base.errors import EXIT_INTERRUPTED, ConfigError, RunError
from sdbench.base.stop import STOPS
from sdbench.base.units import counted
from sdbench.data.batches.colours import describe_profiles
from sdbench.data.convert.chunk_formats import Row
from sdbench.data.convert.flags import (
    MAX_SAMPLES_PER_SHARD,
    MIN_SAMPLES_PER_SHARD,
    NUM_SHARDS_WANTED,
    ConvertFlags,
    blamed_on_place,
)
from sdbench.data.convert.maker import tell_maker
from sdbench.data.convert.pool import Shards, WorkReport, run_work
from sdbench.data.convert.rows import RowReader, describe_source, open_rows
from sdbench.data.convert.writers import Output, open_output
from sdbench.data.formats.data_formats import read_columns
from sdbench.data.formats.empty_caption import EMPTY_CAPTION_NAME, load_empty_caption
from sdbench.data.formats.identity import DATA, identify
from sdbench.data.order.mixture import keep_sizes
from sdbench.data.places.remote import storable_name
from sdbench.data.samples import SKIP_ADVICE, BadSampleError
from sdbench.settings.request import parse

EPILOG = """\
examples:
  a folder:           python -m sdbench convert photos --folder data/photos
                      (photos/a.jpg with photos/a.txt, or photos/captions.csv: file,caption)
  one tar:            python -m sdbench convert pairs.tar --folder data/pairs
  many tars:          python -m sdbench convert 's3://bucket/{00000..00127}.tar' \\
                      --folder data/laion
  back to tars:       python -m sdbench convert data/pairs --folder data/tars \\
                      --out_format webdataset
  latents:            python -m sdbench convert data/latents --folder data/latents-parquet \\
                      --latents precomputed --out_format parquet
then train on it:     composer benchmark.py --remote data/pairs

Stopped at any moment, the same command goes on where it was: finished shards are kept
beside the folder, in FOLDER.partial, until all are there.

exit codes: 0 ok, 1 a sample or file is bad or the folder cannot be written, 2 bad input,
130 stopped
"""


@dataclass(frozen=True, kw_only=True)
class Conversion(Shards):
    """A conversion, pickled for each worker; a shard is a chunk of the output."""

    rows: RowReader
    output: Output
    skip_bad: bool

    def write_chunk(self, number: int) -> WorkReport:
        """Convert one chunk."""
        bad: list[str] = []
        self.output.write_chunk(number, self._read_good(number, bad), bad=bad)
        return WorkReport(len(self.indices(number)), bad, self.rows.take_profiles())

    def _read_good(self, number: int, bad: list[str]) -> Iterator[Row]:
        for index in self.indices(number):
            try:
                yield self.rows.read(index)
            except BadSampleError as error:
                if not self.skip_bad:
                    raise RunError(
                        f"{error} Finished shards are kept; the same command with {SKIP_ADVICE}."
                    ) from error
                bad.append(str(error))


def main(argv: list[str] | None = None) -> int:
    """Convert as the command line says; return the exit code."""
    flags = parse(
        ConvertFlags,
        argv,
        prog="python -m sdbench convert",
        description="Turn a data set of images with captions, or of latents, into another format.",
        epilog=EPILOG,
    ).config
    if flags.wants_latents and flags.out_format == "folder":
        raise ConfigError(
            "This format cannot hold latents",
            value=flags.out_format,
            allowed="mds, parquet or webdataset",
            flag="--out_format",
        )
    try:
        conversion = _open(flags)
        with conversion.output.lock():
            if flags.wants_latents:
                _copy_empty_caption(flags.place, conversion.output)
            _convert(conversion, flags)
    except STOPS:
        print("Stopped: the same command goes on from the finished shards.", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _copy_empty_caption(place: str, output: Output) -> None:
    try:
        content = load_empty_caption(place)
    except (OSError, RunError) as error:
        print(f"The copy has no encoded empty caption, so that training can drop none ({error}).")
    else:
        output.write_beside(EMPTY_CAPTION_NAME, content)


def _open(flags: ConvertFlags) -> Conversion:
    with blamed_on_place(ConvertFlags):
        source = describe_source(flags.place, data_format=flags.data_format, flags=flags)
        rows = open_rows(source)
    if rows.num_dropped:
        print(f"Left out by --filters: {counted(rows.num_dropped, 'sample')}.")
    columns = read_columns(source)
    if left_out := columns and columns - rows.taken - rows.columns.keys():
        print(f"Of the columns of {flags.place} {', '.join(sorted(left_out))} are not taken over.")
    num_samples = min(len(rows), flags.max_samples or len(rows))
    samples_per_shard = flags.samples_per_shard or choose_samples_per_shard(num_samples)
    output = open_output(
        Path(flags.folder),
        data_format=flags.out_format,
        columns=rows.columns,
        num_chunks=-(-num_samples // samples_per_shard),
        job={
            "command": "convert",
            "source": storable_name(flags.place),
            "from": source.data_format,
            "latents": source.latents,
            "filters": dict(source.filters or {}),
            "class_prompts": source.class_prompts,
            "read_avif": source.read_avif,
            "empty_captions": source.empty_captions,
            "num_samples": num_samples,
            "samples_per_shard": samples_per_shard,
            **(tell_maker(flags.place) if flags.wants_latents else {}),
        },
        inputs=identify({DATA: source}),
        accepts_changes=flags.changed_inputs == "accept",
    )
    return Conversion(
        rows=rows,
        output=output,
        num_samples=num_samples,
        samples_per_shard=samples_per_shard,
        skip_bad=flags.on_bad_sample == "skip",
    )


def choose_samples_per_shard(num_samples: int) -> int:
    """Return the default number of samples per shard."""
    wanted = -(-num_samples // NUM_SHARDS_WANTED)
    return min(max(wanted, MIN_SAMPLES_PER_SHARD), MAX_SAMPLES_PER_SHARD)


def _convert(conversion: Conversion, flags: ConvertFlags) -> None:
    """Write the missing chunks, then put the data set together."""
    output, num_samples = conversion.output, conversion.num_samples
    started_s = time.monotonic()
    missing = output.missing_chunks()
    num_missing = sum(len(conversion.indices(number)) for number in missing)
    if len(missing) < output.num_chunks:
        num_there = output.num_chunks - len(missing)
        print(f"resuming: {num_there} of {output.num_chunks} shards are there", flush=True)
    bad = output.totals().bad
    profiles: collections.Counter[str] = collections.Counter()
    allowed = flags.max_bad_fraction
    check_bad_fraction(bad, num_samples=num_samples, allowed=allowed)
    with run_work(
        conversion.write_chunk,
        missing,
        num_workers=flags.num_workers,
        num_samples=num_samples,
        num_done=num_samples - num_missing,
    ) as reports:
        for report in reports:
            bad += report.bad
            profiles.update(report.profiles)
            check_bad_fraction(bad, num_samples=num_samples, allowed=allowed)
    totals = output.finish()
    keep_sizes(flags.folder, totals.sizes, data_format=flags.out_format)
    duration_s = time.monotonic() - started_s
    print(
        f"Wrote {totals.num_written} of the {counted(num_samples, 'sample')} of {flags.place!r} to "
        f"{flags.folder}; {len(totals.bad)} bad ones are left out. This run read {num_missing} in "
        f"{duration_s:.1f} s, {num_missing / duration_s:.1f} samples/s."
    )
    for sentence in totals.bad:
        print(f"  {sentence}")
    if profiles:
        print(f"Files are as they were: {describe_profiles(profiles)}")


def check_bad_fraction(bad: list[str], *, num_samples: int, allowed: float) -> None:
    """Raise a `RunError` with the first bad samples if their share is larger than allowed."""
    if len(bad) > allowed * num_samples:
        raise RunError(
            f"{len(bad)} of {num_samples} samples are bad, more than the {allowed:.2%} of "
            f"--max_bad_fraction: {' '.join(bad[:5])}"
        )
