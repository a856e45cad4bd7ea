"""`OnlineLoader`: batches that actors of Ray Data read, decode and encode while the ranks train.

A rank gets the batches of the loader in its own process, as latents: the order follows from the
seed and from the position that a run resumes at. One stream serves all ranks; the first rank
describes it and hands each rank its end.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.data.pipeline.batches import Batch, BatchReader, BatchReport, GoodBatch, fill_up
from sdbench.data.pipeline.loader import CheckedLoader
from sdbench.data.pipeline.order import EpochOrder, Keys
from sdbench.data.samples import SampleType
from sdbench.data.source import NUM_LATENT_CHANNELS, SourceConfig
from sdbench.models.architecture import Architecture
from sdbench.ranks.distributed import Ranks, broadcast
from sdbench.record.store import INVALID
from sdbench.settings.online import OnlineSettings
from sdbench.tasks.encode.encoder import Encoder, find_finite
from sdbench.tasks.encode.ray_stages import DecodeStage, OrderStage, Prepared, batch_bytes
from sdbench.tasks.encode.ray_stream import (
    Failure,
    Pool,
    Row,
    Stage,
    StreamEnd,
    encoder_pool,
    make_stream,
    set_up_encoder_process,
)

if TYPE_CHECKING:
    from ray.data import Dataset


class EncodeStage(Stage):
    """Encodes `Prepared` images to a `Batch` of moments and text embeddings."""

    def __init__(
        self,
        make_encoder: Callable[..., Encoder],
        batch_size: int,
        resources: Mapping[str, float],
        is_error: bool,
    ) -> None:
        """Build the encoders.

        Args:
            make_encoder: Builds them on a `device`.
            batch_size: Images per call of an encoder.
            resources: Of this actor.
            is_error: Whether latents that are not finite are an error.
        """
        self._encoder = make_encoder(device=set_up_encoder_process(resources))
        self._batch_size = batch_size
        self._is_error = is_error

    def work(self, content: Prepared) -> Batch:
        """Encode a batch in parts of `batch_size`, and fill it up."""
        good = content.good
        parts = [
            self._encode(good, slice(start, start + self._batch_size))
            for start in range(0, len(good.keys), self._batch_size)
        ]
        tensors = {
            name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())
        }
        names = [f"sample {key.index}" for key in good.keys]
        kept, bad = find_finite(tensors, names, is_error=self._is_error)
        good.report.bad += bad
        encoded = GoodBatch(
            {name: tensor[kept] for name, tensor in tensors.items()},
            [good.keys[position] for position in kept],
            good.report,
        )
        return fill_up(encoded, num_samples=content.num_samples)

    def _encode(self, good: GoodBatch, part: slice) -> dict[str, torch.Tensor]:
        images, input_ids = good.tensors["image"][part], good.tensors["input_ids"][part]
        moments = self._encoder.encode_images(
            images, indices=[key.index for key in good.keys[part]]
        )
        mean, logvar = np.split(moments, [NUM_LATENT_CHANNELS], axis=1)
        arrays = {
            "latent_mean": mean,
            "latent_logvar": logvar,
            "text_embedding": self._encoder.encode_captions(input_ids),
        }
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()
        }


class OnlineLoader(CheckedLoader):
    """A `CheckedLoader` of latents that other processes encode.

    A batch that could not be made is replaced by the one before, up to `max_failed_blocks` times.
    """

    def __init__(
        self,
        *,
        batches: BatchReader,
        config: SourceConfig,
        ranks: Ranks,
        make_stream: Callable[[int], Dataset],
        max_failed_blocks: int,
    ) -> None:
        """Set up; the stream begins with the first iteration, when the position is known.

        Args:
            batches: Reader of the images, for their number, blocks and names.
            config: The source, of this rank.
            ranks: This rank; all ranks have such a loader and iterate in step.
            make_stream: Makes the rows of all ranks in turn from a global batch on; called on the
                first rank.
            max_failed_blocks: Number of batches that may fail.
        """
        order = EpochOrder(batches.blocks, config=config)
        super().__init__(Keys(batches.num_samples), batches=batches, order=order, config=config)
        self.sample_type = SampleType.MOMENTS
        self._epoch_order = order
        self._ranks = ranks
        self._make_stream = make_stream
        self._max_failed_blocks = max_failed_blocks
        self._end: StreamEnd | None = None
        self._next_batch = self._first_batch = 0
        self._last: Batch | None = None

    def close(self) -> None:
        """End the stream; its actors end when all ranks have called this."""
        if self._end is not None:
            self._end.close()
            self._end = None

    def describe_stream(self) -> str | None:
        """Ray Data's statistics of the stream, with the times of each stage; None without one."""
        return None if self._end is None else self._end.describe()

    def _begin(self) -> Iterator[Batch | RunError]:
        first = self._num_in_epoch // self.batch_size
        epoch_start = self._epoch_order.epoch * len(self)
        for number in range(first, len(self)):
            yield self._receive(epoch_start + number)

    def _receive(self, global_batch: int) -> Batch:
        """This rank's part of a global batch, counted from the first epoch's first."""
        if self._next_batch != global_batch:
            self.close()
        row = None if self._end is None else self._take()
        if row is None:
            # At the beginning, and if a run takes more batches than planned.
            self.close()
            self._open(global_batch)
            row = self._take()
        expected = (global_batch - self._first_batch) * self._ranks.world_size + self._ranks.rank
        if row is None or row.number != expected:
            raise RunError(
                f"Ray Data gave rank {self._ranks.rank} {row and row.number} in place of row "
                f"{expected}",
                status=INVALID,
            )
        self._next_batch = global_batch + 1
        if isinstance(row.content, Failure):
            return self._stand_in(row.content)
        self._last = row.content
        if not self.pin_memory:
            return row.content
        tensors = {name: tensor.pin_memory() for name, tensor in row.content.tensors.items()}
        return row.content._replace(tensors=tensors)

    def _stand_in(self, failure: Failure) -> Batch:
        """The batch before in place of a failed one."""
        self.stats.num_failed_blocks += 1
        sentence = f"A batch could not be prepared: {failure.reason}"
        if self.stats.num_failed_blocks > self._max_failed_blocks:
            raise RunError(
                f"{sentence} (--max_failed_blocks allows {self._max_failed_blocks} of them a rank)"
            )
        if self._last is None:
            raise RunError(f"{sentence} It is the first one: no batch before can stand in for it.")
        print(f"{sentence} The one before is trained on again.", file=sys.stderr)
        return Batch(self._last.tensors, BatchReport(num_images=self.batch_size))

    def _open(self, first_batch: int) -> None:
        """Begin a stream with a global batch, on all ranks together."""
        ends: Any = None
        if self._ranks.rank == 0:
            try:
                stream = self._make_stream(first_batch)
                ends = stream.streaming_split(self._ranks.world_size, equal=True)
            except RunError as error:
                ends = error
        ends = broadcast(ends, self._ranks)
        if isinstance(ends, RunError):
            raise ends
        self._end = StreamEnd(ends[self._ranks.rank])
        self._next_batch = self._first_batch = first_batch

    def _take(self) -> Row | None:
        assert self._end is not None
        try:
            return self._end.take(timeout_s=self._config.data_timeout_s)
        except TimeoutError:
            raise RunError(self._describe_silence()) from None


