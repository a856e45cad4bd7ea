"""`Encoder` and `encode_batch`: encode images and captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sdbench.base.conditions import BFLOAT16, SIZES, Condition
from sdbench.base.errors import RunError
from sdbench.data.batches.batches import PHASES, Batch, BatchReport
from sdbench.data.batches.tokenizer import CaptionTokenizers
from sdbench.data.buckets import REASONS, UNREADABLE, UNSERVED
from sdbench.data.convert.pool import Shards
from sdbench.data.formats.latent_columns import array_columns, check_finite, name_column
from sdbench.data.samples import SKIP_ADVICE, BadSampleError, SampleType
from sdbench.data.source import SourceConfig
from sdbench.models.architecture import Architecture
from sdbench.models.diffusion import MEMORY_FORMATS, encode_images, make_encoder
from sdbench.models.weights import ENCODER_DTYPES

CAPTION_COLUMN = "caption"
# As in the preset `fast`.
MEMORY_FORMAT, ATTENTION = "channels_last", "sdpa"
# The parts of a batch's time, in order: waiting for the images, both encoders with the copies to
# the device and back, and writing.
STEP_PHASES = ("data_wait", "vae", "text", "write")


@dataclass(frozen=True, kw_only=True)
class EncodeJob(Shards):
    """What is to be encoded, and how; the same for all ranks."""

    config: SourceConfig
    architecture: Architecture
    encoder_dtype: str
    batch_size: int  # images that are encoded together

    def make_encoder(self, device: str) -> Encoder:
        """Build the encoders on a device, e.g. ``cuda:0`` or ``cpu``."""
        return Encoder(
            self.architecture,
            encoder_dtype=self.encoder_dtype,
            seed=self.config.seed,
            device=device,
            conditions=self.config.inputs.conditions,
        )

    def pieces(self, number: int) -> list[Sequence[int]]:
        """Indices of the samples of each batch of a shard, of one shape; those in use."""
        indices, mixture = self.indices(number), self.config.mixture
        return [
            of_shape[start : start + self.batch_size]
            for of_shape in ([indices] if mixture is None else mixture.split(indices))
            for start in range(0, len(of_shape), self.batch_size)
        ]

    def bad(self, number: int) -> dict[int, str]:
        """Why samples of a shard that no bucket has are bad, by index."""
        mixture = self.config.mixture
        indices = () if mixture is None else self.indices(number)
        numbers = {index: int(mixture.bucket_of[index]) for index in indices}
        return {
            index: REASONS[reason]
            for index, reason in numbers.items()
            if reason in (UNREADABLE, UNSERVED)
        }

    def columns(self) -> dict[str, str]:
        """MDS encodings of the columns to write."""
        return array_columns(SampleType.MOMENTS, self.config) | {CAPTION_COLUMN: "str"}


class EncodedBatch(NamedTuple):
    """A batch as it was loaded, without its tensors, and the columns that they became.

    The first one of each encoder has the columns of the empty caption, `empty`.
    """

    batch: Batch
    columns: dict[str, np.ndarray]
    step: Step
    empty: dict[str, np.ndarray] | None


@dataclass
class Step(BatchReport):
    """Times and counts of one batch, from the request for it to the request for the next one.

    `STEP_PHASES` add up to the step, and `PHASES` are spent in the process that loads.
    """

    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((*STEP_PHASES, *PHASES), 0.0)
    )

    @property
    def step_time_s(self) -> float:
        """Seconds of the whole batch."""
        return sum(self.seconds[name] for name in STEP_PHASES)


class Encoder:
    """VAE and text encoders on one device."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        encoder_dtype: str,
        seed: int,
        device: str,
        conditions: Sequence[Condition] | None = None,
    ) -> None:
        """Build the encoders; `seed` is for random weights.

        `conditions` has the types to return; None: those of the model.
        """
        self._device = device
        self._has_told_empty = False
        self._captions = architecture.captions
        self._conditions = architecture.conditions if conditions is None else conditions
        self._network = architecture.family.load_network()
        if encoder_dtype == "fp32":
            # Let fp32 mean fp32: torch allows TF32 in convolutions unless told otherwise.
            torch.backends.cudnn.allow_tf32 = False
        options = {"memory_format": MEMORY_FORMAT, "attention": ATTENTION, "device": device}
        dtype = ENCODER_DTYPES[encoder_dtype]
        self._vae, *self._text_encoders = (
            make_encoder(part, architecture, seed=seed, dtype=dtype, **options)
            for part in ("vae", *architecture.text_encoders)
        )

    @torch.inference_mode()
    def encode_images(self, images: Tensor) -> np.ndarray:
        """Encode images (B, 3, H, W) to mean and log-variance, float16 (B, 2 C, H/8, W/8)."""
        mean, logvar = encode_images(
            self._vae, images.to(self._device), memory_format=MEMORY_FORMATS[MEMORY_FORMAT]
        )
        return _as_array(torch.cat([mean, logvar], dim=1), "float16")

    @torch.inference_mode()
    def encode_captions(self, batch: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Encode the token ids of a batch to the model's conditions."""
        ids = [batch[one.name].to(self._device) for one in self._captions]
        encoded = self._network.encode_text(self._text_encoders, ids)
        return {one.name: _as_array(encoded[one.name], one.dtype) for one in self._conditions}

    def tell_empty(self) -> dict[str, np.ndarray] | None:
        """Encode the empty caption to the columns of one sample; None from the second call on."""
        if self._has_told_empty:
            return None
        self._has_told_empty = True
        ids = CaptionTokenizers(self._captions)([""])
        encoded = self.encode_captions({name: torch.from_numpy(one) for name, one in ids.items()})
        return {name_column(one): encoded[one.name][0] for one in self._conditions}


def _as_array(values: Tensor, dtype: str) -> np.ndarray:
    # Contiguous, as writers take the bytes and channels_last latents are not.
    values = values.to(getattr(torch, dtype)).contiguous().cpu()
    return (values.view(torch.uint16) if dtype == BFLOAT16 else values).numpy()


def encode_batch(job: EncodeJob, encoder: Encoder, batch: Batch, *, step: Step) -> EncodedBatch:
    """Encode a batch; the times of loading and encoding go to `step`."""
    columns, tensors, report = {}, batch.tensors, batch.report
    if batch.keys:
        with step.phase("vae"):
            arrays = {SampleType.MOMENTS.value: encoder.encode_images(tensors["image"])}
        with step.phase("text"):
            arrays |= encoder.encode_captions(tensors)
        if SIZES in tensors:
            arrays[SIZES] = tensors[SIZES].numpy()
        for array in SampleType.MOMENTS.arrays(job.config):
            column = name_column(array, resolution=job.config.resolution)
            columns[column] = arrays[array.name]
        step.bytes_read += report.bytes_read
        for name, seconds in report.seconds.items():
            step.seconds[name] += seconds
    return EncodedBatch(batch._replace(tensors={}), columns, step, encoder.tell_empty())


def find_finite(
    columns: Mapping[str, np.ndarray | Tensor], names: Sequence[str], *, is_error: bool
) -> tuple[list[int], list[str]]:
    """Return the positions of the samples with finite values, and a sentence for each other one.

    Half precision may overflow. If that `is_error`, a `RunError` is raised.
    """
    good, bad = [], []
    for position, name in enumerate(names):
        try:
            for column, values in columns.items():
                check_finite(f"{name}, {column}", np.asarray(values[position]))
        except BadSampleError as error:
            if is_error:
                raise RunError(
                    f"{error} (--encoder_dtype fp32 avoids overflow; {SKIP_ADVICE})"
                ) from error
            bad.append(str(error))
        else:
            good.append(position)
    return good, bad
