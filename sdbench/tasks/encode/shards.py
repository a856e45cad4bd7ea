"""`ShardWriter`: writes latents and text embeddings shard by shard, as they are encoded.

It is one process's share of `precompute`: workers read and decode while the encoders run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader

from sdbench.base.errors import RunError
from sdbench.base.progress import show_progress
from sdbench.data.pipeline.batches import GoodBatch
from sdbench.data.pipeline.order import Keys
from sdbench.data.pipeline.shared_batches import SharedBatch
from sdbench.data.pipeline.watchdog import time_limit
from sdbench.data.prepare.convert import check_bad_fraction
from sdbench.data.prepare.writers import Output
from sdbench.tasks.encode.encoder import (
    CAPTION_COLUMN,
    EncodedBatch,
    EncodeJob,
    Encoder,
    Step,
    encode_batch,
    find_finite,
)
from sdbench.tasks.encode.images import ImageReader, LoadedBatch


class EncodingHere:
    """Encodes in this process, while its workers read and decode."""

    def __init__(self, job: EncodeJob, *, reader: ImageReader, encoder: Encoder) -> None:
        """Prepare; nothing is read yet."""
        self._job = job
        self._reader = reader
        self._encoder = encoder
        self._received = [SharedBatch() for _ in job.configs]

    def encode(self, numbers: Sequence[int]) -> Generator[EncodedBatch]:
        """Encode as `Encoding` says."""
        pieces = [piece for number in numbers for piece in self._job.pieces(number)]
        with contextlib.closing(self._load(pieces)) as loaded:
            while True:
                step = Step()
                with step.phase("data_wait"):
                    batch = next(loaded, None)
                if batch is None:
                    return
                yield encode_batch(self._job, self._encoder, batch, step=step)

    def _load(self, pieces: list[range]) -> Iterator[LoadedBatch]:
        """Batches in order, copied from the shared memory of their worker."""
        config = self._job.configs[0]
        workers = {}
        if config.num_workers:
            workers = {"num_workers": config.num_workers, "prefetch_factor": config.prefetch_factor}
        loader = DataLoader(
            Keys(len(pieces)), sampler=pieces, batch_size=None, collate_fn=self._reader, **workers
        )
        silence = (
            f"No batch of images came for {config.data_timeout_s:g} s: a download or a disk is "
            "stuck. --data_timeout_s sets how long to wait."
        )
        batches = None
        try:
            while True:
                with time_limit(config.data_timeout_s, message=silence):
                    batches = iter(loader) if batches is None else batches
                    batch = next(batches, None)
                if batch is None:
                    return
                if isinstance(batch, RunError):
                    raise batch
                yield batch._replace(
                    parts=[
                        part if part.report.slot is None else self._own(number, part)
                        for number, part in enumerate(batch.parts)
                    ]
                )
        except RunError:
            raise
        except RuntimeError as error:
            # As torch reports a killed worker.
            raise RunError(f"Loading images failed: {error}") from error
        finally:
            # Ends the workers now. The traceback of an error would keep them until garbage is
            # collected; if their queues go first, that costs 5 s for each worker.
            del batches

    def _own(self, number: int, part: GoodBatch) -> GoodBatch:
        copies = self._received[number].copy(part.tensors, slot=part.report.slot)
        return part._replace(tensors=copies)


class Encoding(Protocol):
    """Encodes in this process, or in actors of Ray Data."""

    def encode(self, numbers: Sequence[int]) -> Generator[EncodedBatch]:
        """Encode the batches of shards, in order.

        Raises:
            RunError: A sample is bad and may not be left out, or a file is damaged; or no batch
                came for too long.
        """
        ...


class ShardWriter:
    """Writes encoded shards; `steps` has the times and counts of each batch."""

    def __init__(self, job: EncodeJob, *, encoding: Encoding, output: Output) -> None:
        """Prepare; nothing is read yet."""
        self.steps: list[Step] = []
        self._job = job
        self._encoding = encoding
        self._output = output
        self._rows_ended_s = 0.0

    def write(self, numbers: Sequence[int], *, num_missing: int | None) -> None:
        """Encode and write shards.

        Args:
            numbers: Of the shards.
            num_missing: Samples left for all ranks together, to show progress; None shows no
                progress.

        Raises:
            RunError: A sample is bad and may not be left out, too many are, a file is damaged, or
                the output cannot be written.
        """
        job = self._job
        all_bad = self._output.totals().bad
        num_mine = sum(len(job.indices(number)) for number in numbers)
        num_read = 0

        def count(one: EncodedBatch) -> int:
            """The samples that all ranks read meanwhile, as they advance at the same pace."""
            nonlocal num_read
            num_before = num_missing * num_read // num_mine
            num_read += one.batch.num_read
            return num_missing * num_read // num_mine - num_before

        with contextlib.closing(self._encoding.encode(numbers)) as encoded:
            batches: Iterator[EncodedBatch] = encoded
            if num_missing is not None:
                batches = show_progress(
                    encoded,
                    total=job.num_samples,
                    unit="sample",
                    num_done=job.num_samples - num_missing,
                    count=count,
                )
            for number in numbers:
                bad: list[str] = []
                self._output.write_chunk(number, self._rows(number, batches, bad), bad=bad)
                # The time to close a shard counts in its last batch.
                self.steps[-1].seconds["write"] += time.perf_counter() - self._rows_ended_s
                all_bad += bad
                check_bad_fraction(
                    all_bad, num_samples=job.num_samples, allowed=job.configs[0].max_bad_fraction
                )

    def _rows(
        self, number: int, encoded: Iterator[EncodedBatch], bad: list[str]
    ) -> Iterator[dict[str, Any]]:
        """The rows of a shard."""
        for _ in self._job.pieces(number):
            batch, columns, step = next(encoded)
            bad += batch.bad
            with step.phase("write"):
                is_error = self._job.configs[0].on_bad_sample == "error"
                good, overflows = find_finite(columns, batch.names, is_error=is_error)
                bad += overflows
                for position in good:
                    step.num_images += 1
                    row = {name: values[position] for name, values in columns.items()}
                    yield row | {CAPTION_COLUMN: batch.captions[position]}
            self.steps.append(step)
        self._rows_ended_s = time.perf_counter()
