"""The one walk through the members of a tar, and the samples that are made of them."""

from __future__ import annotations

import io
import itertools
import json
import posixpath
import re
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from numpy.lib.format import read_array

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.outside import read_json, refuse_repeated_keys
from sdbench.base.units import counted
from sdbench.data.formats.latent_columns import columns_of, widen_bits
from sdbench.data.places.image_names import IMAGE_EXTENSIONS, image_extensions
from sdbench.data.places.listing import is_visible, name_some
from sdbench.data.samples import (
    BadSampleError,
    ImageSample,
    LatentSample,
    SampleType,
    clean_caption,
)
from sdbench.data.source import SourceConfig

# Members that a caption may come from, preferred first.
CAPTION_EXTENSIONS = ("txt", "json", "cls")
# The same with --class_prompts, which has a caption for each class: the class number is preferred.
CAPTION_EXTENSIONS_OF_CLASSES = ("cls", "txt", "json")

# An array of an encoded sample is a file of numpy's, named by its column.
ARRAY_ENDING = ".npy"

# WebDataset 1.0.2, webdataset/tariterators.py: `base_plus_ext` and `tar_file_iterator(skip_meta)`;
# importing it would load torch.
_MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_META = re.compile(r"__[^/]*__($|/)")

# A tar ends with two blocks of zeros, and those that fill its last record, by default of 10 KiB. A
# copy that was not finished leaves more of them.
MAX_END_BYTES = 1024 + 10 * 1024 - 512
# How a tar is made that can be read.
REPAIR = "make the tar with --sort=name --dereference --hard-dereference and without --sparse"
# Extensions of pictures, also of kinds that are not read.
PICTURES = (*IMAGE_EXTENSIONS, "avif", "bmp", "gif", "heic", "heif", "jp2", "jxl", "tif", "tiff")

# First byte and number of bytes of a member in its tar.
Span = tuple[int, int]


class Member(NamedTuple):
    """A file in a tar."""

    span: Span
    content: bytes | None  # None: it was not asked for


def list_groups(
    file: BinaryIO, tar: object, *, kinds: Sequence[str], wanted: Collection[str] = ()
) -> Iterator[tuple[str, dict[str, Member], bool]]:
    """Yield files as WebDataset groups them: the key, and consecutive members by extension.

    WebDataset's own iterators do not notice a cut tar, skip links silently, and give no spans.

    `file` is read forward only, and where it is `seekable`, what nobody asks for is skipped;
    messages name it `tar`. Members of the extensions `wanted` come with their content. The third
    value is whether the group is a sample, which has a member of `kinds`. A damaged tar is a
    `RunError`, and so is one in which the files of a sample are not together.
    """
    listed = _list_members(_Forward(file), tar, kinds=kinds, wanted=wanted)
    seen: set[str] = set()
    for key, group in itertools.groupby(listed, key=lambda member: member[0]):
        members: dict[str, Member] = {}
        for _, extension, member in group:
            if extension in members:
                raise RunError(f"{tar} is damaged: it holds {key}.{extension} twice.")
            members[extension] = member
        is_sample = any(_is_of_kind(extension, kinds) for extension in members)
        if is_sample and key in seen:
            raise RunError(
                f"{tar} holds files of {key} in two places, which are two samples for WebDataset. "
                f"Unpack it, and {REPAIR}."
            )
        if is_sample:
            seen.add(key)
        yield key, members, is_sample


def describe_unused(tar: object, num_unused: int, names: Sequence[str]) -> str:
    """Say that pictures of a tar, of which some are named, are in no sample."""
    return (
        f"{counted(num_unused, 'picture of', 'pictures of')} {tar} "
        f"{'is' if num_unused == 1 else 'are'} in no sample: {name_some(names)}. A sample is named "
        f"up to the first dot, and has one picture ({', '.join(IMAGE_EXTENSIONS)})."
    )


def _is_of_kind(extension: str, kinds: Sequence[str]) -> bool:
    # WebDataset finds no image in "a.b.jpg", but the user meant one: it is a bad sample.
    return extension.rpartition(".")[2] in kinds


