"""`ShardWriter`: latents and text embeddings on disk, shard by shard, as they are encoded.

One process's share of the work of `precompute`: workers read and decode while VAE and text encoder
run, and what they give is written as it comes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader

from sdbench.base.errors import RunError
from sdbench.data.latent_columns import check_finite
from sdbench.data.pipeline.batches import GoodBatch
from sdbench.data.pipeline.order import Keys
from sdbench.data.pipeline.shared_batches import SharedBatch
from sdbench.data.pipeline.watchdog import time_limit
from sdbench.data.prepare.convert import check_bad_fraction
from sdbench.data.prepare.pool import show_progress
from sdbench.data.prepare.writers import Output
from sdbench.data.samples import BadSampleError
from sdbench.tasks.encode.encoder import (
    CAPTION_COLUMN,
    EncodedBatch,
    EncodeJob,
    Encoder,
    Step,
    encode_batch,
)
from sdbench.tasks.encode.images import ImageReader, LoadedBatch


class EncodingHere:
    """Encodes in this process, while its workers read and decode."""

    def __init__(self, job: EncodeJob, *, reader: ImageReader, encoder: Encoder) -> None:
        """Prepare; nothing is read yet.

        Args:
            job: What is to be encoded.
            reader: Reads and decodes the images.
            encoder: VAE and text encoder of this rank.
        """
        self._job = job
        self._reader = reader
        self._encoder = encoder
        self._received = [SharedBatch() for _ in job.configs]

    def encode(self, numbers: Sequence[int]) -> Generator[EncodedBatch]:
        """The batches of shards, in order.

        Raises:
            RunError: A sample is bad and may not be left out, or a file is damaged.
        """
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
        """Batches in order, out of the memory that their worker writes to again."""
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
            # torch says so when a worker has been killed.
            raise RunError(f"Loading images failed: {error}") from error
        finally:
            # Ends the workers now. The traceback of an error would keep them, and when garbage is
            # collected much later their queues may go first, which costs 5 s for each worker.
            del batches

    def _own(self, number: int, part: GoodBatch) -> GoodBatch:
        copies = self._received[number].copy(part.tensors, slot=part.report.slot)
        return part._replace(tensors=copies)


class Encoding(Protocol):
    """Where encoded batches come from."""

    def encode(self, numbers: Sequence[int]) -> Generator[EncodedBatch]:
        """The batches of shards, in order.

        Raises:
            RunError: One of them cannot be made.
        """
        ...


class ShardWriter:
    """Writes encoded shards, and times each batch.

    Attributes:
        steps: Times and counts of each batch so far.
    """

    def __init__(self, job: EncodeJob, *, encoding: Encoding, output: Output) -> None:
        """Prepare; nothing is read yet.

        Args:
            job: What is to be encoded.
            encoding: Who does it.
            output: The data set that is written.
        """
        self.steps: list[Step] = []
        self._job = job
        self._encoding = encoding
        self._output = output
        self._rows_ended_s = 0.0

    def write(self, numbers: Sequence[int], *, num_missing: int | None) -> None:
        """Encode and write shards.

        Args:
            numbers: Of the shards.
            num_missing: Samples that all ranks together have to do, to show progress; None shows
                none.

        Raises:
            RunError: A sample is bad and may not be left out, too many are, a file is damaged, or
                the output cannot be written.
        """
        job = self._job
        all_bad = self._output.totals().bad
        with contextlib.closing(self._encoding.encode(numbers)) as encoded:
            batches: Iterator[EncodedBatch] = encoded
            if num_missing is not None:
                num_mine = sum(len(job.indices(number)) for number in numbers)
                batches = show_progress(
                    _count_for_all(encoded, num_mine=num_mine, num_missing=num_missing),
                    num_samples=job.num_samples,
                    num_done=job.num_samples - num_missing,
                )
            for number in numbers:
                bad: list[str] = []
                self._output.write_chunk(number, self._rows(number, batches, bad), bad=bad)
                # Closing a shard belongs to its last batch.
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
                for position in range(len(batch.indices)):
                    row = {name: values[position] for name, values in columns.items()}
                    if self._is_sound(row, name=batch.names[position], bad=bad):
                        step.num_images += 1
                        yield row | {CAPTION_COLUMN: batch.captions[position]}
            self.steps.append(step)
        self._rows_ended_s = time.perf_counter()

    def _is_sound(self, row: dict[str, np.ndarray], *, name: str, bad: list[str]) -> bool:
        """Whether an encoder gave numbers that float16 can hold; half precision may overflow.

        Raises:
            RunError: It did not, and samples may not be left out.
        """
        try:
            for column, array in row.items():
                check_finite(f"{name}, {column}", array)
        except BadSampleError as error:
            if self._job.configs[0].on_bad_sample == "error":
                raise RunError(
                    f"{error} (--encoder_dtype fp32 avoids overflow; --on_bad_sample skip goes on "
                    "without such samples)"
                ) from error
            bad.append(str(error))
            return False
        return True


def _count_for_all(
    encoded: Iterable[EncodedBatch], *, num_mine: int, num_missing: int
) -> Iterator[EncodedBatch]:
    """Let each batch stand for what all ranks read meanwhile, as they advance alike."""
    num_read = 0
    for one in encoded:
        num_before = num_missing * num_read // num_mine
        num_read += one.batch.num_read
        counted = one.batch._replace(num_read=num_missing * num_read // num_mine - num_before)
        yield one._replace(batch=counted)
