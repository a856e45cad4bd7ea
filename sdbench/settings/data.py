"""Settings of the data source and its loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sdbench.settings.kinds import (
    CONDITIONS,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_NUMBER,
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
    """What a setting demands that needs encoders in the step."""
    return {"latents": ((ONLINE,), reason), "online_preprocessing": ((False,), reason)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where samples come from and how they are read."""

    GROUP = "data"

    use_synth_data: bool = setting(SWITCH, False, "train on synthetic samples")
    data_format: str = setting(
        row_of("sdbench.data:SOURCES", "auto"),
        "auto",
        "kind of the data source; auto tells it from the names at the place",
    )
    remote: str | None = setting(
        TEXT,
        None,
        "where the data is: a folder, a URL, tars or parquet files in braces, or pipe:COMMAND",
        diffusers=("--train_data_dir", "--instance_data_dir"),
    )
    local: str | None = setting(
        TEXT, None, "folder of the data, or of the copies of what --remote names"
    )
    remote_files: str = setting(
        one_of(COPY, STREAM),
        COPY,
        "tars and parquet files behind a URL: copy all of them whole before the first batch, or "
        "stream them: read them as they are needed, without a copy; tars need --tar_sizes then",
        before=COPY,
    )
    refresh: bool = setting(
        SWITCH,
        False,
        "copy again, once a run, files whose source does not tell whether they have changed, as "
        "the output of pipe:COMMAND and files of web servers without ETag and Last-Modified",
        only_measures=True,
        before=False,
    )
    tar_sizes: str | None = setting(
        TEXT,
        None,
        "file or URL of the numbers of samples of the tars that are streamed, as JSON: "
        '{"00000.tar": 9876, ...} (default: sizes.json beside each tar)',
        before=None,
    )
    streams: str | None = setting(
        TEXT, None, "several MDS data sets and their shares of an epoch: PLACE=PROPORTION,..."
    )
    latents: str = setting(
        one_of(ONLINE, PRECOMPUTED),
        ONLINE,
        "encode images and captions in the step, or read encoded ones "
        "(python -m sdbench precompute makes them)",
        identifies=True,
    )
    shuffle: bool = setting(SWITCH, True, "visit the samples in a new order each epoch")
    crop: str = setting(one_of("center", "random"), "center", "where the largest square is cut out")
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
        "what a sample that cannot be used does: stop the run, or be replaced and counted",
    )
    max_bad_fraction: float = setting(
        FRACTION, 0.01, "share of bad samples in an epoch above which skipping gives up"
    )
    read_avif: bool = setting(
        SWITCH,
        False,
        "read AVIF pictures too, which takes a decoder of video frames for files of strangers; "
        "otherwise only JPEG, PNG and WebP",
        before=False,
    )
    empty_captions: str = setting(
        one_of(KEEP, "bad"),
        KEEP,
        "what a caption without any text is: a caption, as training without prompts needs them, or "
        "a bad sample; a caption that is missing is always a bad sample",
        before="bad",
    )
    missing_latents: str = setting(
        one_of("error", "leave_out"),
        "error",
        "what MDS samples without a latent of this size do, as small pictures have none: stop the "
        "run before it begins, or be left out and counted",
        before="error",
    )
    data_timeout_s: float = setting(
        POSITIVE_NUMBER,
        300.0,
        "seconds without a batch after which the loader is taken for stuck",
        only_measures=True,
    )
    validate_hash: str = setting(
        TEXT,
        "auto",
        "which hash of index.json an MDS shard is checked by when it is opened; none; auto: the "
        "cheapest that it has",
    )
    num_workers: int | None = setting(NOT_NEGATIVE, None, "data loader workers per rank")
    prefetch_factor: int = setting(POSITIVE, 2, "batches each worker keeps ready")

    @property
    def is_streamed(self) -> bool:
        """Whether files behind URLs are read as they come, not copied."""
        return self.remote_files == STREAM

    @property
    def wants_latents(self) -> bool:
        """Whether samples are latents with text embeddings, not images with captions."""
        return self.latents == PRECOMPUTED
