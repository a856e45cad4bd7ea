"""The pictures of a subject and of its class: their check and their reader.

Nothing here imports torch until a reader is opened.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from sdbench import data
from sdbench.base.errors import ConfigError, RunError, blamed_on
from sdbench.data.source import SourceConfig

if TYPE_CHECKING:
    from sdbench.data.batches.batches import BatchReader

# Synthetic pictures: as many as Ray's DreamBooth example has of its dog, and draws of its class
# (ray-project/ray, doc/source/templates/05_dreambooth_finetuning).
NUM_SYNTHETIC_INSTANCES, NUM_SYNTHETIC_CLASS = 5, 200
# Pictures of a subject, which are few, that are decoded before a run begins.
MAX_DECODED = 10


class NumPictures(NamedTuple):
    """Numbers of pictures of the subject and of its class."""

    instances: int
    of_class: int

    def num_batches(self, batch_size: int) -> int:
        """Return the global batches of an epoch, in which each picture comes at least once.

        If there are class pictures, they are half of a global batch.
        """
        num_pairs = batch_size // 2 if self.of_class else batch_size
        return -(-max(self) // num_pairs)


def check(source: SourceConfig, class_source: SourceConfig | None) -> NumPictures:
    """Check the pictures of a subject and of its class, if any, as `data.check`; count them."""
    num_instances = _check(source, flag="--remote", prompt_flag="--instance_prompt")
    if class_source is None:
        return NumPictures(num_instances, 0)
    if source.global_batch_size % 2:
        raise ConfigError(
            "half of the pictures of a batch are class pictures",
            value=source.global_batch_size,
            allowed="an even number: Ray's batch of 2 pairs is 4 here",
            flag="--batch_size",
        )
    return NumPictures(
        num_instances, _check(class_source, flag="--class_remote", prompt_flag="--class_prompt")
    )


def _check(source: SourceConfig, *, flag: str, prompt_flag: str) -> int:
    flags = flag if source.caption is not None else f"{flag} or {prompt_flag}"
    with blamed_on(flags):
        num_pictures = data.check(_one_by_one(source))
    if num_pictures is None:
        raise ConfigError(
            "the pictures of a subject have to be counted before its run",
            value=source.remote,
            allowed="a folder, or a data set that tells its length",
            flag=flag,
        )
    return num_pictures


def open_pictures(source: SourceConfig, *, mirrored: bool = False) -> BatchReader:
    """Open the reader of all pictures with their captions, the same on every rank."""
    changes = {"horizontal_flip_probability": float(mirrored), "caption_drop_probability": 0.0}
    reader = data.open_batches(dataclasses.replace(_one_by_one(source), **changes))
    reader.may_skip = False
    return reader


def check_readable(source: SourceConfig, *, num_pictures: int) -> None:
    """Decode the first pictures of a subject, which are all of a few; a RunError if one is bad."""
    from sdbench.data.order.epochs import Key

    reader = open_pictures(source)
    for index in range(min(num_pictures, MAX_DECODED)):
        if isinstance(found := reader([Key(0, index)]), RunError):
            raise found


def _one_by_one(source: SourceConfig) -> SourceConfig:
    return dataclasses.replace(source, device_batch_size=1, rank=0, world_size=1)
