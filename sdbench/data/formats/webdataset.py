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
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sdbench.base.cache import private_folder
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.files import new_file
from sdbench.base.progress import show_progress
from sdbench.data.formats.checks import PLACE_FLAGS
from sdbench.data.formats.copies import StoredFile, read_whole, state_of
from sdbench.data.formats.files import fetch_files, find_files
from sdbench.data.formats.filters import Term, accepts, parse_filters
from sdbench.data.formats.listing import is_visible
from sdbench.data.image_files import image_extensions
from sdbench.data.remote import must_be_copied
from sdbench.data.samples import (
    BadSampleError,
    ImageSample,
    SampleType,
    clean_caption,
)
from sdbench.data.source import SourceConfig

SUFFIX = ".tar"
# Members that a caption may come from, the first one that is there.
CAPTION_EXTENSIONS = ("txt", "json", "cls")
# The same with --class_prompts, which has a caption for each class: the class number is preferred.
CAPTION_EXTENSIONS_OF_CLASSES = ("cls", "txt", "json")

# WebDataset 1.0.2, webdataset/tariterators.py: `base_plus_ext` and `tar_file_iterator(skip_meta)`;
# importing it would load torch.
_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_META = re.compile(r"__[^/]*__($|/)")

BLOCK_BYTES = 512
# Tars are filled up with zeros to whole blocks of 10 KiB unless their writer was told otherwise.
MAX_END_BYTES = 2**20
# Changes whenever the content of an index does.
INDEX_VERSION = 4

