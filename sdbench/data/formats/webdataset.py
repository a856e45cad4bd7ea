"""Samples of WebDataset tars, read by number.

Each tar is indexed once, from its headers, and then read by number. So all ranks take equally many
steps however uneven the tars are, no sample comes twice in an epoch, and an epoch can be resumed at
any sample.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sdbench.base.cache import private_folder
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.files import new_file
from sdbench.base.progress import show_progress
from sdbench.data.formats.checks import PLACE_FLAGS
from sdbench.data.formats.copies import StoredFile, read_whole, state_of
from sdbench.data.formats.files import fetch_files, find_files, find_streamed
from sdbench.data.formats.filters import Term, accepts, parse_filters
from sdbench.data.formats.tar_members import (
    CAPTION_EXTENSIONS,
    Captions,
    Span,
    find_member,
    list_samples,
    read_span,
)
from sdbench.data.formats.webdataset_stream import StreamedTarSamples
from sdbench.data.image_files import image_extensions
from sdbench.data.remote import must_be_copied
from sdbench.data.samples import ImageSample, SampleType
from sdbench.data.source import SourceConfig

SUFFIX = ".tar"
# Changes whenever the content of an index does.
INDEX_VERSION = 5


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the members of one sample are.

    Attributes:
        key: The members' path up to the first dot of the file name.
        image: The image, or None.
        caption: Extension of the member with the caption, or None.
        caption_at: Where that is, or None.
    """

    key: str
    image: Span | None
    caption: str | None
    caption_at: Span | None


@dataclass(frozen=True)
class TarIndex:
    """What a tar holds.

    Attributes:
        state: Of the tar, as `state_of` gives it.
        entries: The samples that meet the conditions.
        num_dropped: The number of those that do not.
    """

    state: tuple[int, ...]
    entries: Sequence[Entry]
    num_dropped: int


class WebDatasetSamples:
    """The samples of one or several tars, by number over all of them."""

    sample_type = SampleType.IMAGES
    columns: Mapping[str, str] = {}
    num_blocks_of_files = None

    def __init__(self, tars: list[StoredFile], *, config: SourceConfig) -> None:
        """Index the tars, or read the indexes that were made before.

        Args:
            tars: In order.
            config: Filters, class prompts, and which kinds of images are read.

        Raises:
            ConfigError: A filter or the file of class prompts cannot be understood, or no sample
                is left.
            RunError: A tar is damaged.
        """
        self._tars = tars
        self._captions = Captions(config.class_prompts)
        terms = parse_filters(config.filters)
        self._images = image_extensions(read_avif=config.read_avif)
        load = functools.partial(
            load_index,
            folder=private_folder("tar-indexes"),
            terms=terms,
            images=self._images,
            captions=self._captions.extensions,
        )
        indexes = (read_whole(tar, load) for tar in tars)
        self._indexes = list(show_progress(indexes, total=len(tars), unit="tar"))
        self.num_dropped = sum(index.num_dropped for index in self._indexes)
        sizes = [len(index.entries) for index in self._indexes]
        self._starts = list(itertools.accumulate(sizes, initial=0))
        # Any order is as cheap as any other.
        self.blocks = [sum(sizes)]
        if not self.blocks[0]:
            self._raise_empty(config)

    def _raise_empty(self, config: SourceConfig) -> NoReturn:
        if self.num_dropped:
            raise ConfigError(
                f"No sample is left: the filters drop all {self.num_dropped}",
                value=dict(config.filters or {}),
                allowed="conditions that some samples meet",
                flag="--filters",
            )
        for tar in self._tars:
            if tar.source is not None:  # the output of a command has no version that would change
                tar.path.unlink(missing_ok=True)
        raise ConfigError(
            "The tars hold no sample",
            value=config.remote or config.local,
            allowed=f"tars with {', '.join(self._images)} and {', '.join(CAPTION_EXTENSIONS)}",
            flag=PLACE_FLAGS,
        )

    def __len__(self) -> int:
        return self.blocks[0]

    def name(self, index: int) -> str:
        """Tar and key of a sample."""
        number, entry = self._find(index)
        return f"{self._tars[number]}: {entry.key}"

    def read(self, index: int) -> ImageSample:
        """Read one sample.

        Raises:
            BadSampleError: Its class has no prompt, or its json or text cannot be read.
            RunError: The tar has been changed or removed since it was indexed.
        """
        number, entry = self._find(index)
        image, text = self._read_spans(number, entry.image, entry.caption_at)
        name = self.name(index)
        caption = None
        if text is not None:
            caption = self._captions.read(entry.caption, text, name=name)
        return ImageSample(name, image, caption)

    def _find(self, index: int) -> tuple[int, Entry]:
        """The number of a sample's tar, and the sample's place there."""
        number = bisect.bisect_right(self._starts, index) - 1
        return number, self._indexes[number].entries[index - self._starts[number]]

    def _read_spans(self, number: int, *spans: Span | None) -> list[bytes | None]:
        tar = self._tars[number]
        try:
            # Not kept open: there may be more tars than files that a process may open.
            with open(tar, "rb", buffering=0) as file:
                state = state_of(os.fstat(file.fileno()))
                contents = [read_span(file, span) for span in spans]
        except OSError as error:
            raise RunError(f"{tar} cannot be read any more: {error}") from error
        if state != self._indexes[number].state:
            raise RunError(f"{tar} has been changed since it was indexed.")
        return contents


