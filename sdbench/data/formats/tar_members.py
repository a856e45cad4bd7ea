"""The samples of a tar, one after the other, and their captions."""

from __future__ import annotations

import itertools
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.outside import refuse_repeated_keys
from sdbench.data.formats.listing import is_visible
from sdbench.data.samples import BadSampleError, clean_caption

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

# A place in a tar: first byte and number of bytes, and for a sparse member where each of the pieces
# that are stored one behind the other belongs, with its number of bytes: the rest is zeros. None
# where a sample has no such member.
Span = tuple[int, int, Sequence[tuple[int, int]] | None]
Value = TypeVar("Value")
# More links than this, each to the next one, go round in a circle.
MAX_LINKS = 40


def list_samples(
    file: BinaryIO,
    tar: object,
    *,
    kinds: Sequence[str],
    take: Callable[[str, Span], Value],
    is_stream: bool,
) -> Iterator[tuple[str, dict[str, Value]]]:
    """Samples as WebDataset makes them: the key, and the members that follow with it by extension.

    A hard or symbolic link, which WebDataset leaves out, stands for the member that it leads to.

    Args:
        file: The tar, opened.
        tar: What messages call it.
        kinds: A sample has a member of one of these extensions; what has none is no sample. Other
            links are left out.
        take: Makes of a member's extension and place what is given for it; called when the file
            stands there, unless the member is a link.
        is_stream: Members are passed from the first to the last, and none is gone back to.

    Raises:
        RunError: The tar is damaged, compressed, or none, or has two members of one name in a
            sample; a link leads to no file in it, or the tar is a stream.
    """
    listed = _list_members(file, tar, kinds=kinds, is_stream=is_stream)
    members = ((key, extension, take(extension, span)) for key, extension, span in listed)
    for key, group in itertools.groupby(members, key=lambda member: member[0]):
        values: dict[str, Value] = {}
        for _, extension, value in group:
            if extension in values:
                raise RunError(f"{tar} is damaged: it holds {key}.{extension} twice.")
            values[extension] = value
        # To WebDataset "a.b.jpg" is no image, but the user meant one: a bad sample, not none.
        if not {extension.rpartition(".")[2] for extension in values}.isdisjoint(kinds):
            yield key, values


def _list_members(
    file: BinaryIO, tar: object, *, kinds: Sequence[str], is_stream: bool
) -> Iterator[tuple[str, str, Span]]:
    """Key, extension and place of each file in a tar that WebDataset reads, and of each link.

    Raises:
        RunError: The tar ends too early, is compressed other than by gzip, or is no tar; or as
            `_follow`.
    """
    end = 0
    places: dict[str, Span | str] = {}
    try:
        # Not compressed: what is compressed cannot be read by number.
        with tarfile.open(fileobj=file, mode="r:") as members:
            for member in members:
                members.members.clear()  # else it keeps all of them
                # Of a sparse member fewer bytes are stored than `size` says.
                if members.offset <= end:
                    raise tarfile.ReadError("a member has a negative size")
                end = members.offset
                parts = _MEMBER.fullmatch(member.name)
                is_left = _META.match(member.name) or not _is_visible(member.name)
                if member.isfile() and parts and not is_left:
                    pieces = _check_pieces(member, end=end) if member.issparse() else None
                    yield parts[1], parts[2].lower(), (member.offset_data, member.size, pieces)
                elif (member.islnk() or member.issym()) and parts and not is_left:
                    extension = parts[2].lower()
                    if extension.rpartition(".")[2] not in kinds:
                        continue
                    if is_stream:
                        raise RunError(
                            f"{tar} holds {member.name}, a link to {member.linkname}, and cannot "
                            "be streamed: --remote_files copy reads it, or store files instead "
                            "of links (tar --dereference --hard-dereference)."
                        )
                    places = places or _find_places(file)
                    yield parts[1], extension, _follow(member.name, places, tar)
        file.seek(end)
        rest = file.read(MAX_END_BYTES + 1)
    except (FileNotFoundError, RunError):
        raise
    except Exception as error:
        # Of a broken header tarfile raises errors of any type.
        raise RunError(f"{tar} is damaged, compressed, or no tar: {error}.") from error
    # Python takes a tar that is cut, or has a broken header, for one that ends there: behind the
    # last member come zeros, and nothing else.
    if not rest or len(rest) > MAX_END_BYTES or rest.strip(b"\0"):
        raise RunError(f"{tar} is damaged: it is cut or broken at byte {end}.")


def _find_places(file: BinaryIO) -> dict[str, Span | str]:
    """The place of each file in a tar by its name, and the name that each link leads to."""
    places: dict[str, Span | str] = {}
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as members:
        for member in members:
            members.members.clear()
            name = posixpath.normpath(member.name)
            if member.isfile():
                pieces = _check_pieces(member, end=members.offset) if member.issparse() else None
                places[name] = (member.offset_data, member.size, pieces)
            elif member.islnk():
                places[name] = posixpath.normpath(member.linkname)
            elif member.issym():
                folder = posixpath.dirname(member.name)
                places[name] = posixpath.normpath(posixpath.join(folder, member.linkname))
    return places


def _follow(name: str, places: Mapping[str, Span | str], tar: object) -> Span:
    """The place of the file that a link leads to, by way of other links or none.

    Raises:
        RunError: It leads to no file in the tar.
    """
    place: Span | str | None = posixpath.normpath(name)
    for _ in range(MAX_LINKS):
        if not isinstance(place, str):
            break
        place = places.get(place)
    if place is None or isinstance(place, str):
        raise RunError(
            f"{tar} holds {name}, a link that leads to no file in the tar: store files instead of "
            "links (tar --dereference --hard-dereference)."
        )
    return place


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


def find_member(members: Mapping[str, object], kinds: Sequence[str]) -> str | None:
    """The first of some extensions that a sample has a member of, if it has one."""
    return next((kind for kind in kinds if kind in members), None)


def read_span(file: BinaryIO, span: Span | None) -> bytes | None:
    """The content of a member; None where there is none."""
    if span is None:
        return None
    begin, num_bytes, pieces = span
    file.seek(begin)
    if pieces is None:
        return file.read(num_bytes)
    content = bytearray(num_bytes)
    for first, size in pieces:
        content[first : first + size] = file.read(size)
    return bytes(content)


class Captions:
    """Finds the captions of samples.

    Attributes:
        extensions: Of the members that a caption may come from, the first one that is there.
    """

    def __init__(self, class_prompts: str | None) -> None:
        """Read the captions of classes, if there are any.

        Args:
            class_prompts: Value of ``--class_prompts``.

        Raises:
            ConfigError: That file cannot be understood.
        """
        self._class_prompts = _read_class_prompts(class_prompts)
        self.extensions = (
            CAPTION_EXTENSIONS_OF_CLASSES if self._class_prompts else CAPTION_EXTENSIONS
        )

    def read(self, extension: str, data: bytes, *, name: str) -> str | None:
        """The caption that a member holds.

        Args:
            extension: Of the member.
            data: Its content.
            name: Of the sample, for messages.

        Raises:
            BadSampleError: The class has no prompt, or the json or text cannot be read.
        """
        try:
            text = data.decode("utf-8-sig")
            if extension == "cls":
                text = self._class_prompts[int(text)]
            if extension == "json":
                fields = json.loads(text, object_pairs_hook=refuse_repeated_keys)
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


def _read_class_prompts(path: str | None) -> dict[int, str]:
    """Class number to caption, from a JSON list, or object with numbers for keys."""
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content = json.loads(text, object_pairs_hook=refuse_repeated_keys)
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
