"""Listing of folders: the files of a data set, and its split for training."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.data.formats.checks import ENDINGS, PLACE_FLAGS, ends_as, tell_once
from sdbench.data.image_files import has_image_name

# Hugging Face tells the split of a file or folder by these words (huggingface/datasets,
# src/datasets/data_files.py, SPLIT_KEYWORDS).
TRAINING_SPLITS = ("train", "training")
OTHER_SPLITS = ("validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation")
_SPLIT = re.compile(rf"({'|'.join(TRAINING_SPLITS + OTHER_SPLITS)})(?![a-zA-Z])", re.IGNORECASE)
# The folder with the files in Hugging Face's data sets, with or without one for each split.
DATA_FOLDER = "data"
TABLE_NAMES = ("captions.csv", "metadata.csv", "metadata.jsonl")
# In archives made on a Mac, beside the folder that was packed.
MAC_FOLDER = "__MACOSX"
# Beside tars: how many samples each holds, as `convert` and `count-samples` write it.
SIZES_NAME = "sizes.json"
NUM_KINDS_TOLD = 5
NUM_NAMES_TOLD = 3


class Listing(NamedTuple):
    """All visible files below a folder, the broken links, and links to folders listed already."""

    files: list[Path]
    dangling: list[Path]
    repeated: list[Path]


def is_visible(name: str) -> bool:
    """Return False for files that programs leave behind.

    ``._a.jpg`` and ``__MACOSX`` come from a Mac, ``.ipynb_checkpoints`` from Jupyter.
    """
    return not name.startswith(".") and name != MAC_FOLDER


def list_below(folder: Path) -> Listing:
    """List a folder and those below it, also behind links, each once."""
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
        raise ConfigError(
            f"A folder of the data cannot be read ({error.strerror})",
            value=str(folder),
            allowed="folders that may be read",
            flag=PLACE_FLAGS,
        ) from error


def find_training_folder(folder: Path) -> tuple[Path, list[str]]:
    """Find the folder of the training split: Hugging Face has it in ``train``, ``data`` or both.

    Returns it, and the names of the other splits below `folder`. It descends only where nothing
    else lies beside the splits.
    """
    place = folder
    others: list[str] = []
    for _ in range(2):
        entries = _scan(folder)
        if any(_is_data(entry.name) for entry in entries):
            break
        names = {entry.name for entry in entries if os.path.isdir(entry)}
        training = names.intersection(TRAINING_SPLITS)
        if len(training) == 1 and not names - training - {*OTHER_SPLITS}:
            left_out = sorted(names - training)
            others += [str((folder / name).relative_to(place)) for name in left_out]
            folder /= training.pop()
        elif names == {DATA_FOLDER}:
            folder /= DATA_FOLDER
        else:
            break
    return folder, others


def _is_data(name: str) -> bool:
    is_file_of_samples = any(ends_as(name, suffix) for suffix in ENDINGS) or name.endswith(".mds")
    return is_file_of_samples or name in TABLE_NAMES or has_image_name(name, read_avif=True)


def choose_files(below: Iterable[str], *, folder: str, suffix: str, is_told: bool) -> list[str]:
    """Choose the files of one kind, of the split for training; without such a split all of them.

    Args:
        below: Paths or URLs of all files below the folder.
        folder: What names are relative to.
        suffix: The kind, as `ends_as` takes it.
        is_told: Whether to print what is left out.
    """
    names = {file: file.removeprefix(folder).lstrip("/") for file in sorted(below)}
    seen = [file for file, name in names.items() if all(map(is_visible, name.split("/")))]
    files = [file for file in seen if ends_as(file, suffix)]
    splits = {file: _split_of(names[file]) for file in files}
    others = []
    if any(split in TRAINING_SPLITS for split in splits.values()):
        others = [file for file in files if splits[file] in OTHER_SPLITS]
        files = [file for file in files if splits[file] not in OTHER_SPLITS]
    if is_told:
        tell_other_splits(folder, [names[file] for file in others])
        left = [names[file] for file in seen if not ends_as(file, suffix)]
        left = [name for name in left if Path(name).name != SIZES_NAME]
        tell_left_out(folder, left, taken=f"{len(files)} {suffix.removeprefix('.')} files")
    return files


def tell_left_out(place: str, left: Sequence[str], *, taken: str) -> None:
    """Print how many files of which kinds are not read."""
    if left:
        tell_once(f"Of {place} {taken} are read, and no other files: {describe_files(left)}.")


def _split_of(name: str) -> str | None:
    """Return the split that a file's name, or that of a folder above it, begins with."""
    found = filter(None, map(_SPLIT.match, name.split("/")))
    return next((match[1].lower() for match in found), None)


def tell_other_splits(place: str, others: Sequence[str]) -> None:
    """Print which splits lie beside the one that is read."""
    if others:
        names = ", ".join(others[:NUM_NAMES_TOLD])
        more = ", ..." if len(others) > NUM_NAMES_TOLD else ""
        tell_once(f"Of {place} the split for training is read, not {names}{more}.")


def describe_files(names: Iterable[str]) -> str:
    """Return how many files of which extensions there are, in words."""
    kinds = collections.Counter(Path(name).suffix.lower() or Path(name).name for name in names)
    told = [f"{number} {kind}" for kind, number in kinds.most_common(NUM_KINDS_TOLD)]
    if len(kinds) > NUM_KINDS_TOLD:
        told.append("others")
    return ", ".join(told) or "no files"
