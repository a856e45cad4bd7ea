"""What is in a folder: the files of a data set, its split for training, and what else is there."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.data.formats.checks import PLACE_FLAGS, tell_once
from sdbench.data.image_files import has_image_name

# Hugging Face tells the split of a file or folder by these words (huggingface/datasets,
# src/datasets/data_files.py, SPLIT_KEYWORDS).
TRAINING_SPLITS = ("train", "training")
OTHER_SPLITS = ("validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation")
_SPLIT = re.compile(rf"({'|'.join(TRAINING_SPLITS + OTHER_SPLITS)})(?![a-zA-Z])", re.IGNORECASE)
# What Hugging Face's data sets have their files in, with or without a folder for each split.
DATA_FOLDER = "data"
TABLE_NAMES = ("captions.csv", "metadata.csv", "metadata.jsonl")
# In archives made on a Mac, beside the folder that was packed.
MAC_FOLDER = "__MACOSX"
NUM_KINDS_TOLD = 5


class Listing(NamedTuple):
    """What is below a folder.

    Attributes:
        files: All files but hidden ones.
        dangling: Links that lead nowhere.
        repeated: Links to folders that are listed already.
    """

    files: list[Path]
    dangling: list[Path]
    repeated: list[Path]


def is_visible(name: str) -> bool:
    """Whether a file or folder of this name is the user's, not one that a program left there.

    ``._a.jpg`` and ``__MACOSX`` are of a Mac, ``.ipynb_checkpoints`` of Jupyter.
    """
    return not name.startswith(".") and name != MAC_FOLDER


def list_below(folder: Path) -> Listing:
    """List a folder and those below it, also behind links, each once.

    Raises:
        ConfigError: One of them cannot be read.
    """
    listing = Listing([], [], [])
    _list_into(listing, folder, known=set())
    return listing


def _list_into(listing: Listing, folder: Path, *, known: set[tuple[int, int]]) -> None:
    stat = folder.stat()
    if (stat.st_dev, stat.st_ino) in known:
        listing.repeated.append(folder)
        return
    known.add((stat.st_dev, stat.st_ino))
    # What is a folder itself goes before what is a link to one.
    for entry in sorted(_scan(folder), key=lambda entry: (entry.is_symlink(), entry.name)):
        path = Path(entry.path)
        if entry.is_dir():
            _list_into(listing, path, known=known)
        elif entry.is_symlink() and not path.exists():
            listing.dangling.append(path)
        else:
            listing.files.append(path)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, but for what is hidden.

    Raises:
        ConfigError: It cannot be read.
    """
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


def find_training_folder(folder: Path) -> tuple[Path, list[Path]]:
    """Descend to what is trained on: Hugging Face has it in ``train``, ``data`` or both.

    Returns:
        The folder, or one below it where nothing else is beside that but other splits; and these,
        which are left out.
    """
    others: list[Path] = []
    for _ in range(2):
        entries = _scan(folder)
        if any(_is_data(entry.name) for entry in entries):
            break
        names = {entry.name for entry in entries if entry.is_dir()}
        training = names.intersection(TRAINING_SPLITS)
        if len(training) == 1 and not names - training - {*OTHER_SPLITS}:
            others += [folder / name for name in sorted(names - training)]
            folder /= training.pop()
        elif names == {DATA_FOLDER}:
            folder /= DATA_FOLDER
        else:
            break
    return folder, others


def _is_data(name: str) -> bool:
    return name.endswith((".tar", ".parquet", ".mds")) or (
        name in TABLE_NAMES or has_image_name(name, read_avif=True)
    )


def list_folder(folder: Path, *, suffix: str) -> tuple[list[Path], list[Path]]:
    """The files of a folder to train on, and the files and folders of other splits.

    Args:
        folder: As the user gave it; `find_training_folder` says which is listed.
        suffix: How the files end.
    """
    folder, others = find_training_folder(folder)
    files = sorted(folder / entry.name for entry in _scan(folder) if entry.name.endswith(suffix))
    splits = {path: _SPLIT.match(path.name) for path in files}
    if any(split and split[1].lower() in TRAINING_SPLITS for split in splits.values()):
        of_others = [
            path for path, split in splits.items() if split and split[1].lower() in OTHER_SPLITS
        ]
        others += of_others
        files = [path for path in files if path not in of_others]
    return files, others


def tell_other_splits(place: Path, others: Iterable[Path]) -> None:
    """Say which splits are beside the one that is read."""
    if names := [str(path.relative_to(place)) for path in others]:
        tell_once(f"Of {place} the split for training is read, not {', '.join(names)}.")


def describe_files(names: Iterable[str]) -> str:
    """How many files of which extensions there are, in words."""
    kinds = collections.Counter(Path(name).suffix.lower() or Path(name).name for name in names)
    told = [f"{number} {kind}" for kind, number in kinds.most_common(NUM_KINDS_TOLD)]
    if len(kinds) > NUM_KINDS_TOLD:
        told.append("others")
    return ", ".join(told) or "no files"
