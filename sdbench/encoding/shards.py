"""One rank's share of `precompute`: encodes batches while workers load, and writes shards."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from sdbench.base.progress import Progress
from sdbench.data.batches.batches import BatchReader
from sdbench.data.batches.colours import describe_profiles
from sdbench.data.batches.loader import watch
from sdbench.data.batches.shared_batches import SharedBatch
from sdbench.data.convert.convert import check_bad_fraction
from sdbench.data.convert.writers import Output
from sdbench.data.formats.empty_caption import EMPTY_CAPTION_NAME, pack_empty_caption
from sdbench.data.order.epochs import Keys, keys_of_first_epoch
from sdbench.encoding.encoder import (
    CAPTION_COLUMN,
    EncodedBatch,
    EncodeJob,
    Step,
    encode_batch,
    find_finite,
)
from sdbench.ranks.distributed import Ranks


def encode_here(
    job: EncodeJob, numbers: Sequence[int], *, reader: BatchReader, device: str
) -> Generator[EncodedBatch]:
    """Encode the batches of shards in this process, while its workers read and decode."""
    encoder, config = job.make_encoder(device), job.config
    pieces = [piece for number in numbers for piece in job.pieces(number)]
    loader = DataLoader(
        Keys(len(pieces)),
        sampler=map(keys_of_first_epoch, pieces),
        batch_size=None,
        collate_fn=reader,
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor if config.num_workers else None,
        timeout=config.data_timeout_s if config.num_workers else 0,
    )
    received, num_read = SharedBatch(), 0
    loaded = watch(lambda: iter(loader), config=config, position=lambda: f"after {num_read} images")
    with contextlib.closing(loaded):
        while True:
            step = Step()
            with step.phase("data_wait"):
                batch = next(loaded, None)
                if batch is None:
                    return
                tensors = received.copy(batch.tensors, slot=batch.report.slot)
            num_read += batch.report.num_images
            yield encode_batch(job, encoder, batch._replace(tensors=tensors), step=step)


def write_shards(
    job: EncodeJob,
    numbers: Sequence[int],
    encoded: Iterator[EncodedBatch],
    *,
    reader: BatchReader,
    output: Output,
    ranks: Ranks,
) -> list[Step]:
    """Write the shards of this rank, and return the times and counts of each batch."""
    config = job.config
    steps: list[Step] = []
    all_bad = output.totals().bad
    profiles: collections.Counter[str] = collections.Counter()
    rows_ended_s = 0.0

    def rows(number: int, bad: list[str]) -> Iterator[dict[str, Any]]:
        nonlocal rows_ended_s
        bad += [f"{reader.name(index)}: {why}." for index, why in job.bad(number).items()]
        for _ in job.pieces(number):
            batch, columns, step, empty = next(encoded)
            if empty is not None:
                output.write_beside(EMPTY_CAPTION_NAME, pack_empty_caption(empty))
            bad += batch.report.bad
            profiles.update(profile for _, profile in batch.report.profiles)
            with step.phase("write"):
                is_error = config.on_bad_sample == "error"
                names = [reader.name(key.index) for key in batch.keys]
                good, overflows = find_finite(columns, names, is_error=is_error)
                bad += overflows
                for position in good:
                    step.num_images += 1
                    row = {name: values[position] for name, values in columns.items()}
                    yield row | {CAPTION_COLUMN: batch.captions[position]}
            steps.append(step)
            progress.advance(batch.report.num_images * ranks.world_size)
        rows_ended_s = time.perf_counter()

    # All ranks advance at about the same pace.
    num_own = sum(len(piece) for number in numbers for piece in job.pieces(number))
    total = ranks.world_size * num_own
    with Progress(total, unit="sample", enabled=ranks.rank == 0) as progress:
        for number in numbers:
            bad: list[str] = []
            output.write_chunk(number, rows(number, bad), bad=bad)
            if steps:  # all samples of a shard may be left out
                # The time to close a shard counts in its last batch.
                steps[-1].seconds["write"] += time.perf_counter() - rows_ended_s
            all_bad += bad
            check_bad_fraction(
                all_bad, num_samples=job.num_samples, allowed=config.max_bad_fraction
            )
    if profiles:
        print(f"Rank {ranks.rank}: {describe_profiles(profiles)}", file=sys.stderr)
    return steps
