"""`find_overlap`: held-out samples that are trained on as well, found by their files."""

from __future__ import annotations

import collections
import os

from sdbench import data
from sdbench.data.remote import is_url
from sdbench.data.source import SourceConfig


def find_overlap(trained: SourceConfig, held_out: SourceConfig) -> list[str]:
    """Find the held-out files that are, or seem to be, among those that are trained on.

    Files are the same if they are one file on the disk, also by a link, or have the same name and
    size; what they hold is not compared. URLs are compared as text.

    Args:
        trained: The data of the run.
        held_out: That of its validation.

    Returns:
        Names and URLs of held-out files.
    """
    by_name = collections.defaultdict(list)
    for file in data.list_files(trained):
        by_name[os.path.basename(file)].append(file)
    return [file for file in data.list_files(held_out) if _is_among(file, by_name)]


def _is_among(file: str, by_name: dict[str, list[str]]) -> bool:
    """Whether a file is one of those, of which only the ones of its name are looked at."""
    if is_url(file):
        return file in by_name.get(os.path.basename(file), ())
    names = {os.path.basename(file), os.path.basename(os.path.realpath(file))}
    alike = [other for name in names for other in by_name.get(name, ())]
    return any(_is_same(file, other) for other in alike)


def _is_same(file: str, other: str) -> bool:
    """Whether a file on the disk is another one, or has its name and size."""
    if is_url(other) or not (os.path.isfile(file) and os.path.isfile(other)):
        return False
    has_its_name = os.path.basename(file) == os.path.basename(other)
    return os.path.samefile(file, other) or (
        has_its_name and os.path.getsize(file) == os.path.getsize(other)
    )
