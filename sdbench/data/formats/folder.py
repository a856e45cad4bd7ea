"""Samples of a plain folder: images, each with a text file beside it, or a table of captions."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sdbench.base.outside import HAS_NUL, refuse_repeated_keys
from sdbench.base.units import counted
from sdbench.data.checks import bad_place, tell_once
from sdbench.data.places.image_names import IMAGE_EXTENSIONS, has_image_name, heic_to_jpeg
from sdbench.data.places.listing import (
    TRAINING_SPLITS,
    describe_files,
    describe_neighbours,
    keep_training_split,
    list_below,
    tell_left_out,
)
from sdbench.data.samples import BadSampleError, ImageSample, Samples, clean_caption
from sdbench.data.source import SourceConfig

TABLE_NAMES = ("captions.csv", "metadata.csv", "metadata.jsonl")
# Where Hugging Face's data sets keep the training split and its table.
TABLE_FOLDERS = ["", *TRAINING_SPLITS, "data", *(f"data/{split}" for split in TRAINING_SPLITS)]
# Our names, and those of Hugging Face's image folders.
FILE_COLUMNS = ("file", "file_name")
CAPTION_COLUMNS = ("caption", "text")
CAPTION_SUFFIX = ".txt"
LAYOUT = (
    f"images ({', '.join(IMAGE_EXTENSIONS)}), each with a .txt of the same name beside it, or "
    "captions.csv with the columns file and caption, or metadata.jsonl with file_name and text"
)
SUBJECT_HINT = (
    "; pictures of one subject or style need none with --task dreambooth and --instance_prompt"
)
# How the rows of a table have to be written, by its extension.
ROW_FORMS = {
    ".csv": 'CSV in UTF-8, quotes around text with commas or line breaks, "" for a quote in it',
    ".jsonl": 'an object on each line, in UTF-8: {"file_name": "a.jpg", "text": "a caption"}',
}


class FolderSamples(Samples):
    """The images of a folder and its sub-folders, in the order of their paths.

    Links to folders are followed, each folder once; hidden files are skipped.
    """

    def __init__(self, config: SourceConfig) -> None:
        """List the folder, or read its table; a `ConfigError` if it lacks images or captions."""
        folder = Path(config.remote or config.local)
        if not folder.is_dir():
            raise bad_place(
                "No such data folder",
                value=str(folder),
                allowed=f"a folder of {LAYOUT}; {describe_neighbours(str(folder))}",
            )
        self._folder = folder
        tables = [folder / place / name for place in TABLE_FOLDERS for name in TABLE_NAMES]
        tables = [table for table in tables if table.is_file()]
        if len(tables) > 1:
            names = " and ".join(str(table.relative_to(folder)) for table in tables)
            _raise_missing(f"The data folder has several tables, {names}", folder)
        self._table = tables[0] if tables else None
        self._captions: list[str | None] | None = None
        if self._table is None:
            self.images = _list_images(folder, read_avif=config.read_avif)
            has_caption = any(map(os.path.isfile, map(_caption_file, self.images)))
        else:
            self.images, self._captions = read_table(self._table, folder=self._table.parent)
            if not self.images:
                _raise_missing(f"The data folder has a {self._table.name} without rows", folder)
            has_caption = any(map(clean_caption, self._captions))
        if config.caption is None and not has_caption:
            _raise_missing(
                f"None of the {len(self.images)} images has a caption", folder, or_else=SUBJECT_HINT
            )
        if not any(map(os.path.isfile, self.images)):
            _raise_missing(f"None of the {len(self.images)} images exists", folder)
        super().__init__([len(self.images)])

    @property
    def caption_files(self) -> set[Path]:
        """The table of captions, or the caption files that exist beside the images."""
        if self._table is not None:
            return {self._table}
        return {path for path in map(_caption_file, self.images) if os.path.isfile(path)}

    def tell_left_out(self) -> None:
        """Print what is not read: other files, folders under a second name, other splits."""
        listing = list_below(self._folder)
        for path in listing.repeated:
            tell_once(f"{path} is a folder that is read already, under another name.")
        read = keep_training_split(_folders_of(listing.files, self._folder), is_told=True)
        left = {*read} - {*map(str, self.images)} - {*map(str, self.caption_files)}
        taken = counted(len(self.images), "image is", "images are")
        tell_left_out(str(self._folder), sorted(left), taken=taken)

    def name(self, index: int) -> str:
        """Path of an image."""
        return str(self.images[index])

    def read(self, index: int) -> ImageSample:
        """Read one image and its caption; either may be missing."""
        path = self.images[index]
        if self._captions is None:
            stored = _read_if_there(_caption_file(path))
            try:
                text = None if stored is None else stored.decode("utf-8")
            except UnicodeDecodeError as error:
                raise BadSampleError(f"{path}: its caption is not UTF-8 ({error}).") from error
        else:
            text = self._captions[index]
        image = _read_if_there(path) if self.needs_images else None
        if image is None and self.needs_images and os.path.islink(path):
            raise BadSampleError(
                f"{path}: the link leads to {os.readlink(path)}, which is not there."
            )
        return ImageSample(self.name(index), image, clean_caption(text))


def _read_if_there(path: Path) -> bytes | None:
    # `Path.is_file` raises for some texts that cannot be names.
    try:
        return path.read_bytes() if os.path.isfile(path) else None
    except OSError as error:
        raise BadSampleError(f"{path}: it cannot be read ({error.strerror}).") from error


def _caption_file(image: Path) -> Path:
    return image.with_suffix(CAPTION_SUFFIX)


def _raise_missing(what: str, folder: Path, *, or_else: str = "") -> NoReturn:
    raise bad_place(what, value=str(folder), allowed=f"a folder of {LAYOUT}{or_else}")


def _list_images(folder: Path, *, read_avif: bool) -> list[Path]:
    """Return files and links named as images; a broken link becomes a bad sample."""
    listing = list_below(folder)
    for path in listing.dangling:
        if not has_image_name(path, read_avif=True) and path.suffix != CAPTION_SUFFIX:
            raise bad_place(
                f"A link in the data folder leads to {os.readlink(path)}, which is not there",
                value=str(path),
                allowed="links to existing files and folders: repair or remove it",
            )
    paths = listing.files + listing.dangling
    images = sorted(path for path in paths if has_image_name(path, read_avif=read_avif))
    if not images:
        found = describe_files(path.name for path in listing.files)
        how = heic_to_jpeg(list(map(str, listing.files)))
        _raise_missing(f"The data folder holds no images, but {found}{how and f'; {how}'}", folder)
    return list(map(Path, keep_training_split(_folders_of(images, folder), is_told=False)))


def _folders_of(files: Iterable[Path], folder: Path) -> dict[str, Sequence[str]]:
    """Map files to the names of their folders, which may name a split; file names do not."""
    return {str(file): file.relative_to(folder).parts[:-1] for file in files}


# Line number, from 1, and cells of a table's row.
Row = tuple[int, Mapping[str, Any]]


def read_table(table: Path, *, folder: Path) -> tuple[list[Path], list[str | None]]:
    """Return images and captions of a .csv or .jsonl table with paths relative to `folder`."""
    rows = list(_read_csv(table) if table.suffix == ".csv" else _read_json_lines(table))
    columns = {name for _, row in rows for name in row}
    file_column = next((name for name in FILE_COLUMNS if name in columns), None)
    caption_column = next((name for name in CAPTION_COLUMNS if name in columns), None)
    if rows and None in (file_column, caption_column):
        raise bad_place(
            f"{table} lacks a column",
            value=", ".join(sorted(columns)),
            allowed="the columns file and caption, or file_name and text",
        )
    images, captions = [], []
    for number, (line, row) in enumerate(rows, start=1):
        # A short row lacks its file or its caption.
        file, caption = row.get(file_column), row.get(caption_column)
        for value in (file, caption):
            if not isinstance(value, str | None):
                _raise_row("its file or its caption is not a text", table, line=line, value=value)
        images.append(folder / (file or f"(row {number}: no file)"))
        captions.append(caption)
    return images, captions


def _read_table_bytes(table: Path) -> bytes:
    content = table.read_bytes()
    if b"\0" in content:
        line = 1 + content.count(b"\n", 0, content.index(b"\0"))
        _raise_row(f"it {HAS_NUL}", table, line=line, value=str(table))
    return content


def _read_csv(table: Path) -> Iterator[Row]:
    data = _read_table_bytes(table)
    line, columns = 1, None
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        for cells in reader:
            if cells and columns is None:
                columns = cells
                if len(set(columns)) < len(columns):
                    _raise_row("it names a column twice", table, line=line, value=",".join(columns))
            elif cells:
                if len(cells) > len(columns):
                    fault = f"it has {len(cells)} cells, and the header {len(columns)}"
                    _raise_row(fault, table, line=line, value=",".join(cells))
                for cell in cells:
                    _check_no_row_inside(cell, table, line=line)
                yield line, dict(itertools.zip_longest(columns, cells))
            line = reader.line_num + 1
    except (UnicodeDecodeError, csv.Error) as error:
        if isinstance(error, UnicodeDecodeError):
            line += data.count(b"\n", 0, error.start)
        _raise_row(f"it cannot be read ({error})", table, line=line, value=str(table))


def _read_json_lines(table: Path) -> Iterator[Row]:
    for line, stored in enumerate(_read_table_bytes(table).split(b"\n"), start=1):
        if not stored.strip():
            continue
        try:
            text = stored.decode("utf-8-sig")
            row = json.loads(text, object_pairs_hook=refuse_repeated_keys)
        except (ValueError, RecursionError) as error:
            _raise_row(f"it cannot be read ({error})", table, line=line, value=str(table))
        if not isinstance(row, dict):
            _raise_row("it is not an object", table, line=line, value=row)
        yield line, row


def _check_no_row_inside(cell: str, table: Path, *, line: int) -> None:
    """Refuse a cell with a line that names an image: an unclosed quote has swallowed rows."""
    for inside in cell.splitlines()[1:]:
        parts = inside.split(",")
        # A line without a comma is no row: a caption may name a file.
        if len(parts) > 1 and any(os.path.isfile(table.parent / part.strip()) for part in parts):
            _raise_row("a quote of it is not closed", table, line=line, value=inside)


def _raise_row(fault: str, table: Path, *, line: int, value: object) -> NoReturn:
    raise bad_place(
        f"The row at line {line} of {table} would lose text: {fault}",
        value=value,
        allowed=ROW_FORMS[table.suffix],
    )


def check(config: SourceConfig) -> int:
    """Check a folder by the names in it; return its number of samples."""
    samples = FolderSamples(config)
    if config.rank == 0:
        samples.tell_left_out()
    return len(samples)


def list_files(config: SourceConfig) -> list[str]:
    """Return the paths of the images."""
    return [str(path) for path in FolderSamples(config).images]


def list_files_and_captions(config: SourceConfig) -> list[str]:
    """Return the paths of the images, and of their caption files unless all share one caption."""
    samples = FolderSamples(config)
    captions = samples.caption_files if config.caption is None else ()
    return [str(path) for path in (*samples.images, *captions)]