def load_index(
    tar: StoredFile,
    *,
    folder: Path,
    terms: list[Term],
    images: Sequence[str],
    captions: Sequence[str],
) -> TarIndex:
    """Make the index of a tar, or read the one that was made before.

    The name of an index is a digest of the tar's path and state and of the conditions, so that it
    is never used for another tar.

    Args:
        tar: The tar.
        folder: For indexes.
        terms: Conditions on the samples.
        images: Extensions that an image may have.
        captions: Extensions that a caption may come from, the first one that is there.

    Raises:
        RunError: The tar is damaged.
    """
    from filelock import FileLock

    state = state_of(os.stat(tar))
    identity = f"{INDEX_VERSION}\n{tar.path.absolute()}\n{state}\n{terms}\n{images}\n{captions}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:24]
    path = folder / f"{digest}.json"
    with FileLock(path.with_suffix(".lock"), mode=0o600):
        stored = _read_index(path)
        if stored is None:
            stored = _make_index(tar, terms=terms, images=images, captions=captions)
            if state_of(os.stat(tar)) != state:
                raise RunError(f"{tar} has been changed while it was indexed.")
            with new_file(path) as new:
                new.write_text(json.dumps(stored), encoding="utf-8")
    return TarIndex(state, [Entry(*entry) for entry in stored["entries"]], stored["num_dropped"])


def _read_index(path: Path) -> dict[str, Any] | None:
    """An index that was made before; None where there is none, or a cut one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _make_index(
    tar: StoredFile, *, terms: list[Term], images: Sequence[str], captions: Sequence[str]
) -> dict[str, Any]:
    entries, num_dropped = [], 0
    kinds = (*images, *captions)
    with open(tar, "rb") as file:
        samples = list_samples(file, tar, kinds=kinds, take=lambda _, span: span, is_stream=False)
        for key, spans in samples:
            if terms and not accepts(terms, _read_metadata(file, spans.get("json"))):
                num_dropped += 1
                continue
            image = spans.get(find_member(spans, images))
            caption = find_member(spans, captions)
            entries.append((key, image, caption, spans.get(caption)))
    return {"entries": entries, "num_dropped": num_dropped}


def _read_metadata(file: BinaryIO, span: Span | None) -> Mapping[str, Any]:
    """The fields of a sample's json; none where there is no json, or a broken one."""
    try:
        metadata = json.loads(read_span(file, span) or "{}")
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def check(config: SourceConfig) -> int | None:
    """Check tars by their headers.

    Returns:
        The number of samples, or None where the tars have to be copied first.

    Raises:
        ConfigError: As `open_samples`, or what streamed tars cannot do is asked of them.
    """
    parse_filters(config.filters)
    Captions(config.class_prompts)
    if config.is_streamed:
        if config.filters:
            raise ConfigError(
                "How many samples of streamed tars meet the filters is not known beforehand",
                value=dict(config.filters),
                allowed="none, or --remote_files copy",
                flag="--filters",
            )
        return len(open_samples(config))
    if any(map(must_be_copied, list_files(config))):
        return None
    return len(open_samples(config))


def list_files(config: SourceConfig) -> list[str]:
    """Names and URLs of the files that `config` names.

    Raises:
        ConfigError: As `find_files`.
        RunError: As `find_files`.
    """
    return find_files(config.remote or config.local, suffix=SUFFIX)


def open_samples(config: SourceConfig) -> WebDatasetSamples | StreamedTarSamples:
    """Open the tars that `config` names; what is elsewhere or packed is copied here, or streamed.

    Raises:
        ConfigError: As `find_files`, `find_streamed`, `WebDatasetSamples` and `StreamedTarSamples`.
        RunError: A tar cannot be copied, or is damaged.
    """
    if config.is_streamed:
        return StreamedTarSamples(find_streamed(config, suffix=SUFFIX), config=config)
    return WebDatasetSamples(fetch_files(config, suffix=SUFFIX), config=config)
