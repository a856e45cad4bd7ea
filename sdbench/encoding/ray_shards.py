"""`encode_on_ray`: the encoded batches of precompute from actors of Ray Data."""

from __future__ import annotations

import functools
import time
from collections.abc import Generator, Mapping, Sequence

from sdbench.base.errors import RunError
from sdbench.data.batches.batches import Batch
from sdbench.encoding.encoder import EncodedBatch, EncodeJob, Step, encode_batch
from sdbench.encoding.ray_stages import ReadStage, batch_bytes
from sdbench.encoding.ray_stream import (
    Failure,
    Pool,
    Stage,
    StreamEnd,
    encoder_pool,
    make_stream,
    set_up_encoder_process,
)
from sdbench.settings.online import ActorSettings

# The times of encoders in other processes are not part of a step of this one.
TIMES_ELSEWHERE = {"vae": "encoders_vae", "text": "encoders_text"}


class EncodePiecesStage(Stage):
    """Encodes the images of a `Batch` to an `EncodedBatch`."""

    def __init__(self, job: EncodeJob, resources: Mapping[str, float]) -> None:
        """Build the encoders; `resources` are those of this actor."""
        self._job = job
        self._encoder = job.make_encoder(set_up_encoder_process(resources))

    def work(self, content: Batch) -> EncodedBatch:
        """Encode a batch."""
        step = Step()
        encoded = encode_batch(self._job, self._encoder, content, step=step)
        for here, elsewhere in TIMES_ELSEWHERE.items():
            step.seconds[elsewhere], step.seconds[here] = step.seconds[here], 0.0
        return encoded


def encode_on_ray(
    job: EncodeJob,
    numbers: Sequence[int],
    *,
    settings: ActorSettings,
    num_samples: int,
    num_ahead: int,
) -> Generator[EncodedBatch]:
    """Encode the batches of shards in actors, in order, while this process writes.

    Ray is connected. About `num_ahead` batches are kept ready. Errors are those of `encode_here`.
    """
    pieces = [piece for number in numbers for piece in job.pieces(number)]
    read = functools.partial(ReadStage, config=job.config, pieces=pieces, num_samples=num_samples)
    reading = Pool(read, num_actors=settings.num_decoders, resources={"CPU": 1.0})
    stream = make_stream(
        (reading, encoder_pool(EncodePiecesStage, settings, job=job)),
        num_rows=len(pieces),
        row_bytes=batch_bytes(job.config, job.batch_size),
        num_ahead=num_ahead,
    )
    end = StreamEnd(stream.iterator(), timeout_s=job.config.data_timeout_s)
    try:
        for number in range(len(pieces)):
            started_s = time.perf_counter()
            row = end.take()
            assert row is not None and row.number == number, row
            if isinstance(row.content, Failure):
                raise RunError(row.content.reason)
            row.content.step.seconds["data_wait"] = time.perf_counter() - started_s
            yield row.content
    finally:
        end.close()
