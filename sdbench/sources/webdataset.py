"""Which samples do WebDataset tars hold?

Each tar is indexed once, from its headers, and then read by number: so the number of samples, and
with it the number of steps, is known and the same on all ranks however uneven the tars are, no
sample comes twice in an epoch, and an epoch can be resumed at any sample.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sdbench.errors import ConfigError, RunError
from sdbench.sources.checks import (
    PLACE_FLAGS,
    check_enough_samples,
    check_images_wanted,
    check_tokenizer_folder,
)
from sdbench.sources.config import SourceConfig
from sdbench.sources.filters import Term, accepts, parse_filters
from sdbench.sources.records import BadSampleError, ImageRecord
from sdbench.sources.remote import cache_folder, fetch_all, is_url, list_urls

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
# Members that a caption may come from, the first one that is there.
CAPTION_EXTENSIONS = ("txt", "cls", "json")

BLOCK_BYTES = 512
LINE_PERIOD_S = 5.0

# A place in a tar: first byte and number of bytes; None where a sample has no such member.
Span = tuple[int, int]


@dataclass(frozen=True)
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
    """The samples of one tar that meet the conditions, and how many do not."""

    entries: Sequence[Entry]
    num_dropped: int


class WebDatasetRecords:
    """The samples of one or several tars, by number over all of them."""

    columns: Mapping[str, str] = {}

    def __init__(self, tars: list[Path], *, config: SourceConfig) -> None:
        """Index the tars, or read the indexes that were made before.

        Args:
            tars: In order.
            config: Filters and class prompts.

        Raises:
            ConfigError: A filter or the file of class prompts cannot be understood, or no sample
                is left.
            RunError: A tar is damaged.
        """
        self._tars = tars
        self._class_prompts = _read_class_prompts(config.class_prompts)
        terms = parse_filters(config.filters)
        self._indexes = list(_show_progress((load_index(tar, terms) for tar in tars), len(tars)))
        self.num_dropped = sum(index.num_dropped for index in self._indexes)
        sizes = [len(index.entries) for index in self._indexes]
        self._starts = list(itertools.accumulate(sizes, initial=0))
        # Any order is as cheap as any other.
        self.blocks = [sum(sizes)]
        self._files: dict[int, BinaryIO] = {}
        if not self.blocks[0]:
            raise ConfigError(
                f"No sample is left: the filters drop all {self.num_dropped}",
                value=dict(config.filters),
                allowed="conditions that some samples meet",
                flag="--filters" if config.filters else PLACE_FLAGS,
            )

    def __len__(self) -> int:
        return self.blocks[0]

    def read(self, index: int) -> ImageRecord:
        """Read one sample.

        Raises:
            BadSampleError: Its class has no prompt, or its json or text cannot be read.
            RunError: The tar has been cut or removed since it was indexed.
        """
        number = bisect.bisect_right(self._starts, index) - 1
        entry = self._indexes[number].entries[index - self._starts[number]]
        name = f"{self._tars[number]}: {entry.key}"
        image = None if entry.image is None else self._read(number, entry.image)
        caption = None
        if entry.caption is not None:
            assert entry.caption_at is not None
            text = self._read(number, entry.caption_at)
            caption = self._take_caption(entry.caption, text, name=name)
        return ImageRecord(name, image, caption)

    def _read(self, number: int, span: Span) -> bytes:
        begin, num_bytes = span
        path = self._tars[number]
        try:
            # Forked workers may share an open file: pread has no position to disagree about.
            file = self._files.get(number) or self._files.setdefault(number, path.open("rb"))
            data = os.pread(file.fileno(), num_bytes, begin)
        except OSError as error:
            raise RunError(f"{path} cannot be read any more: {error}") from error
        if len(data) != num_bytes:
            raise RunError(f"{path} has been cut since it was indexed.")
        return data

    def _take_caption(self, extension: str, data: bytes, *, name: str) -> str | None:
        try:
            text = data.decode("utf-8")
            if extension == "json":
                text = json.loads(text).get("caption") or ""
            elif extension == "cls":
                return self._class_prompts[int(text)]
        except KeyError as error:
            raise BadSampleError(
                f"{name}: class {error} has no caption (--class_prompts)."
            ) from error
        except (ValueError, AttributeError) as error:
            raise BadSampleError(f"{name}: {extension} cannot be read ({error}).") from error
        return text.strip() or None


def load_index(tar: Path, terms: list[Term]) -> TarIndex:
    """The index of a tar, made now or read from the one made before.

    Indexes are kept in the system's temporary directory, named after the tar's path, size and time
    of change and after the filters, so that no other tar's is ever taken.

    Raises:
        RunError: The tar is damaged.
    """
    from filelock import FileLock

    state = tar.stat()
    identity = f"{tar.absolute()}\n{state.st_size}\n{state.st_mtime_ns}\n{terms}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir(), "sdbench-cache", "tar-indexes")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest}.json"
    with FileLock(path.with_suffix(".lock")):
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
        else:
            stored = _make_index(tar, terms)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(stored), encoding="utf-8")
            partial.replace(path)
    return TarIndex([Entry(*entry) for entry in stored["entries"]], stored["num_dropped"])


def _make_index(tar: Path, terms: list[Term]) -> dict[str, Any]:
    entries, num_dropped = [], 0
    with tar.open("rb") as file:
        for key, members in itertools.groupby(_list_members(tar), key=lambda member: member[0]):
            spans = {extension: span for _, extension, span in members}
            if terms and not accepts(terms, _read_metadata(file, spans.get("json"))):
                num_dropped += 1
                continue
            image = next((spans[name] for name in IMAGE_EXTENSIONS if name in spans), None)
            caption = next((name for name in CAPTION_EXTENSIONS if name in spans), None)
            if image is not None or caption is not None:
                entries.append((key, image, caption, spans.get(caption)))
    return {"entries": entries, "num_dropped": num_dropped}


def _list_members(tar: Path) -> Iterator[tuple[str, str, Span]]:
    """Key, extension and place of each file in a tar.

    Raises:
        RunError: The tar ends too early, or is none.
    """
    end = 0
    try:
        with tarfile.open(tar) as members:
            for member in members:
                end = member.offset_data + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES
                if member.isfile():
                    key, extension = split_key(member.name)
                    yield key, extension, (member.offset_data, member.size)
    except tarfile.TarError as error:
        raise RunError(f"{tar} is damaged: {error}.") from error
    # Python takes a tar without its end for a whole one: after the last member comes a block of
    # zeros.
    with tar.open("rb") as file:
        file.seek(end)
        if file.read(BLOCK_BYTES) != bytes(BLOCK_BYTES):
            raise RunError(f"{tar} is damaged: it is cut after byte {tar.stat().st_size}.")


def split_key(name: str) -> tuple[str, str]:
    """Split a member's path as WebDataset does: at the first dot of the file name."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _read_metadata(file: BinaryIO, span: Span | None) -> Mapping[str, Any]:
    """The fields of a sample's json; none where there is no json, or a broken one."""
    if span is None:
        return {}
    try:
        metadata = json.loads(os.pread(file.fileno(), span[1], span[0]))
    except ValueError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _read_class_prompts(path: str | None) -> dict[int, str]:
    """Class number to caption, from a JSON list, or object with numbers for keys."""
    if path is None:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        prompts = {int(number): prompt for number, prompt in pairs}
        if not all(isinstance(prompt, str) for prompt in prompts.values()):
            raise ValueError("a caption is no text")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"The file of class prompts cannot be read ({error})",
            value=path,
            allowed='a JSON list of captions, or an object such as {"0": "a photo of a cat"}',
            flag="--class_prompts",
        ) from error
    return prompts


