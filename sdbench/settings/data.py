"""Settings of the data source and its loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sdbench.settings.buckets import BucketSettings
from sdbench.settings.kinds import (
    CONDITIONS,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SECONDS,
    SWITCH,
    TEXT,
    one_of,
    row_of,
)
from sdbench.settings.setting import Demands, setting

ONLINE, PRECOMPUTED = "online", "precomputed"
KEEP = "keep"
COPY, STREAM = "copy", "stream"


def encodes_in_step(reason: str) -> Demands:
    """The demands of a setting that needs encoders in the step."""
    return {"latents": ((ONLINE,), reason), "online_preprocessing": ((False,), reason)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(BucketSettings):
    """Where samples come from and how they are read."""

    GROUP = "data"

    use_synth_data: bool = setting(SWITCH, False, "train on synthetic samples", is_everyday=True)
    data_format: str = setting(
        row_of("sdbench.data.formats.data_formats:SOURCES", "auto"),
        "auto",
        "format of the data; auto detects it from the names of the files",
    )
    remote: str | None = setting(
        TEXT,
        None,
        "where the data is: a folder, a URL, tars or parquet files in braces, or pipe:COMMAND",
        is_everyday=True,
        diffusers=("--train_data_dir", "--instance_data_dir"),
    )
    local: str | None = setting(
        TEXT, None, "folder of the data, or with --remote of the local copies"
    )
    remote_files: str = setting(
        one_of(COPY, STREAM),
        COPY,
        "tars and parquet files at a URL: copy all of them before the first batch, or stream them "
        "without a copy; streamed tars need --tar_sizes",
    )
    refresh: bool = setting(
        SWITCH,
        False,
        "copy again, once a run, files whose source does not tell whether they have changed: "
        "output of pipe:COMMAND, and files of web servers without ETag and Last-Modified",
        only_measures=True,
    )
    tar_sizes: str | None = setting(
        TEXT,
        None,
        'JSON file or URL with the number of samples of each streamed tar: {"00000.tar": 9876, '
        "...} (default: sizes.json beside each tar)",
    )
    streams: str | None = setting(
        TEXT, None, "several MDS data sets with their shares of an epoch: PLACE=PROPORTION,..."
    )
    latents: str = setting(
        one_of(ONLINE, PRECOMPUTED),
        ONLINE,
        "encode images and captions in the step, or read encoded ones "
        "(python -m sdbench precompute makes them)",
        identifies=True,
    )
    shuffle: bool = setting(SWITCH, True, "visit the samples in a new order each epoch")
    crop: str = setting(
        one_of("center", "random"),
        "center",
        "where the largest square, or box of a bucket, is cut out",
    )
    horizontal_flip_probability: float = setting(
        FRACTION, 0.0, "share of the images that are mirrored", diffusers=("--random_flip",)
    )
    caption_drop_probability: float = setting(
        FRACTION, 0.0, "share of the captions that become the empty text"
    )
    filters: Mapping[str, str] | None = setting(
        CONDITIONS, None, "use only those WebDataset samples whose json meets the conditions"
    )
    class_prompts: str | None = setting(
        TEXT, None, "JSON file of a caption for each class number (WebDataset member cls)"
    )
    on_bad_sample: str = setting(
        one_of("error", "skip"),
        "error",
        "if a sample cannot be used: stop the run, or replace it by another one and count it",
    )
    max_bad_fraction: float = setting(
        FRACTION, 0.01, "largest share of bad samples in an epoch that --on_bad_sample skip accepts"
    )
    read_avif: bool = setting(
        SWITCH,
        False,
        "read AVIF pictures too, not only JPEG, PNG and WebP; untrusted files then reach a video "
        "decoder",
    )
    empty_captions: str = setting(
        one_of(KEEP, "bad"),
        KEEP,
        "keep empty captions, which train the model without a prompt, or treat them as bad "
        "samples; a missing caption is always a bad sample",
    )
    missing_latents: str = setting(
        one_of("error", "leave_out"),
        "error",
        "if MDS samples have no latents of this size, such as those of small pictures: stop the "
        "run before it begins, or leave them out and count them",
    )
    data_timeout_s: float = setting(
        SECONDS,
        300.0,
        "seconds without a batch after which the loader counts as stuck",
        only_measures=True,
    )
    validate_hash: str = setting(
        TEXT,
        "auto",
        "hash of index.json that is checked when an MDS shard is opened; none: no check; auto: "
        "the cheapest one of the index",
    )
    num_workers: int | None = setting(NOT_NEGATIVE, None, "data loader workers per rank")
    prefetch_factor: int = setting(POSITIVE, 2, "batches that each worker keeps ready")

    @property
    def is_streamed(self) -> bool:
        """Whether files at URLs are read without a copy."""
        return self.remote_files == STREAM

    @property
    def wants_latents(self) -> bool:
        """Whether samples are latents with text embeddings, not images with captions."""
        return self.latents == PRECOMPUTED
