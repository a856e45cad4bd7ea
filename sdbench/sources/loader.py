"""Did the loader deliver what it promised?

Streaming 0.13.0 can end an epoch early without an exception, or hang, when a background thread
fails. A benchmark that trained on fewer images than it counts would lie, so every source of this
suite delivers through `CheckedLoader`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from sdbench.errors import RunError
from sdbench.sources.config import SourceConfig

# A worker that has been silent for this long is taken for stuck. A batch takes well under a
# second to decode, and a shard of 64 MiB about a minute at 10 Mbit/s.
WATCHDOG_TIMEOUT_S = 120

_RUN_ERROR = f"{RunError.__module__}.{RunError.__qualname__}"


class CheckedLoader(DataLoader):
    """A DataLoader that counts its images and fails loudly when an epoch is short or stuck.

    Attributes:
        num_images_delivered: Images handed out since the loader was built.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        config: SourceConfig,
        sampler: Sampler | None = None,
        timeout_s: float = WATCHDOG_TIMEOUT_S,
    ) -> None:
        """Set the loader up as `config` says.

        Args:
            dataset: This rank's samples; its length (or the sampler's) is what an epoch must
                deliver, rounded down to whole batches.
            config: Batch size, workers and the like.
            sampler: Order of a map-style data set.
            timeout_s: Silence after which workers are taken for stuck. Without workers nothing
                can watch the training process, which loads by itself.
        """
        super().__init__(
            dataset,
            sampler=sampler,
            timeout=timeout_s if config.num_workers else 0,
            **config.loader_options(),
        )
        self.num_images_delivered = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batches of one epoch.

        Raises:
            RunError: The loader failed, was silent for too long, or ended its epoch early.
        """
        delivered_in_epoch = 0
        batches = super().__iter__()
        while (batch := self._next(batches, delivered_in_epoch)) is not None:
            num_images = len(next(iter(batch.values())))
            delivered_in_epoch += num_images
            self.num_images_delivered += num_images
            yield batch
        expected = len(self) * self.batch_size
        if delivered_in_epoch != expected:
            raise RunError(
                f"The data ended early: an epoch of this rank has {expected} images, and "
                f"{delivered_in_epoch} were delivered. A shard is missing or damaged, or a "
                "download failed; the log above may name it."
            )

    def _next(self, batches: Iterator, delivered_in_epoch: int) -> dict | None:
        """The next batch, or None at the end; torch's loader errors come out as RunError."""
        try:
            return next(batches, None)
        except RunError as error:
            # From a worker it arrives with its traceback in the message; the last line says it.
            sentence = str(error).strip().splitlines()[-1].removeprefix(f"{_RUN_ERROR}: ")
            raise RunError(sentence) from error
        except RuntimeError as error:
            # torch says so both when the timeout has passed and when a worker has been killed.
            raise RunError(
                f"The data loader failed after {delivered_in_epoch} images of this epoch "
                f"({self.num_workers} workers, timeout {self.timeout} s): {error}"
            ) from error
