"""Flags of the commands convert and verify-data."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from sdbench.base.errors import ConfigError, blamed_on
from sdbench.data.convert.chunk_formats import FORMATS, MAX_ROWS_PER_CHUNK
from sdbench.data.formats.data_formats import SOURCES
from sdbench.settings.data import DataSettings
from sdbench.settings.kinds import (
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    SWITCH,
    TEXT,
    one_of,
    whole_number,
)
from sdbench.settings.setting import GIVEN, ON, REQUIRED, declarations, setting, shared

# Default number of shards: workers can share a small data set, and a training run far from its data
# can begin with a part of it. The limits avoid shards that cost more to open than to read, and
# shards that cost minutes of work in a kill (512 images of LAION at 512 px are about 50 MB).
NUM_SHARDS_WANTED = 16
MIN_SAMPLES_PER_SHARD = 32
MAX_SAMPLES_PER_SHARD = 512

STORED_FORMATS = ("auto", *(name for name, source in SOURCES.items() if source.open))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredDataFlags:
    """Flags of every command that reads a stored data set piece by piece."""

    place: str = setting(
        TEXT, REQUIRED, "a folder, file or URL; several in braces; pipe:COMMAND", is_positional=True
    )
    data_format: str = setting(
        one_of(*STORED_FORMATS), "auto", "format of PLACE, or told from the names of files"
    )
    num_workers: int | None = setting(
        NOT_NEGATIVE,
        None,
        "processes that share the work; 0 for none (default: one per core from 2,000 samples on)",
    )
    text_embedding_dim: int = setting(
        POSITIVE, 1024, "width of the text embeddings of latents; SD 2 has 1024"
    )
    local: str | None = setting(
        TEXT, None, "folder for copies of what a URL names (default: one of the user's cache)"
    )
    refresh: bool = shared(DataSettings, "refresh")
    read_avif: bool = shared(DataSettings, "read_avif")
    empty_captions: str = shared(DataSettings, "empty_captions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyFlags(StoredDataFlags):
    """Flags of verify-data."""

    deep: bool = setting(
        SWITCH,
        False,
        "open every sample too: decode images wholly, look for captions, and for NaN and wrong "
        "shapes in latents",
    )
    count: bool = setting(
        SWITCH,
        False,
        "only count the samples of each tar, for streaming, where the tars are",
        demands={
            "out": (GIVEN, "the numbers are written to a file"),
            "data_format": (("auto", "webdataset"), "the samples of tars are counted"),
            "deep": ((False,), "samples are counted, not opened"),
            "local": ((None,), "no tar is copied"),
            "refresh": ((False,), "no tar is copied"),
            "num_workers": ((None,), "tars are read in threads"),
        },
    )
    out: Path | None = setting(
        PATH,
        None,
        "JSON file for the numbers, by the names of the tars, as --tar_sizes takes it",
        demands={"count": (ON, "only numbers of samples are written to a file")},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertFlags(StoredDataFlags):
    """Flags of convert."""

    folder: str = setting(TEXT, REQUIRED, "folder of the new data set")
    out_format: str = setting(one_of(*FORMATS), "mds", "format of the new data set")
    samples_per_shard: int | None = setting(
        whole_number(1, MAX_ROWS_PER_CHUNK),
        None,
        "samples of PLACE that make a file of the new data set (default: for about "
        f"{NUM_SHARDS_WANTED} files, {MIN_SAMPLES_PER_SHARD} to {MAX_SAMPLES_PER_SHARD})",
    )
    max_samples: int | None = setting(POSITIVE, None, "take only the first N (default: all)")
    on_bad_sample: str = shared(
        DataSettings,
        "on_bad_sample",
        help="stop at a sample that cannot be used, or leave it out and report it",
    )
    changed_inputs: str = setting(
        one_of("refuse", "accept"),
        "refuse",
        "files of the source that were written again, under their names, since an unfinished data "
        "set was begun (a repaired picture): it does not go on, or goes on and its finished shards "
        "stay",
    )
    max_bad_fraction: float = shared(
        DataSettings, "max_bad_fraction", help="share of bad samples above which skipping gives up"
    )
    latents: str = shared(
        DataSettings,
        "latents",
        help="what PLACE holds: images (online), or latents, of which every resolution is taken "
        "over",
    )
    filters: Mapping[str, str] | None = shared(DataSettings, "filters")
    class_prompts: str | None = shared(DataSettings, "class_prompts")
    # What `latents` asks for, as in training.
    wants_latents = DataSettings.wants_latents


@contextlib.contextmanager
def blamed_on_place(flags: type) -> Iterator[None]:
    """Make errors about a place name PLACE instead of the flags of training.

    `flags` is the class of the command; errors of its own flags keep their names.
    """
    with blamed_on("PLACE", own={declared.flag for declared in declarations(flags).values()}):
        try:
            yield
        except ConfigError as error:
            if "--model_name" not in error.flag:
                raise
            facts = {"value": error.value, "allowed": error.allowed}
            # In training, the model tells how wide its text embeddings are.
            raise ConfigError(error.what, **facts, flag="--text_embedding_dim") from None