def _show_progress(indexes: Iterator[TarIndex], num_tars: int) -> Iterator[TarIndex]:
    """Pass indexes on, with a line now and then when it takes long."""
    started_s = last_line_s = time.monotonic()
    for number, index in enumerate(indexes, start=1):
        yield index
        now_s = time.monotonic()
        if now_s - last_line_s >= LINE_PERIOD_S:
            last_line_s = now_s
            left_s = (num_tars - number) * (now_s - started_s) / number
            print(f"Indexed {number} of {num_tars} tars, {left_s:.0f} s left", file=sys.stderr)


def find_tars(place: str) -> list[str]:
    """The tars that a place means: one, a folder of them, or either in braces.

    Raises:
        ConfigError: One of them does not exist, or there is none.
    """
    from braceexpand import braceexpand

    tars: list[str] = []
    for name in braceexpand(place):
        if name.startswith("s3://") and not name.endswith(".tar"):
            tars += list_urls(name, suffix=".tar")
        elif not is_url(name) and Path(name).is_dir():
            tars += sorted(str(path) for path in Path(name).glob("*.tar"))
        else:
            tars.append(name)
    missing = [name for name in tars if not is_url(name) and not Path(name).is_file()]
    if missing or not tars:
        raise ConfigError(
            "No such tar file" if missing else "The folder holds no tar file",
            value=missing[0] if missing else place,
            allowed="a tar, a folder of tars, or a quoted pattern like 'data/{00000..00009}.tar'",
            flag=PLACE_FLAGS,
        )
    return tars


def check(config: SourceConfig) -> int | None:
    """Check tars by their headers.

    Returns:
        The number of samples, or None where the tars have to be copied first.
    """
    check_images_wanted(config, what="A tar of images")
    check_tokenizer_folder(config.tokenizer_folder)
    parse_filters(config.filters)
    _read_class_prompts(config.class_prompts)
    if any(is_url(name) for name in find_tars(config.remote or config.local)):
        return None
    num_samples = len(open_records(config))
    check_enough_samples(config, num_samples=num_samples)
    return num_samples


def open_records(config: SourceConfig) -> WebDatasetRecords:
    """Open the tars that `config` names; what is elsewhere is copied here first.

    Raises:
        ConfigError: As `find_tars` and `WebDatasetRecords`.
        RunError: A tar cannot be had, or is damaged.
    """
    place = config.remote or config.local
    cache = cache_folder(place, config.local if config.remote else None)
    names = find_tars(place)
    urls = [name for name in names if is_url(name)]
    copies = dict(zip(urls, fetch_all(urls, cache=cache), strict=True)) if urls else {}
    tars = [copies[name] if name in copies else Path(name) for name in names]
    return WebDatasetRecords(tars, config=config)
