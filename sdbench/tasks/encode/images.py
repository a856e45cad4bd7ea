"""`ImageReader`: reads and decodes batches of images to encode, without the models' packages."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.data.pipeline.batches import GoodBatch, make_batches
from sdbench.data.pipeline.order import Key
from sdbench.data.samples import Samples
from sdbench.data.source import EOS_TOKEN_ID, SourceConfig

# Images are encoded once, as the first epoch of a training run would see them.
EPOCH = 0


class LoadedBatch(NamedTuple):
    """Consecutive samples of the source, decoded and tokenized.

    Attributes:
        names: Where each of the good samples is stored, for messages.
        captions: Their texts; empty for synthetic samples.
        good: Their images and token ids, and the report, which has a sentence for each bad one.
        num_read: Number of samples, bad ones included.
    """

    names: list[str]
    captions: list[str]
    good: GoodBatch
    num_read: int


class ImageReader:
    """Makes a `LoadedBatch` of the samples with the given indices; called in the workers."""

    def __init__(self, config: SourceConfig) -> None:
        """Open the source."""
        self._samples: Samples | None = None
        if config.data_format == "synthetic":
            self._batches = data.open_batches(config)
        else:
            self._samples = data.open_samples(config)
            self._batches = make_batches(self._samples, config=config)
        self.num_samples = self._batches.num_samples
        self.num_dropped = self._batches.samples.num_dropped

    def __call__(self, indices: range) -> LoadedBatch | RunError:
        """Read a batch; an error is returned, since torch hides its message in a traceback."""
        try:
            return self._read(indices)
        except RunError as error:
            return error

    def _read(self, indices: range) -> LoadedBatch:
        if self._samples is not None:
            # Each is read once for image and caption. Here, as a cache cannot be pickled for a
            # worker.
            read = functools.partial(type(self._samples).read, self._samples)
            self._samples.read = functools.cache(read)
        good = self._batches.read_good([Key(EPOCH, index) for index in indices])
        known = [key.index for key in good.keys]
        names = [self._batches.name(index) for index in known]
        captions = self._captions(known, good.tensors["input_ids"]) if known else []
        return LoadedBatch(names, captions, good, num_read=len(indices))

    def _captions(self, indices: list[int], input_ids: Tensor) -> list[str]:
        """The captions that were encoded."""
        if self._samples is None:
            return [""] * len(indices)
        # A dropped caption has no token between those of beginning and end.
        is_empty = (input_ids[:, 1] == EOS_TOKEN_ID).tolist()
        return [
            "" if empty else self._samples.read(index).caption
            for index, empty in zip(indices, is_empty, strict=True)
        ]