# A place in a tar: first byte and number of bytes, and for a sparse member where each of the pieces
# that are stored one behind the other belongs, with its number of bytes: the rest is zeros. None
# where a sample has no such member.
Span = tuple[int, int, Sequence[tuple[int, int]] | None]


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
        self._class_prompts = _read_class_prompts(config.class_prompts)
        terms = parse_filters(config.filters)
        captions = CAPTION_EXTENSIONS_OF_CLASSES if self._class_prompts else CAPTION_EXTENSIONS
        self._images = image_extensions(read_avif=config.read_avif)
        load = functools.partial(
            load_index,
            folder=private_folder("tar-indexes"),
            terms=terms,
            images=self._images,
            captions=captions,
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
            caption = self._take_caption(entry.caption, text, name=name)
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
                contents = [_read_span(file.fileno(), span) for span in spans]
        except OSError as error:
            raise RunError(f"{tar} cannot be read any more: {error}") from error
        if state != self._indexes[number].state:
            raise RunError(f"{tar} has been changed since it was indexed.")
        return contents

    def _take_caption(self, extension: str, data: bytes, *, name: str) -> str | None:
        try:
            text = data.decode("utf-8-sig")
            if extension == "cls":
                text = self._class_prompts[int(text)]
            if extension == "json":
                fields = json.loads(text)
                if not isinstance(fields, dict):
                    raise ValueError("it is no object")
                text = fields.get("caption")
            if not isinstance(text, str | None):
                raise ValueError("its caption is no text")
            return clean_caption(text)
        except KeyError as error:
            raise BadSampleError(
                f"{name}: class {error} has no caption (--class_prompts)."
            ) from error
        except (ValueError, RecursionError) as error:
            raise BadSampleError(f"{name}: {extension} cannot be read ({error}).") from error


def _read_span(file: int, span: Span | None) -> bytes | None:
    if span is None:
        return None
    begin, num_bytes, pieces = span
    if pieces is None:
        return os.pread(file, num_bytes, begin)
    content = bytearray(num_bytes)
    for first, size in pieces:
        content[first : first + size] = os.pread(file, size, begin)
        begin += size
    return bytes(content)


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
    with open(tar, "rb") as file:
        for key, spans in _group_members(tar):
            # To WebDataset "a.b.jpg" is no image, but the user meant one: a bad sample, not none.
            kinds = {extension.rpartition(".")[2] for extension in spans}
            if kinds.isdisjoint((*images, *captions)):
                continue
            if terms and not accepts(terms, _read_metadata(file.fileno(), spans.get("json"))):
                num_dropped += 1
                continue
            image = next((spans[name] for name in images if name in spans), None)
            caption = next((name for name in captions if name in spans), None)
            entries.append((key, image, caption, spans.get(caption)))
    return {"entries": entries, "num_dropped": num_dropped}


def _group_members(tar: StoredFile) -> Iterator[tuple[str, dict[str, Span]]]:
    """Samples as WebDataset makes them: the key, and the members that follow with it by extension.

    Raises:
        RunError: As `_list_members`, or a sample has two members of the same extension.
    """
    for key, members in itertools.groupby(_list_members(tar), key=lambda member: member[0]):
        spans: dict[str, Span] = {}
        for _, extension, span in members:
            if extension in spans:
                raise RunError(f"{tar} is damaged: it holds {key}.{extension} twice.")
            spans[extension] = span
        yield key, spans


def _list_members(tar: StoredFile) -> Iterator[tuple[str, str, Span]]:
    """Key, extension and place of each file in a tar that WebDataset reads.

    Raises:
        RunError: The tar ends too early, is compressed other than by gzip, or is no tar.
    """
    end = 0
    try:
        # Not compressed: what is compressed cannot be read by number.
        with tarfile.open(tar, "r:") as members:
            for member in members:
                # Of a sparse member fewer bytes are stored than `size` says.
                if members.offset <= end:
                    raise tarfile.ReadError("a member has a negative size")
                end = members.offset
                parts = _MEMBER.fullmatch(member.name)
                is_left = _META.match(member.name) or not _is_visible(member.name)
                if member.isfile() and parts and not is_left:
                    pieces = _check_pieces(member, end=end) if member.issparse() else None
                    yield parts[1], parts[2].lower(), (member.offset_data, member.size, pieces)
        with open(tar, "rb") as file:
            file.seek(end)
            rest = file.read(MAX_END_BYTES + 1)
    except FileNotFoundError:
        raise
    except Exception as error:
        # Of a broken header tarfile raises errors of any type.
        raise RunError(f"{tar} is damaged, compressed, or no tar: {error}.") from error
    # Python takes a tar that is cut, or has a broken header, for one that ends there: behind the
    # last member come zeros, and nothing else.
    if not rest or len(rest) > MAX_END_BYTES or rest.strip(b"\0"):
        raise RunError(f"{tar} is damaged: it is cut or broken at byte {end}.")


def _is_visible(path: str) -> bool:
    """Whether the user put a member there, not a program; ``.`` and ``..`` hide nothing."""
    return all(is_visible(part) for part in path.split("/") if part.strip("."))


def _check_pieces(member: tarfile.TarInfo, *, end: int) -> list[tuple[int, int]]:
    """The pieces of a sparse member, in the order in which they are stored.

    Raises:
        tarfile.ReadError: They do not lie in it.
    """
    pieces = [(first, size) for first, size in member.sparse if size]
    stored, position = 0, 0
    for first, size in pieces:
        if first < position or size < 0:
            raise tarfile.ReadError(f"the pieces of {member.name} overlap")
        position, stored = first + size, stored + size
    if position > member.size or member.offset_data + stored > end:
        raise tarfile.ReadError(f"the pieces of {member.name} do not lie in it")
    return pieces


def _read_metadata(file: int, span: Span | None) -> Mapping[str, Any]:
    """The fields of a sample's json; none where there is no json, or a broken one."""
    try:
        metadata = json.loads(_read_span(file, span) or "{}")
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _read_class_prompts(path: str | None) -> dict[int, str]:
    """Class number to caption, from a JSON list, or object with numbers for keys."""
    if path is None:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        if not isinstance(content, list | dict):
            raise ValueError("neither list nor object")
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        prompts = {int(number): prompt for number, prompt in pairs}
        if not all(isinstance(prompt, str) for prompt in prompts.values()):
            raise ValueError("a caption is no text")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"The file of class prompts cannot be read ({error})",
            value=path,
            allowed='a JSON list of captions, or an object such as {"0": "a photo of a cat"}',
            flag="--class_prompts",
        ) from error
    return prompts


def check(config: SourceConfig) -> int | None:
    """Check tars by their headers.

    Returns:
        The number of samples, or None where the tars have to be copied first.
    """
    parse_filters(config.filters)
    _read_class_prompts(config.class_prompts)
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


def open_samples(config: SourceConfig) -> WebDatasetSamples:
    """Open the tars that `config` names; what is elsewhere or packed is copied here first.

    Raises:
        ConfigError: As `find_files` and `WebDatasetSamples`.
        RunError: A tar cannot be copied, or is damaged.
    """
    return WebDatasetSamples(fetch_files(config, suffix=SUFFIX), config=config)
