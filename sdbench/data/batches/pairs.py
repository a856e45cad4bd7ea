"""The loader of pairs: numbers of a subject's pictures, each with one of its class.

The pictures are encoded once, so a batch has only their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sdbench.data.batches.batches import Batch, BatchReader, BatchReport
from sdbench.data.batches.loader import CheckedLoader
from sdbench.data.order.epochs import EpochOrder, Key
from sdbench.data.samples import Samples
from sdbench.data.source import SourceConfig
from sdbench.data.subject import NumPictures, check, open_pictures


class PairOrder(EpochOrder):
    """An order in which every picture comes at least once an epoch.

    Pictures of the subject and of its class alternate. Each kind is reshuffled after all of its
    pictures were used, until the epoch's batches are full: the smaller kind is repeated, and no
    batch is cut. Of n pictures, n is added to the number of a picture that is mirrored, and 2 n to
    that of one without its caption.
    """

    def __init__(
        self, samples: Samples, num_pictures: NumPictures, *, config: SourceConfig
    ) -> None:
        super().__init__(samples, config=config)
        self._num_pictures = num_pictures

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of any epoch."""
        return self._num_pictures.num_batches(self._config.global_batch_size)

    def _samples(self, epoch: int, begin: int, end: int) -> np.ndarray:
        return self._line(epoch)[begin:end]

    def _make_line(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng([self._config.seed, epoch])
        counts = [count for count in self._num_pictures if count]
        num_each = self.num_batches(epoch) * self._config.global_batch_size // len(counts)
        first = 0
        kinds = []
        for count in counts:
            kinds.append(first + self._repeat(count, num_each, generator))
            first += count
        line = np.stack(kinds, axis=1).ravel()
        shares = (self._config.horizontal_flip_probability, self._config.caption_drop_probability)
        for number, share in zip((first, 2 * first), shares, strict=True):
            if share:
                line += number * (generator.random(len(line)) < share)
        return line

    def _repeat(self, count: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Return shuffles of ``range(count)``, one after the other, cut to `length`."""
        if not self._config.shuffle:
            return np.arange(length) % count
        num_rounds = -(-length // count)
        return np.concatenate([generator.permutation(count) for _ in range(num_rounds)])[:length]


class PairReader(BatchReader):
    """Makes the batches of `build`; reads nothing."""

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        *,
        num_pictures: NumPictures,
        prior_loss_weight: float,
    ) -> None:
        self._readers = [open_pictures(source) for source in sources]
        super().__init__(Samples([sum(num_pictures)]), config=sources[0])
        self._num_instances = num_pictures.instances
        # Each kind is half of a batch, so weights are doubled: the mean loss of a batch is then
        # mean(subject) + prior_loss_weight * mean(class), also when micro-batches add it up.
        self._weights = (2.0, 2.0 * prior_loss_weight) if num_pictures.of_class else (1.0, 0.0)

    def name(self, index: int) -> str:
        """Return where the picture is stored."""
        picture = index % self.num_samples
        is_class = picture >= self._num_instances
        return self._readers[is_class].name(picture - is_class * self._num_instances)

    def read_good(self, keys: Sequence[Key]) -> Batch:
        """Return the numbers and loss weights of the pictures."""
        report = BatchReport(num_images=len(keys))
        with report.phase("collate"):
            number = torch.tensor([key.index for key in keys])
            picture = number % self.num_samples
            of_subject, of_class = self._weights
            tensors = {
                "index": number % (2 * self.num_samples),
                "caption": torch.where(number < 2 * self.num_samples, picture, -1),
                "loss_weight": torch.where(picture < self._num_instances, of_subject, of_class),
            }
        return Batch(tensors, list(keys), report, [None] * len(keys))


def build(
    source: SourceConfig, class_source: SourceConfig | None, *, prior_loss_weight: float
) -> CheckedLoader:
    """Build this rank's loader of pairs.

    Its batches are ``{index: (B,) int64, caption: (B,) int64, loss_weight: (B,) float32}``: the
    number of a picture, counting the subject's, then the class's, and then all of them mirrored;
    that of its caption, -1 for the empty one; and the factor of its loss. `prior_loss_weight` is
    the weight of the mean loss of the class pictures. It keeps the contract of `data.build`.
    """
    num_pictures = check(source, class_source)
    sources = [one for one in (source, class_source) if one is not None]
    reader = PairReader(sources, num_pictures=num_pictures, prior_loss_weight=prior_loss_weight)
    order = PairOrder(reader.samples, num_pictures, config=source)
    return CheckedLoader(reader, order, config=source)
