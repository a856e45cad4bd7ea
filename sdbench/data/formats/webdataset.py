"""Samples of WebDataset tars, read by number.

Each tar is indexed once, from its headers, and then read by number. So all ranks take equally many
steps however uneven the tars are, no sample comes twice in an epoch, and an epoch can be resumed at
any sample.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from sdbench.base.cache import private_folder
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.files import new_file
from sdbench.base.progress import show_progress
from sdbench.data.checks import bad_place, tell_once
from sdbench.data.formats import tar_members
from sdbench.data.formats.filters import parse_filters
from sdbench.data.formats.latent_columns import check_ends
from sdbench.data.formats.tar_members import (
    ArrayReader,
    Member,
    SampleReader,
    Span,
    describe_unused,
    list_groups,
)
from sdbench.data.formats.webdataset_stream import StreamedTarSamples
from sdbench.data.places.listing import NUM_NAMES_TOLD
from sdbench.data.places.place_files import (
    StoredFile,
    fetch_files,
    find_streamed,
    list_files,
    read_whole,
    state_of,
)
from sdbench.data.places.remote_files import must_be_copied
from sdbench.data.samples import ImageSample, LatentSample, Samples
from sdbench.data.source import SourceConfig

# Changes whenever the content of an index does.
INDEX_VERSION = 8


class TarIndex(NamedTuple):
    """Content of a tar."""

    state: tuple[int, ...]
    # For each sample that meets the filters: its key (its members' path up to the first dot of the
    # name), and the spans of the members that are read, by extension.
    entries: Sequence[tuple[str, Mapping[str, Span]]]
    num_dropped: int  # samples that do not meet the filters
    num_unused: int  # pictures in no sample
    unused: Sequence[str]  # names of the first ones


class WebDatasetSamples(Samples):
    """The samples of one or several tars, numbered over all of them."""

    def __init__(self, tars: list[StoredFile], *, config: SourceConfig) -> None:
        """Index the tars, or read the indexes that were made before."""
        self._tars = tars
        self._reader = SampleReader(config)
        if config.wants_latents and (columns := _read_columns(tars)) is not None:
            self._reader = ArrayReader(columns, config)
        self.columns, self.sample_type = self._reader.columns, self._reader.sample_type
        self._terms = parse_filters(config.filters)
        indexes = (read_whole(tar, self._load_index) for tar in tars)
        self._indexes = list(show_progress(indexes, total=len(tars), unit="tar"))
        self.num_dropped = sum(index.num_dropped for index in self._indexes)
        if config.rank == 0 and (num_unused := sum(index.num_unused for index in self._indexes)):
            names = list(itertools.chain.from_iterable(index.unused for index in self._indexes))
            tell_once(describe_unused(config.remote or config.local, num_unused, names))
        sizes = [len(index.entries) for index in self._indexes]
        # Any order is equally cheap.
        super().__init__(sizes, blocks=[sum(sizes)])
        if not len(self):
            self._raise_empty(config)

    def _load_index(self, tar: StoredFile) -> TarIndex:
        """Make the index of a tar, or read the one that was made before.

        The name of an index is a digest of the tar's path and state and of the conditions, so that
        it is never used for another tar.
        """
        from filelock import FileLock

        state, reader = state_of(os.stat(tar)), self._reader
        path = tar.path.absolute()
        facts = (INDEX_VERSION, path, state, self._terms, reader.members)
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
        index = private_folder("tar-indexes") / f"{digest}.json"
        with FileLock(index.with_suffix(".lock"), mode=0o600):
            try:
                stored = json.loads(index.read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):  # not made yet, or cut
                stored = self._make_index(tar)
                if state_of(os.stat(tar)) != state:
                    raise RunError(f"{tar} has been changed while it was indexed.") from None
                with new_file(index) as new:
                    new.write_text(json.dumps(stored), encoding="utf-8")
        return TarIndex(state, **stored)

    def _make_index(self, tar: StoredFile) -> dict[str, Any]:
        entries, num_dropped, unused, reader = [], 0, [], self._reader
        with open(tar, "rb") as file:
            wanted = ("json",) if self._terms else ()
            for key, members, is_sample in list_groups(
                file, tar, kinds=reader.kinds, wanted=wanted
            ):
                unused += reader.unused(key, members)
                if not is_sample:
                    continue
                metadata = _read_metadata(members.get("json")) if self._terms else {}
                if not all(term.accepts(metadata) for term in self._terms):
                    num_dropped += 1
                    continue
                chosen = (kind for kind in reader.choose(members) if kind is not None)
                entries.append((key, {kind: members[kind].span for kind in chosen}))
        return {
            "entries": entries,
            "num_dropped": num_dropped,
            "num_unused": len(unused),
            "unused": unused[: NUM_NAMES_TOLD + 1],
        }

    def _raise_empty(self, config: SourceConfig) -> NoReturn:
        if self.num_dropped:
            raise ConfigError(
                f"The filters drop all {self.num_dropped} samples",
                value=dict(config.filters or {}),
                allowed="conditions that some samples meet",
                flag="--filters",
            )
        for tar in self._tars:
            if tar.source is not None:  # a command's output has no version that changes
                tar.path.unlink(missing_ok=True)
        raise bad_place(
            "The tars hold no sample",
            value=config.remote or config.local,
            allowed=f"tars with {', '.join(self._reader.kinds)}",
        )

    def name(self, index: int) -> str:
        """Return tar and key of a sample."""
        number, position = self._find(index)
        key, _ = self._indexes[number].entries[position]
        return f"{self._tars[number]}: {key}"

    def read(self, index: int) -> ImageSample | LatentSample:
        """Read one sample; a `RunError` if the tar has changed since it was indexed."""
        number, position = self._find(index)
        tar, stored = self._tars[number], self._indexes[number]
        _, spans = stored.entries[position]
        if not self.needs_images:
            captions = self._reader.captions
            spans = {kind: span for kind, span in spans.items() if kind in captions}
        try:
            # Not kept open: there may be more tars than files that a process may open.
            with open(tar, "rb", buffering=0) as file:
                state = state_of(os.fstat(file.fileno()))
                members = {
                    kind: os.pread(file.fileno(), num_bytes, begin)
                    for kind, (begin, num_bytes) in spans.items()
                }
        except OSError as error:
            raise RunError(f"{tar} cannot be read any more: {error}") from error
        if state != stored.state:
            raise RunError(f"{tar} has been changed since it was indexed.")
        return self._reader.make(self.name(index), members)


def _read_metadata(member: Member | None) -> Mapping[str, Any]:
    """Return the fields of a sample's json; empty if it is missing or broken."""
    try:
        metadata = {} if member is None else json.loads(member.content)
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def check(config: SourceConfig) -> int | None:
    """Check tars by their headers; return the samples, or None if tars must be copied first."""
    parse_filters(config.filters)
    SampleReader(config)  # refuses class prompts that cannot be read
    if not config.is_streamed and any(map(must_be_copied, list_files(config))):
        return None
    samples = open_samples(config)
    if config.wants_latents and not config.is_streamed:
        check_ends(samples, config)
    return len(samples)


def open_samples(config: SourceConfig) -> WebDatasetSamples | StreamedTarSamples:
    """Open the tars that `config` names; remote and packed ones are copied here, or streamed."""
    if config.is_streamed:
        return StreamedTarSamples(find_streamed(config), config=config)
    return WebDatasetSamples(fetch_files(config), config=config)


def read_columns(config: SourceConfig) -> set[str]:
    """Return the columns of encoded samples, as the first one has them; none for images."""
    return _read_columns(fetch_files(config)) or set()


def _read_columns(tars: Sequence[StoredFile]) -> set[str] | None:
    """The columns of the first sample of all tars; None: there is no sample."""

    def read(tar: StoredFile) -> set[str] | None:
        with open(tar, "rb") as file:
            return tar_members.read_columns(file, tar)

    found = (read_whole(tar, read) for tar in tars)
    return next((columns for columns in found if columns is not None), None)
