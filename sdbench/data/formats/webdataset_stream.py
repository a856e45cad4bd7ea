"""Samples of WebDataset tars that are streamed, each from its first byte on.

A JSON file such as OpenCLIP's ``sizes.json`` declares the number of samples in each tar; it is
compared with what the tar holds.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.outside import parse_json
from sdbench.data.checks import tell_once
from sdbench.data.formats.tar_members import (
    ArrayReader,
    SampleReader,
    describe_unused,
    list_groups,
    read_columns,
)
from sdbench.data.places.command_output import PIPE
from sdbench.data.places.listing import SIZES_NAME
from sdbench.data.places.remote import file_beside, path_of, shown
from sdbench.data.places.remote_files import open_stream
from sdbench.data.samples import ImageSample, LatentSample, Samples, SampleType, max_kept
from sdbench.data.source import SourceConfig
from sdbench.settings.kinds import MAX_COUNT

# 500,000 tars with long names; more than that is no list of sizes.
MAX_SIZES_BYTES = 64 * 2**20
# Size of the shuffle buffer: consecutive samples that are shuffled among themselves. Their files
# are held in memory: 50 MB for images of 100 kB. Of latents there are fewer: states of T5-XXL are
# 4 MiB or more in each.
SAMPLES_PER_BLOCK, MAX_BLOCK_BYTES = 512, 256 * 2**20


class StreamedTarSamples(Samples):
    """The samples of tars, numbered over all of them; cheap to read only in ascending order."""

    def __init__(self, tars: Sequence[str], *, config: SourceConfig) -> None:
        """Read the declared number of samples of each tar; of latents also the first sample."""
        self._tars = tars
        self._sizes = read_sizes(tars, place=config.tar_sizes)
        self._reader = SampleReader(config)
        filled = [tar for tar, size in zip(tars, self._sizes, strict=True) if size]
        if config.wants_latents and filled:
            with open_stream(filled[0]) as file:
                self._reader = ArrayReader(read_columns(file, shown(filled[0])) or (), config)
        self.columns, self.sample_type = self._reader.columns, self._reader.sample_type
        self._per_block = _samples_per_block(self.sample_type, config)
        whole = [divmod(size, self._per_block) for size in self._sizes]
        blocks_of_tars = [
            [self._per_block] * num_whole + [rest] * bool(rest) for num_whole, rest in whole
        ]
        blocks = list(itertools.chain.from_iterable(blocks_of_tars))
        super().__init__(self._sizes, blocks=blocks)
        self.num_blocks_of_files = list(map(len, blocks_of_tars))
        # Least recently used first.
        self._readers: list[_TarReader] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": []}

    def name(self, index: int) -> str:
        """Return tar and position of a sample; its key is known only when it is read."""
        number, position = self._find(index)
        return f"{shown(self._tars[number])}, sample {position}"

    def read(self, index: int) -> ImageSample | LatentSample:
        """Read one sample, after the unread ones before it in the tar."""
        number, position = self._find(index)
        return self._reader.make(self.name(index), self._take(number, position))

    def _take(self, number: int, position: int) -> dict[str, bytes | None]:
        """Return the members of a sample, from a reader that has not passed it, or a new one."""
        tar = self._tars[number]
        able = [one for one in self._readers if one.tar == tar and one.can_take(position)]
        # Lanes may share a tar: use the reader that is farthest, and leave the others to their
        # lanes.
        reader = max(able, key=lambda one: one.num_read, default=None)
        if reader is not None:
            self._readers.remove(reader)
        while len(self._readers) >= max_kept(self.num_lanes):
            self._readers.pop(0).close()
        if reader is None:
            reader = _TarReader(
                tar,
                num_samples=self._sizes[number],
                reader=self._reader,
                per_block=self._per_block,
            )
        try:
            members = reader.take(position)
        except BaseException:
            reader.close()
            raise
        if reader.is_done:
            reader.close()
        else:
            self._readers.append(reader)
        return members


def _samples_per_block(sample_type: SampleType, config: SourceConfig) -> int:
    # Latents, too, are counted as float32.
    num_bytes = 4 * sum(map(math.prod, sample_type.array_shapes(config).values()))
    return min(SAMPLES_PER_BLOCK, max(1, MAX_BLOCK_BYTES // max(1, num_bytes)))


class _TarReader:
    """Reads a tar from its first byte on; samples of one block may be taken in any order."""

    def __init__(
        self,
        tar: str,
        *,
        num_samples: int,
        reader: SampleReader | ArrayReader,
        per_block: int,
    ) -> None:
        self.tar = tar
        self._per_block = per_block
        self._num_samples = num_samples
        self._file = file = open_stream(tar)

        def samples() -> Iterator[dict[str, bytes | None]]:  # without self, else a cycle
            unused: list[str] = []
            for key, members, is_sample in list_groups(
                file, shown(tar), kinds=reader.kinds, wanted=reader.members
            ):
                unused += reader.unused(key, members)
                if is_sample:
                    yield {extension: member.content for extension, member in members.items()}
            if unused:
                tell_once(describe_unused(shown(tar), len(unused), unused))

        self._samples = samples()
        self.num_read = 0
        self._kept: dict[int, dict[str, bytes | None]] = {}

    @property
    def is_done(self) -> bool:
        """Whether every sample of the last block has been taken."""
        return self.num_read == self._num_samples and not self._kept

    def can_take(self, position: int) -> bool:
        """Return True unless that sample has been passed."""
        return position in self._kept or position >= self.num_read

    def take(self, position: int) -> dict[str, bytes | None]:
        """Return the members of a sample."""
        block = position // self._per_block * self._per_block
        self._kept = {number: kept for number, kept in self._kept.items() if number >= block}
        while self.num_read <= position:
            sample = next(self._samples, None)
            if sample is None:
                raise self._differs(self.num_read)
            if self.num_read >= block:
                self._kept[self.num_read] = sample
            self.num_read += 1
        if self.num_read == self._num_samples:
            # What follows the last sample shows whether the tar is whole.
            num_more = sum(1 for _ in self._samples)
            if num_more:
                raise self._differs(self._num_samples + num_more)
        return self._kept.pop(position)

    def _differs(self, num_found: int) -> RunError:
        return RunError(
            f"{shown(self.tar)} holds {num_found} samples, not the {self._num_samples} "
            f"declared by --tar_sizes or by {SIZES_NAME} beside it."
        )

    def close(self) -> None:
        """Close the tar."""
        self._samples.close()
        self._file.close()


def read_sizes(tars: Sequence[str], *, place: str | None) -> list[int]:
    """Return the number of samples of each tar, from the JSON file at `place` or beside the tar."""
    known: dict[str, dict[str, int]] = {}
    sizes, tars_of_names = [], {}
    for tar in tars:
        file = place or _file_beside(tar)
        if file not in known:
            known[file] = _read_sizes_file(file)
        names = [name for name in _names(tar) if name in known[file]]
        # Two tars with one name would be taken for one.
        if not names or tars_of_names.setdefault((file, names[0]), tar) != tar:
            raise ConfigError(
                f"{'A name stands for two tars' if names else 'A tar is missing'} in {file}",
                value=tar,
                allowed="a number of samples for each tar, by its name or the end of its path",
                flag="--tar_sizes",
            )
        sizes.append(known[file][names[0]])
    return sizes


def _file_beside(tar: str) -> str:
    if tar.startswith(PIPE):
        raise ConfigError(
            "The samples of what a command prints have to be declared before it is read",
            value=None,
            allowed='a JSON file such as {"00000.tar": 9876, ...}, or --remote_files copy',
            flag="--tar_sizes",
        )
    return file_beside(tar, SIZES_NAME)


def _names(tar: str) -> Iterator[str]:
    """Yield the names that a list of sizes may give a tar: its place, or any end of its path."""
    if tar.startswith(PIPE):
        places = re.findall(r"[^\s'\"|;&<>()]+", tar.removeprefix(PIPE))
    else:
        places = [tar]
    for path in itertools.chain.from_iterable((place, path_of(place)) for place in places):
        parts = path.split("/")
        yield from ("/".join(parts[first:]) for first in range(len(parts)))


def _read_sizes_file(place: str) -> dict[str, int]:
    try:
        with open_stream(place) as file:
            content = file.read(MAX_SIZES_BYTES + 1)
        if len(content) > MAX_SIZES_BYTES:
            raise ValueError(f"longer than {MAX_SIZES_BYTES // 2**20} MiB")
        sizes = parse_json(content.decode("utf-8-sig"))
        if not isinstance(sizes, dict):
            raise ValueError("it is not a JSON object")
        for name, size in sizes.items():
            if type(size) is not int or not 0 <= size <= MAX_COUNT:
                raise ValueError(f"{name} has {size!r} samples")
    except (OSError, EOFError, zlib.error, ValueError, RunError) as error:
        raise ConfigError(
            f"The numbers of samples of the tars cannot be read ({str(error).rstrip('.')})",
            value=place,
            allowed='a JSON object such as {"00000.tar": 9876, ...}, or --remote_files copy',
            flag="--tar_sizes",
        ) from error
    return sizes
