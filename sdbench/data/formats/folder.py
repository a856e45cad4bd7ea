"""Samples of a plain folder: images, each with a text file beside it, or a table of captions."""

from __future__ import annotations

import csv
import io
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from sdbench.base.errors import ConfigError
from sdbench.data.formats.checks import PLACE_FLAGS
from sdbench.data.samples import (
    IMAGE_EXTENSIONS,
    BadSampleError,
    ImageSample,
    SampleType,
    clean_caption,
)
from sdbench.data.source import SourceConfig

# Ours, and the name and columns that Hugging Face's image folders have.
TABLE_NAMES = ("captions.csv", "metadata.csv")
FILE_COLUMNS = ("file", "file_name")
CAPTION_COLUMNS = ("caption", "text")
LAYOUT = (
    f"images ({', '.join(IMAGE_EXTENSIONS)}), each with a .txt of the same name beside it, or "
    "captions.csv with the columns file and caption"
)


class FolderSamples:
    """The images of a folder and its sub-folders, in the order of their paths."""

    num_dropped = 0
    sample_type = SampleType.IMAGES
    columns: Mapping[str, str] = {}

    def __init__(self, folder: Path, *, needs_captions: bool = True) -> None:
        """List the folder, and read its table of captions if it has one.

        Args:
            folder: Of images.
            needs_captions: Whether some image must have a caption.

        Raises:
            ConfigError: There is no such folder, no image in it, or no image with a caption.
        """
        if not folder.is_dir():
            _raise_missing("No such data folder", folder)
        self._folder = folder
        table = next((folder / name for name in TABLE_NAMES if (folder / name).is_file()), None)
        if table is None:
            self._images = _list_images(folder)
            self._captions: list[str] | None = None
        else:
            self._images, self._captions = _read_table(table)
        if not self._images:
            what = "holds no images" if table is None else f"has a {table.name} without rows"
            _raise_missing(f"The data folder {what}", folder)
        if table is None:
            has_caption = any(path.with_suffix(".txt").is_file() for path in self._images)
        else:
            has_caption = any(map(clean_caption, self._captions or ()))
        if needs_captions and not has_caption:
            _raise_missing(f"None of the {len(self._images)} images has a caption", folder)
        if not any(path.is_file() for path in self._images):
            _raise_missing(f"None of the files that {table} names is there", folder)
        self.blocks = [len(self._images)]

    @property
    def images(self) -> Sequence[Path]:
        """The path of each sample's image."""
        return self._images

    def __len__(self) -> int:
        return len(self._images)

    def tell_unlisted(self) -> None:
        """Print how many images of the folder are not in its table of captions."""
        if self._captions is not None:
            num_unlisted = len(set(_list_images(self._folder)) - set(self._images))
            if num_unlisted:
                print(
                    f"{num_unlisted} images of {self._folder} are not in its table of captions.",
                    file=sys.stderr,
                )

    def name(self, index: int) -> str:
        """Path of an image."""
        return str(self._images[index])

    def read(self, index: int) -> ImageSample:
        """Read one image and its caption; either may be missing.

        Raises:
            BadSampleError: The caption is not UTF-8.
        """
        path = self._images[index]
        if self._captions is None:
            try:
                text = (_read_if_there(path.with_suffix(".txt")) or b"").decode("utf-8")
            except UnicodeDecodeError as error:
                raise BadSampleError(f"{path}: its caption is not UTF-8 ({error}).") from error
        else:
            text = self._captions[index]
        return ImageSample(self.name(index), _read_if_there(path), clean_caption(text))


def _read_if_there(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _raise_missing(what: str, folder: Path) -> None:
    raise ConfigError(what, value=str(folder), allowed=f"a folder of {LAYOUT}", flag=PLACE_FLAGS)


def _list_images(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower().lstrip(".") in IMAGE_EXTENSIONS and path.is_file()
    )


def _read_table(table: Path) -> tuple[list[Path], list[str]]:
    """Images and captions of a table, in its order; paths are relative to its folder.

    Raises:
        ConfigError: The table is damaged, lacks a column, or a row would lose text.
    """
    rows = list(_read_rows(table))
    _, columns = rows.pop(0) if rows else (0, [])
    file_column = next((name for name in FILE_COLUMNS if name in columns), None)
    caption_column = next((name for name in CAPTION_COLUMNS if name in columns), None)
    if file_column is None or caption_column is None:
        raise ConfigError(
            f"{table} lacks a column",
            value=", ".join(columns),
            allowed="a header line with the columns file and caption (or file_name and text)",
            flag=PLACE_FLAGS,
        )
    images, captions = [], []
    for number, (line, cells) in enumerate(rows, start=1):
        if len(cells) > len(columns):
            fault = f"it has {len(cells)} cells, and the header {len(columns)}"
            _raise_row(fault, table, line=line, value=",".join(cells))
        # Where a short row ends there is no such file, or no caption.
        row = dict(itertools.zip_longest(columns, cells, fillvalue=""))
        for cell in cells:
            _check_no_row_inside(cell, table, line=line)
        images.append(table.parent / (row[file_column] or f"(row {number}: no file)"))
        captions.append(row[caption_column])
    return images, captions


def _read_rows(table: Path) -> Iterator[tuple[int, list[str]]]:
    """The header and the rows of a table, but for empty ones, each with the number of its line.

    Raises:
        ConfigError: The table is not CSV in UTF-8.
    """
    data = table.read_bytes()
    line = 1
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        for cells in reader:
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except (UnicodeDecodeError, csv.Error) as error:
        if isinstance(error, UnicodeDecodeError):
            line += data.count(b"\n", 0, error.start)
        _raise_row(f"it cannot be read ({error})", table, line=line, value=str(table))


def _check_no_row_inside(cell: str, table: Path, *, line: int) -> None:
    """Check that a cell of several lines holds no rows of the table.

    A quote that is not closed takes in all rows up to the next quote.

    Raises:
        ConfigError: A line of the cell names an image that exists.
    """
    for inside in cell.splitlines()[1:]:
        parts = inside.split(",")
        # A line without a comma is no row: a caption may be about a file.
        if len(parts) > 1 and any(os.path.isfile(table.parent / part.strip()) for part in parts):
            _raise_row("a quote of it is not closed", table, line=line, value=inside)


def _raise_row(fault: str, table: Path, *, line: int, value: str) -> NoReturn:
    raise ConfigError(
        f"The row at line {line} of {table} would lose text: {fault}",
        value=value,
        allowed='CSV in UTF-8, quotes around text with commas or line breaks, "" for a quote in it',
        flag=PLACE_FLAGS,
    )


def check(config: SourceConfig) -> int:
    """Check a folder by the names in it; return its number of samples."""
    samples = open_samples(config)
    if config.rank == 0:
        samples.tell_unlisted()
    return len(samples)


def list_files(config: SourceConfig) -> list[str]:
    """Paths of the images.

    Raises:
        ConfigError: As `FolderSamples`.
    """
    return [str(path) for path in open_samples(config).images]


def open_samples(config: SourceConfig) -> FolderSamples:
    """Open the folder that `config` names.

    Raises:
        ConfigError: As `FolderSamples`.
    """
    return FolderSamples(Path(config.remote or config.local), needs_captions=config.caption is None)
