"""`ImageReader`: reads and decodes batches of images to encode, without the models' packages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.data.pipeline.batches import Batch, make_batches
from sdbench.data.pipeline.order import Key
from sdbench.data.samples import Samples
from sdbench.data.source import EOS_TOKEN_ID, SourceConfig

# Images are encoded once, as the first epoch of a training run would see them.
EPOCH = 0


class LoadedBatch(NamedTuple):
    """Consecutive samples of the source, decoded and tokenized.

    Attributes:
        indices: Of the good samples.
        names: Where each of them is stored, for messages.
        captions: Their texts; empty for synthetic samples.
        parts: The images, once for each resolution, and their token ids with the first.
        bad: A sentence for each bad sample.
        num_read: Number of samples, bad ones included.
    """

    indices: list[int]
    names: list[str]
    captions: list[str]
    parts: list[Batch]
    bad: list[str]
    num_read: int


class ImageReader:
    """Makes a `LoadedBatch` of the samples with the given indices; called in the workers."""

    def __init__(self, configs: Sequence[SourceConfig]) -> None:
        """Open the source, described once for each resolution."""
        self._samples: Samples | None = None
        if configs[0].data_format == "synthetic":
            self._batches = [data.open_batches(config) for config in configs]
        else:
            self._samples = data.open_samples(configs[0])
            self._batches = [make_batches(self._samples, config=config) for config in configs]
        self.num_samples = self._batches[0].num_samples
        self.num_dropped = self._batches[0].samples.num_dropped

    def __call__(self, indices: range) -> LoadedBatch | RunError:
        """Read a batch; an error is returned, since torch hides its message in a traceback."""
        try:
            return self._read(indices)
        except RunError as error:
            return error

    def _read(self, indices: range) -> LoadedBatch:
        if self._samples is not None:
            # Each is read once for all resolutions and its caption. Here, as a cache cannot be
            # pickled for a worker.
            read = functools.partial(type(self._samples).read, self._samples)
            self._samples.read = functools.cache(read)
        keys, parts, bad = [Key(EPOCH, index) for index in indices], [], []
        for batches in self._batches:
            part = batches.read_good(keys)
            keys = part.keys
            bad += part.report.bad
            parts.append(part)
            if not keys:
                break
        if len(parts[0].keys) != len(keys):
            # Without the samples that are bad at another resolution.
            parts = [part.take([part.keys.index(key) for key in keys]) for part in parts]
        good = [key.index for key in keys]
        names = [self._batches[0].name(index) for index in good]
        captions = self._captions(good, parts[0].tensors["input_ids"])
        return LoadedBatch(good, names, captions, parts, bad, num_read=len(indices))

    def _captions(self, indices: list[int], input_ids: Tensor) -> list[str]:
        """The captions that were encoded; empty for synthetic samples."""
        if self._samples is None:
            return [""] * len(indices)
        # A dropped caption has no token between those of beginning and end.
        is_empty = (input_ids[:, 1] == EOS_TOKEN_ID).tolist()
        return [
            "" if empty else self._samples.read(index).caption
            for index, empty in zip(indices, is_empty, strict=True)
        ]
