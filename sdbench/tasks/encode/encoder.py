"""Encoding of images and captions into latents and text embeddings on disk, shard by shard.

One process's share of the work of `precompute`: workers read and decode while VAE and text encoder
run, and what they give is written as it comes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.data.latent_columns import array_columns, check_finite, name_column
from sdbench.data.pipeline.batches import PHASES, BatchReport, GoodBatch, make_batches
from sdbench.data.pipeline.order import Key, Keys
from sdbench.data.pipeline.shared_batches import SharedBatch
from sdbench.data.pipeline.watchdog import time_limit
from sdbench.data.prepare.convert import check_bad_fraction
from sdbench.data.prepare.pool import Shards, show_progress
from sdbench.data.prepare.writers import Output
from sdbench.data.samples import BadSampleError, ImageSample, Samples, SampleType
from sdbench.data.source import EOS_TOKEN_ID, SourceConfig
from sdbench.models.architecture import Architecture
from sdbench.models.stable_diffusion import (
    MEMORY_FORMATS,
    build_encoders,
    encode_captions,
    encode_images,
    sample_latents,
)

CAPTION_COLUMN = "caption"
# What the preset `fast` trains with.
MEMORY_FORMAT, ATTENTION = "channels_last", "sdpa"
# What the time of a batch consists of, in order: waiting until it is loaded, both encoders with the
# way to the device and back, and writing.
STEP_PHASES = ("data_wait", "vae", "text", "write")
# Images are encoded once, as the first epoch of a training run would see them.
EPOCH = 0


@dataclass(frozen=True, kw_only=True)
class EncodeJob(Shards):
    """What is to be encoded, and how; the same for all ranks.

    Attributes:
        configs: The source, once for each resolution, smallest first.
        architecture: Whose VAE and text encoder.
        sample_type: What is stored: `MOMENTS`, or `LATENTS` drawn from them.
        encoder_dtype: Type of the encoders' weights and arithmetic.
        batch_size: Images that are encoded together.
    """

    configs: tuple[SourceConfig, ...]
    architecture: Architecture
    sample_type: SampleType
    encoder_dtype: str
    batch_size: int

    def make_encoder(self, device: str) -> Encoder:
        """The encoders on a device, e.g. ``cuda:0`` or ``cpu``."""
        return Encoder(
            self.architecture,
            sample_type=self.sample_type,
            encoder_dtype=self.encoder_dtype,
            seed=self.configs[0].seed,
            device=device,
        )

    def pieces(self, number: int) -> list[range]:
        """Indices of the samples of each batch of a shard."""
        indices = self.indices(number)
        return [
            indices[start : start + self.batch_size]
            for start in range(0, len(indices), self.batch_size)
        ]

    def columns(self) -> dict[str, str]:
        """Columns to write, to their MDS encodings."""
        columns = {}
        for config in self.configs:
            columns |= array_columns(self.sample_type, config)
        return columns | {CAPTION_COLUMN: "str"}


class LoadedBatch(NamedTuple):
    """Consecutive samples of the source, decoded and tokenized.

    Attributes:
        indices: Which samples can be used.
        names: Where each of them is stored, for messages.
        captions: What is encoded, as text; empty where a source has token ids alone.
        parts: The images, once for each resolution, and their token ids with the first.
        bad: A sentence for each sample that cannot be used.
        num_read: Samples that were asked for; where progress is shown, those of all ranks.
    """

    indices: list[int]
    names: list[str]
    captions: list[str]
    parts: list[GoodBatch]
    bad: list[str]
    num_read: int


class CachedSamples:
    """Stored samples, of which each of the current batch is read once for all resolutions."""

    def __init__(self, records: Samples) -> None:
        self._records = records
        self._kept: dict[int, ImageSample] = {}
        self.sample_type = records.sample_type
        self.blocks, self.num_dropped = records.blocks, records.num_dropped

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int) -> ImageSample:
        """Read a sample, as `Samples.read` does, or give the one that was read before."""
        if index not in self._kept:
            self._kept[index] = self._records.read(index)
        return self._kept[index]

    def forget(self) -> None:
        """Drop the samples of the current batch."""
        self._kept.clear()


class ImageReader:
    """Makes a `LoadedBatch` of the samples with the given indices; called in the workers."""

    def __init__(self, configs: Sequence[SourceConfig]) -> None:
        """Open the source.

        Args:
            configs: The source, once for each resolution.

        Raises:
            ConfigError: The source cannot be used.
        """
        self._records = None
        if configs[0].data_format == "synthetic":
            self._batches = [data.open_batches(config) for config in configs]
        else:
            self._records = CachedSamples(data.open_samples(configs[0]))
            self._batches = [make_batches(self._records, config=config) for config in configs]
        self.num_samples = self._batches[0].num_samples
        self.num_dropped = self._batches[0].num_dropped

    def __call__(self, indices: range) -> LoadedBatch | RunError:
        """Read a batch; an error is returned, as torch would bury its message in a traceback."""
        try:
            return self._read(indices)
        except RunError as error:
            return error

    def _read(self, indices: range) -> LoadedBatch:
        if self._records is not None:
            self._records.forget()
        keys, parts, bad = [Key(EPOCH, index) for index in indices], [], []
        for batches in self._batches:
            part = batches.read_good(keys)
            keys = part.keys
            bad += part.report.bad
            parts.append(part)
            if not keys:
                break
        if len(parts[0].keys) != len(keys):
            parts = [_keep(part, keys) for part in parts]
        names, captions = self._describe(keys, parts[0].tensors["input_ids"])
        return LoadedBatch(
            [key.index for key in keys], names, captions, parts, bad, num_read=len(indices)
        )

    def _describe(self, keys: Sequence[Key], input_ids: Tensor) -> tuple[list[str], list[str]]:
        if self._records is None:
            return [f"synthetic sample {key.index}" for key in keys], [""] * len(keys)
        records = [self._records.read(key.index) for key in keys]
        # A caption that was dropped has no token between those of beginning and end.
        is_empty = (input_ids[:, 1] == EOS_TOKEN_ID).tolist()
        captions = [
            "" if empty else record.caption for empty, record in zip(is_empty, records, strict=True)
        ]
        return [record.name for record in records], captions


def _keep(part: GoodBatch, keys: Sequence[Key]) -> GoodBatch:
    """Leave out the samples that were bad at another resolution."""
    wanted = set(keys)
    positions = torch.tensor([i for i, key in enumerate(part.keys) if key in wanted], dtype=int)
    tensors = {name: tensor[positions] for name, tensor in part.tensors.items()}
    return GoodBatch(tensors, list(keys), part.report)


@dataclass
class Step(BatchReport):
    """Times and counts of one batch, from the request for it to the request for the next one.

    Attributes:
        seconds: Each of `STEP_PHASES` to its time, which together are the step's, and each of
            `PHASES` to that of loading in the process that loads.
    """

    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((*STEP_PHASES, *PHASES), 0.0)
    )

    @property
    def step_time_s(self) -> float:
        """Seconds of the whole batch; loading in the workers goes on meanwhile."""
        return sum(self.seconds[name] for name in STEP_PHASES)

    def add_loading(self, report: BatchReport) -> None:
        """Add what loading the images at one resolution cost."""
        self.bytes_read += report.bytes_read
        for name, seconds in report.seconds.items():
            self.seconds[name] += seconds


class Encoder:
    """VAE and text encoder on one device."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        sample_type: SampleType,
        encoder_dtype: str,
        seed: int,
        device: str,
    ) -> None:
        """Build both encoders, with the weights that a training run with the same seed has.

        Args:
            architecture: Whose VAE and text encoder.
            sample_type: What images become: `MOMENTS`, or `LATENTS` drawn from them.
            encoder_dtype: Type of the weights and of the arithmetic.
            seed: Of random weights, and of what is drawn.
            device: Device of the weights, e.g. ``cuda:0`` or ``cpu``.
        """
        self._sample_type = sample_type
        self._device = device
        self._seed = seed
        if encoder_dtype == "fp32":
            # Let fp32 mean fp32: torch allows TF32 in convolutions unless told otherwise.
            torch.backends.cudnn.allow_tf32 = False
        self._vae, self._text_encoder = build_encoders(
            architecture,
            seed=seed,
            encoder_dtype=encoder_dtype,
            memory_format=MEMORY_FORMAT,
            attention=ATTENTION,
            device=device,
        )

    @torch.inference_mode()
    def encode_images(self, images: Tensor, *, indices: Sequence[int]) -> np.ndarray:
        """Encode images (B, 3, S, S).

        Args:
            images: On the CPU.
            indices: Which samples of the source they are; with the seed they decide what is drawn.

        Returns:
            float16, (B, 8, S/8, S/8) moments as the VAE gives them, or (B, 4, S/8, S/8) samples of
            them times the scaling factor.
        """
        mean, logvar = encode_images(
            self._vae, images.to(self._device), memory_format=MEMORY_FORMATS[MEMORY_FORMAT]
        )
        if self._sample_type is SampleType.MOMENTS:
            latents = torch.cat([mean, logvar], dim=1)
        else:
            drawn = [
                np.random.default_rng([self._seed, EPOCH, index, images.shape[-1]]).standard_normal(
                    mean.shape[1:], dtype=np.float32
                )
                for index in indices
            ]
            latents = sample_latents(
                mean,
                logvar,
                noise=torch.from_numpy(np.stack(drawn)).to(self._device),
                scaling_factor=self._vae.config.scaling_factor,
            )
        return _as_float16(latents)

    @torch.inference_mode()
    def encode_captions(self, input_ids: Tensor) -> np.ndarray:
        """Encode captions given as token ids (B, 77): float16 (B, 77, D)."""
        return _as_float16(encode_captions(self._text_encoder, input_ids.to(self._device)))