def build(
    source: SourceConfig,
    settings: OnlineSettings,
    *,
    architecture: Architecture,
    encoder_dtype: str,
    weights_seed: int,
    ranks: Ranks,
    num_batches: int,
) -> OnlineLoader:
    """Build the loader of a rank; Ray is connected.

    Args:
        source: The images, of this rank.
        settings: The actors.
        architecture: With the encoders.
        encoder_dtype: Type of their weights and arithmetic.
        weights_seed: Of random weights.
        ranks: This rank.
        num_batches: Global batches of the run, and so of a stream.

    Raises:
        ConfigError: As `data.check`.
    """
    # Samples are read elsewhere, and the encoders take uint8 pixels.
    source = dataclasses.replace(source, num_workers=0, image_dtype="uint8")
    batches = data.open_batches(source)
    make_encoder = functools.partial(
        Encoder,
        architecture,
        sample_type=SampleType.MOMENTS,
        encoder_dtype=encoder_dtype,
        seed=weights_seed,
    )

    def make(first_batch: int) -> Dataset:
        any_rank = dataclasses.replace(source, rank=0)
        pools = (
            Pool(
                stage=OrderStage,
                arguments={
                    "blocks": list(batches.blocks),
                    "config": any_rank,
                    "first_batch": first_batch,
                },
            ),
            Pool(
                stage=DecodeStage,
                arguments={"config": any_rank, "num_samples": batches.num_samples},
                num_actors=settings.num_decoders,
                resources={"CPU": 1.0},
            ),
            encoder_pool(
                EncodeStage,
                settings,
                make_encoder=make_encoder,
                batch_size=settings.online_encoder_batch_size,
                is_error=source.on_bad_sample == "error",
            ),
        )
        num_actors = settings.num_decoders + settings.num_encoders
        return make_stream(
            pools,
            num_rows=num_batches * ranks.world_size,
            row_bytes=batch_bytes(source, source.device_batch_size),
            num_ahead=source.prefetch_factor * num_actors,
        )

    return OnlineLoader(
        batches=batches,
        config=source,
        ranks=ranks,
        make_stream=make,
        max_failed_blocks=settings.max_failed_blocks,
    )