class _Forward:
    """A file as tarfile reads it, forward only.

    Attributes:
        last: What was read last.
        begin: Its first byte in the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._can_seek = file.seekable()
        self._position = self.begin = 0
        self.last = b""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise tarfile.ReadError("a member begins inside of another one")
        if self._can_seek:
            self._file.seek(position)
            self._position = position
        while self._position < position and self.read(min(position - self._position, 2**20)):
            pass

    def read(self, num_bytes: int) -> bytes:
        self.begin, self.last = self._position, self._file.read(num_bytes)
        self._position += len(self.last)
        return self.last


def _list_members(
    file: _Forward, tar: object, *, kinds: Sequence[str], wanted: Collection[str]
) -> Iterator[tuple[str, str, Member]]:
    """Yield key and extension of each file that WebDataset reads, and the file."""
    end = 0
    folders, links = set(), {}
    try:
        # Without decompression: members of a compressed tar have no span that can be read directly.
        with tarfile.open(fileobj=file, mode="r:") as members:
            for member in members:
                members.members.clear()  # else it keeps all of them
                if members.offset <= end:
                    raise tarfile.ReadError("a member has a negative size")
                end = members.offset
                if not is_visible(member.name):
                    continue
                name = posixpath.normpath(member.name)
                folders.add(name if member.isdir() else posixpath.dirname(name))
                if member.issym():
                    links[name] = posixpath.join(posixpath.dirname(name), member.linkname)
                parts = _MEMBER.fullmatch(member.name)
                if not parts or _META.match(member.name):
                    continue
                key, extension = parts[1], parts[2].lower()
                if member.isfile() and not member.issparse():
                    content = None
                    if extension in wanted:
                        file.seek(member.offset_data)
                        content = file.read(member.size)
                    yield key, extension, Member((member.offset_data, member.size), content)
                elif _is_of_kind(extension, kinds) and not member.isdir():
                    raise RunError(
                        f"{tar} holds {member.name} as a link or a sparse file, and only whole "
                        f"files are read: {REPAIR}."
                    )
        # Where no member began tarfile has read a block, or less at the end of the file.
        rest = b""
        if file.begin == end:
            rest = file.last + file.read(MAX_END_BYTES + 1 - len(file.last))
    except (FileNotFoundError, RunError):
        raise
    except Exception as error:
        # For a broken header tarfile raises errors of any type.
        raise RunError(f"{tar} is damaged, compressed, or no tar: {error}.") from error
    if not end:
        raise RunError(f"{tar} is damaged: it is a tar without members.")
    # tarfile takes a cut tar or a broken header for the end of the tar. In a whole tar only zeros
    # follow the last member.
    if not rest or rest.strip(b"\0"):
        raise RunError(f"{tar} is damaged: it is cut or broken at byte {end}.")
    if len(rest) > MAX_END_BYTES:
        raise RunError(
            f"{tar} is damaged: it is cut or broken at byte {end}, where more zeros begin than "
            "fill a record of 10 KiB."
        )
    for name, target in links.items():
        target = posixpath.normpath(target)
        if target.startswith(("/", "..")):
            # Nobody knows what it leads to. Links of files that belong to no sample, such as
            # README.md, have an ending as their files do.
            ends = (posixpath.basename(end).strip(".") for end in (name, target))
            what = "a link out of the tar, which may be a folder"
            is_folder = any("." not in end for end in ends)
        else:
            what = "a link to a folder"
            is_folder = target == "." or any(
                f"{folder}/".startswith(f"{target}/") for folder in folders
            )
        if is_folder:
            raise RunError(f"{tar} holds {name} as {what}, whose files are lost: {REPAIR}.")


def read_columns(file: BinaryIO, tar: object) -> set[str] | None:
    """Return the columns of the first sample, if it is an encoded one; None: there is no sample."""
    kinds = (*image_extensions(read_avif=True), *CAPTION_EXTENSIONS, ARRAY_ENDING[1:])
    groups = list_groups(file, tar, kinds=kinds)
    members = next((members for _, members, is_sample in groups if is_sample), None)
    if members is None:
        return None
    columns = {name.removesuffix(ARRAY_ENDING) for name in members if name.endswith(ARRAY_ENDING)}
    return columns | {"caption"} if columns and "txt" in members else columns


class ArrayReader:
    """Makes encoded samples from the members of a tar, of one resolution."""

    kinds = (ARRAY_ENDING[1:],)

    def __init__(self, columns: Iterable[str], config: SourceConfig) -> None:
        """Choose among the columns of a tar; a `ConfigError` if some are missing."""
        self.columns = columns_of(columns, config)
        self.sample_type = SampleType.of(self.columns)
        self.members = tuple(column + ARRAY_ENDING for column in self.columns.values())

    def choose(self, members: Mapping[str, object]) -> list[str]:
        """Choose the members of a sample that are read."""
        return [name for name in self.members if name in members]

    def unused(self, key: str, members: Mapping[str, object]) -> list[str]:
        """Return no names: pictures beside arrays are not asked for."""
        return []

    def make(self, name: str, members: Mapping[str, bytes | None]) -> LatentSample:
        """Make a sample from the contents of its members, by extension."""
        arrays = {}
        for part, member in zip(self.columns, self.members, strict=True):
            content = members.get(member)
            if content is None:
                raise BadSampleError(f"{name}: no {member}.")
            try:
                arrays[part] = read_array(io.BytesIO(content), allow_pickle=False)
            except Exception as error:  # of any type for a broken header
                raise BadSampleError(f"{name}: {member} cannot be read ({error}).") from error
        return LatentSample(name, widen_bits(arrays, self.columns, name=name))


class SampleReader:
    """Makes samples from the members of a tar.

    `images` and `captions` are the extensions of their members, preferred first.
    """

    columns: Mapping[str, str] = {}
    sample_type = SampleType.IMAGES

    def __init__(self, config: SourceConfig) -> None:
        """Read the class prompts; a `ConfigError` if their file cannot be read."""
        self._class_prompts = _read_class_prompts(config.class_prompts)
        self.images = image_extensions(read_avif=config.read_avif)
        self.captions = CAPTION_EXTENSIONS_OF_CLASSES if self._class_prompts else CAPTION_EXTENSIONS
        # Extensions of the members of which one makes a sample, and of those that are read.
        self.kinds = self.members = (*self.images, *self.captions)

    def choose(self, members: Mapping[str, object]) -> tuple[str | None, str | None]:
        """Choose the extensions of the image and of the caption; None where a sample lacks one."""
        image = next((kind for kind in self.images if kind in members), None)
        caption = next((kind for kind in self.captions if kind in members), None)
        return image, caption

    def unused(self, key: str, members: Mapping[str, object]) -> list[str]:
        """Return the names of the pictures of a group that it does not make a sample of."""
        image, _ = self.choose(members)
        others = (extension for extension in members if extension != image)
        return [f"{key}.{one}" for one in others if _is_of_kind(one, PICTURES)]

    def make(self, name: str, members: Mapping[str, bytes]) -> ImageSample:
        """Make a sample from the contents of its members, by extension."""
        image_kind, caption_kind = self.choose(members)
        image = members.get(image_kind)
        if caption_kind is None:
            return ImageSample(name, image, None)
        try:
            text = members[caption_kind].decode("utf-8-sig")
            if caption_kind == "cls":
                text = self._class_prompts[int(text)]
            if caption_kind == "json":
                fields = json.loads(text, object_pairs_hook=refuse_repeated_keys)
                if not isinstance(fields, dict):
                    raise ValueError("it is not an object")
                text = fields.get("caption")
            if not isinstance(text, str | None):
                raise ValueError("its caption is not a text")
        except KeyError as error:
            raise BadSampleError(
                f"{name}: class {error} has no caption (--class_prompts)."
            ) from error
        except (ValueError, RecursionError) as error:
            raise BadSampleError(f"{name}: {caption_kind} cannot be read ({error}).") from error
        return ImageSample(name, image, clean_caption(text))


def _read_class_prompts(path: str | None) -> dict[int, str]:
    """Read the captions by class number, from a JSON list or an object with numbers for keys."""
    if path is None:
        return {}
    try:
        content = read_json(Path(path))
        if not isinstance(content, list | dict):
            raise ValueError("neither a list nor an object")
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        prompts = {int(number): prompt for number, prompt in pairs}
        if not all(isinstance(prompt, str) for prompt in prompts.values()):
            raise ValueError("a caption is not a text")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The file of class prompts cannot be read ({error})",
            value=path,
            allowed='a JSON list of captions, or an object such as {"0": "a photo of a cat"}',
            flag="--class_prompts",
        ) from error
    return prompts