def _as_float16(values: Tensor) -> np.ndarray:
    # Contiguous, since channels_last latents are not and a writer takes their bytes.
    return values.half().contiguous().cpu().numpy()


class ShardWriter:
    """Encodes shards, writes them and times each batch.

    Attributes:
        steps: Times and counts of each batch so far.
    """

    def __init__(
        self, job: EncodeJob, *, reader: ImageReader, encoder: Encoder, output: Output
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            job: What is to be encoded.
            reader: Reads and decodes the images.
            encoder: VAE and text encoder of this rank.
            output: The data set that is written.
        """
        self.steps: list[Step] = []
        self._job = job
        self._reader = reader
        self._encoder = encoder
        self._output = output
        self._received = [SharedBatch() for _ in job.configs]
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
        pieces = [piece for number in numbers for piece in job.pieces(number)]
        all_bad = self._output.totals().bad
        with contextlib.closing(self._load(pieces)) as loaded:
            batches = loaded
            if num_missing is not None:
                batches = show_progress(
                    _count_for_all(loaded, num_mine=sum(map(len, pieces)), num_missing=num_missing),
                    num_samples=job.num_samples,
                    num_done=job.num_samples - num_missing,
                )
            for number in numbers:
                bad: list[str] = []
                self._output.write_chunk(number, self._encode(number, batches, bad), bad=bad)
                # Closing a shard belongs to its last batch.
                self.steps[-1].seconds["write"] += time.perf_counter() - self._rows_ended_s
                all_bad += bad
                check_bad_fraction(
                    all_bad, num_samples=job.num_samples, allowed=job.configs[0].max_bad_fraction
                )

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

    def _encode(
        self, number: int, loaded: Iterator[LoadedBatch], bad: list[str]
    ) -> Iterator[dict[str, Any]]:
        """The rows of a shard."""
        for _ in self._job.pieces(number):
            step = Step()
            with step.phase("data_wait"):
                batch = next(loaded)
            bad += batch.bad
            columns = self._encode_batch(batch, step) if batch.indices else {}
            with step.phase("write"):
                for position in range(len(batch.indices)):
                    row = {name: values[position] for name, values in columns.items()}
                    if self._is_sound(row, name=batch.names[position], bad=bad):
                        step.num_images += 1
                        yield row | {CAPTION_COLUMN: batch.captions[position]}
            self.steps.append(step)
        self._rows_ended_s = time.perf_counter()

    def _encode_batch(self, batch: LoadedBatch, step: Step) -> dict[str, np.ndarray]:
        """The columns of the arrays, to the values of all samples of the batch."""
        job, columns = self._job, {}
        image_part, text_part = job.sample_type.value
        with step.phase("vae"):
            for config, part in zip(job.configs, batch.parts, strict=True):
                column = name_column(image_part, image_size=config.image_size)
                columns[column] = self._encoder.encode_images(
                    part.tensors["image"], indices=batch.indices
                )
        with step.phase("text"):
            input_ids = batch.parts[0].tensors["input_ids"]
            columns[name_column(text_part)] = self._encoder.encode_captions(input_ids)
        for part in batch.parts:
            step.add_loading(part.report)
        return columns

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
    loaded: Iterable[LoadedBatch], *, num_mine: int, num_missing: int
) -> Iterator[LoadedBatch]:
    """Let each batch stand for what all ranks read meanwhile, as they advance alike."""
    num_read = 0
    for batch in loaded:
        num_before = num_missing * num_read // num_mine
        num_read += batch.num_read
        yield batch._replace(num_read=num_missing * num_read // num_mine - num_before)
