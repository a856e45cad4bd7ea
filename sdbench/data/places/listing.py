"""Listing of folders: the files of a data set, and its split for training."""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sdbench.base.names import by_similarity
from sdbench.base.units import counted
from sdbench.data.checks import ENDINGS, bad_place, ends_as, tell_once
from sdbench.data.places.image_names import has_image_name, heic_to_jpeg

# Hugging Face tells the split of a file or folder by these words (huggingface/datasets,
# src/datasets/data_files.py, SPLIT_KEYWORDS).
TRAINING_SPLITS = ("train", "training")
OTHER_SPLITS = ("validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation")
_SPLIT = re.compile(rf"({'|'.join(TRAINING_SPLITS + OTHER_SPLITS)})(?![a-zA-Z])", re.IGNORECASE)
# macOS adds it to archives, beside the packed folder.
MAC_FOLDER = "__MACOSX"
# Beside tars: how many samples each holds, as `convert` and `verify-data --count` write it.
SIZES_NAME = "sizes.json"
NUM_KINDS_TOLD = 5
NUM_NAMES_TOLD = 3
# Files of a neighbouring folder that are looked at when a folder is missing.
MAX_LOOKED_AT = 1000


class Listing(NamedTuple):
    """All visible files below a folder, the broken links, and links to folders listed already."""

    files: list[Path]
    dangling: list[Path]
    repeated: list[Path]


def is_visible(path: str) -> bool:
    """Return False for hidden files, and for files in hidden folders.

    ``._a.jpg`` and ``__MACOSX`` come from a Mac, ``.ipynb_checkpoints`` from Jupyter; ``.`` and
    ``..`` hide nothing.
    """
    parts = [part for part in path.split("/") if part.strip(".")]
    return not any(part.startswith(".") or part == MAC_FOLDER for part in parts)


def list_below(folder: Path) -> Listing:
    """List a folder and its sub-folders, following links, each folder once."""
    listing = Listing([], [], [])
    known: set[tuple[int, int]] = set()
    left = collections.deque([folder])
    while left:
        folder = left.popleft()
        entries = _scan(folder)
        stat = folder.stat()
        if (stat.st_dev, stat.st_ino) in known:
            listing.repeated.append(folder)
            continue
        known.add((stat.st_dev, stat.st_ino))
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = Path(entry.path)
            if os.path.isdir(path):  # at a link to itself `DirEntry.is_dir` fails
                # Folders go before links to folders.
                (left.append if entry.is_symlink() else left.appendleft)(path)
            elif os.path.exists(path):
                listing.files.append(path)
            else:
                listing.dangling.append(path)
    return listing


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """Return the visible entries of a folder."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if is_visible(entry.name)]
    except OSError as error:
        raise bad_place(
            f"A folder of the data cannot be read ({error.strerror})",
            value=str(folder),
            allowed="folders that may be read",
        ) from error


def choose_files(
    below: Iterable[str], *, folder: str, data_format: str, is_told: bool
) -> list[str]:
    """Choose the files of a format, without other splits; print what is left out if `is_told`."""
    names = {file: file.removeprefix(folder).lstrip("/") for file in sorted(below)}
    visible = [file for file, name in names.items() if is_visible(name)]
    files = {file: names[file].split("/") for file in visible if ends_as(file, data_format)}
    chosen = keep_training_split(files, is_told=is_told)
    if is_told:
        left = [file for file in visible if not ends_as(file, data_format)]
        left = [file for file in left if Path(file).name != SIZES_NAME]
        kind = ENDINGS[data_format][0].removeprefix(".")
        taken = counted(len(chosen), f"{kind} file is", f"{kind} files are")
        tell_left_out(folder, left, taken=taken)
    return chosen


def keep_training_split(names: Mapping[str, Sequence[str]], *, is_told: bool) -> list[str]:
    """Return the files without those of other splits; all files if there is no training split.

    `names` maps each file to the names that may begin with its split: its own, and those of the
    folders above it.
    """
    splits = {}
    for file, parts in names.items():
        found = filter(None, map(_SPLIT.match, parts))
        splits[file] = next((match[1].lower() for match in found), None)
    if not any(split in TRAINING_SPLITS for split in splits.values()):
        return list(names)
    others = [file for file in names if splits[file] in OTHER_SPLITS]
    if others and is_told:
        tell_once(f"The split for training is read, not {name_some(others)}.")
    return [file for file in names if splits[file] not in OTHER_SPLITS]


def tell_left_out(place: str, left: Sequence[str], *, taken: str) -> None:
    """Print the number and kinds of the files that are not read."""
    if left:
        tell_once(f"Of {place} {taken} read, and no other files: {describe_files(left)}.")
    if how := heic_to_jpeg(left):
        tell_once(f"HEIC pictures are not read; {how}.")


def name_some(names: Sequence[str]) -> str:
    """Return the first of some names, in words."""
    return ", ".join([*names[:NUM_NAMES_TOLD], *(["..."] if len(names) > NUM_NAMES_TOLD else [])])


def describe_files(names: Iterable[str]) -> str:
    """Return the number of files by extension, most first, e.g. ``3 .txt, 1 .md``."""
    kinds = collections.Counter(Path(name).suffix.lower() or Path(name).name for name in names)
    told = [f"{number} {kind}" for kind, number in kinds.most_common(NUM_KINDS_TOLD)]
    if len(kinds) > NUM_KINDS_TOLD:
        told.append("others")
    return ", ".join(told) or "no files"


def describe_neighbours(place: str) -> str:
    """Return the nearest folder above a missing one, and folders of data in it, most alike first.

    Only the first files of a folder are looked at.
    """
    missing = Path(place)
    above = next(folder for folder in missing.parents if os.path.isdir(folder))
    name = missing.relative_to(above).parts[0]
    folders = [path for path in _visible(above) if os.path.isdir(path) and _holds_data(path)]
    found = by_similarity(name, [path.name for path in folders])
    told = f"the nearest folder that exists is {above.absolute()}"
    if not found:
        return told
    return f"{told}, with data in {name_some([str(above / one) for one in found])}"


def _visible(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            first = itertools.islice(entries, MAX_LOOKED_AT)
            return [Path(entry.path) for entry in first if is_visible(entry.name)]
    except OSError:  # one that this user may not read
        return []


def _holds_data(folder: Path) -> bool:
    names = [path.name for path in _visible(folder)]
    return any(
        name == "index.json"  # of MDS
        or has_image_name(name, read_avif=True)
        or any(ends_as(name, data_format) for data_format in ENDINGS)
        for name in names
    )
