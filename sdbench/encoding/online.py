"""`OnlineLoader`: batches that actors of Ray Data read, decode and encode while the ranks train.

A rank gets the same batches as from a loader in its own process, but as latents: the order follows
from the seed and from the position that a run resumes at. One stream serves all ranks; the first
rank makes it and hands each rank its end.
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
from sdbench.base.conditions import SIZES
from sdbench.base.errors import RunError
from sdbench.data.batches.batches import Batch, BatchReader, BatchReport
from sdbench.data.batches.loader import CheckedLoader
from sdbench.data.order.epochs import EpochOrder
from sdbench.data.samples import SampleType
from sdbench.data.source import SourceConfig
from sdbench.encoding.encoder import Encoder, find_finite
from sdbench.encoding.ray_stages import DecodeStage, batch_bytes, num_lanes_of_rank, open_same
from sdbench.encoding.ray_stream import (
    Failure,
    Pool,
    Stage,
    StreamEnd,
    encoder_pool,
    make_stream,
    set_up_encoder_process,
)
from sdbench.models.architecture import Architecture
from sdbench.ranks.distributed import Ranks, broadcast
from sdbench.record.store import INVALID
from sdbench.settings.feed import FeedSettings
from sdbench.settings.recipe import EngineConfig

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.data import Dataset


class EncodeStage(Stage):
    """Encodes a `Batch` of images to one of moments and encoded captions."""

    def __init__(
        self,
        make_encoder: Callable[..., Encoder],
        batch_size: int,
        resources: Mapping[str, float],
        is_error: bool,
    ) -> None:
        """Build the encoders; `is_error` refuses latents that are not finite."""
        self._encoder = make_encoder(device=set_up_encoder_process(resources))
        self._batch_size = batch_size
        self._is_error = is_error

    def work(self, content: Batch) -> Batch:
        """Encode a batch in parts of `batch_size`, and fill it up."""
        if not content.keys:
            return content.fill_up()
        encoded = [self._encode(part) for part in self._split(content.tensors)]
        tensors = {
            name: torch.from_numpy(np.concatenate([part[name] for part in encoded]))
            for name in encoded[0]
        }
        mean, logvar = tensors.pop("moments").chunk(2, dim=1)
        tensors = {
            "latent_mean": mean.contiguous(),
            "latent_logvar": logvar.contiguous(),
            **tensors,
        }
        if SIZES in content.tensors:
            tensors[SIZES] = content.tensors[SIZES]
        names = [f"sample {key.index}" for key in content.keys]
        kept, bad = find_finite(tensors, names, is_error=self._is_error)
        content.report.bad += bad
        return content._replace(tensors=tensors).take(kept).fill_up()

    def _split(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        for first in range(0, len(tensors["image"]), self._batch_size):
            part = slice(first, first + self._batch_size)
            yield {name: values[part] for name, values in tensors.items()}

    def _encode(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        moments = self._encoder.encode_images(tensors["image"])
        return {"moments": moments, **self._encoder.encode_captions(tensors)}


class OnlineLoader(CheckedLoader):
    """A `CheckedLoader` of latents that other processes encode.

    A batch that could not be made is replaced by the one before, up to `max_failed_blocks` times.
    """

    def __init__(
        self,
        source: SourceConfig,
        settings: EngineConfig | FeedSettings,
        *,
        architecture: Architecture,
        weights_seed: int,
        ranks: Ranks,
        num_batches: int,
    ) -> None:
        """Open the source; Ray has to be connected.

        The stream begins with the first iteration, when the position is known, and has
        `num_batches` global batches. All ranks have such a loader and iterate in step.
        """
        # Samples are read elsewhere, and the encoders take uint8 pixels.
        source = dataclasses.replace(source, num_workers=0, image_dtype="uint8")
        batches = data.open_batches(source)
        self._ordered = source
        if source.is_streamed:
            # In the order of samples, decoders take the place of loader workers.
            num_lanes = num_lanes_of_rank(
                num_actors=settings.num_decoders, num_ranks=source.world_size
            )
            self._ordered = dataclasses.replace(source, num_workers=num_lanes)
        self._epochs = EpochOrder(batches.samples, config=self._ordered)
        super().__init__(batches, self._epochs, config=source)
        self.sample_type = SampleType.MOMENTS
        self._settings = settings
        self._make_encoder = functools.partial(
            Encoder, architecture, encoder_dtype=settings.encoder_dtype, seed=weights_seed
        )
        self._ranks = ranks
        self._num_rows = num_batches * ranks.world_size
        self._position: dict[str, Any] | None = None
        self._end: StreamEnd | None = None
        self._next_batch = self._first_batch = 0
        self._last: Batch | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, as `CheckedLoader` does."""
        super().load_state_dict(state)
        self._position = state

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
        epoch_start = self._epochs.epoch * len(self)
        for number in range(first, len(self)):
            yield self._receive(epoch_start + number)

    def _receive(self, global_batch: int) -> Batch:
        """This rank's part of a global batch; batches are counted over all epochs."""
        if self._next_batch != global_batch:
            self.close()
        row = None if self._end is None else self._end.take()
        if row is None:
            # At the beginning, and if a run takes more batches than planned.
            self.close()
            self._end = self._open(global_batch)
            row = self._end.take()
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
        self.stats.num_failed_blocks += 1
        sentence = f"A batch could not be prepared: {failure.reason}"
        if self.stats.num_failed_blocks > self._settings.max_failed_blocks:
            raise RunError(
                f"{sentence} (--max_failed_blocks allows {self._settings.max_failed_blocks} of "
                "them per rank)"
            )
        if self._last is None:
            raise RunError(f"{sentence} It is the first one: no earlier batch can replace it.")
        print(f"{sentence} The batch before is used again.", file=sys.stderr)
        return self._last._replace(report=BatchReport(num_images=self.batch_size))

    def _open(self, first_batch: int) -> StreamEnd:
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
        self._next_batch = self._first_batch = first_batch
        return StreamEnd(ends[self._ranks.rank], timeout_s=self._config.data_timeout_s)

    def _make_stream(self, first_batch: int) -> Dataset:
        """Rows of all ranks in turn, from a global batch on."""
        source, settings = self._config, self._settings
        if source.is_streamed:
            import ray

            # Hand over the open source: no decoder asks for the sizes of all files again.
            opened = ray.put(self._reader)
            open_batches = functools.partial(_get_opened, opened=opened)
        else:
            open_batches = functools.partial(
                open_same, config=self._ordered, num_samples=self._reader.num_samples
            )
        decode = functools.partial(
            DecodeStage,
            open_batches=open_batches,
            config=self._ordered,
            first_batch=first_batch,
            position=self._position,
        )
        decoding = Pool(
            decode,
            num_actors=settings.num_decoders,
            takes_turns=source.is_streamed,
            resources={"CPU": 1.0},
        )
        encoding = encoder_pool(
            EncodeStage,
            settings,
            make_encoder=self._make_encoder,
            batch_size=settings.online_encoder_batch_size,
            is_error=source.on_bad_sample == "error",
        )
        num_actors = settings.num_decoders + settings.num_encoders
        return make_stream(
            (decoding, encoding),
            num_rows=self._num_rows,
            row_bytes=batch_bytes(source, source.device_batch_size),
            num_ahead=source.prefetch_factor * num_actors,
        )


def _get_opened(rank: int, *, opened: ObjectRef) -> BatchReader:
    import ray

    return ray.get(opened)
