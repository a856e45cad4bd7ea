"""`nearest` finds the known name that is most like an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Below it, as many letters agree by chance: max_steps and sample_steps are 0.67.
MIN_SIMILARITY = 0.68
# A part of a name means it from so many letters on.
MIN_PART = 5
# Longer names are cut off, since comparing them takes too long.
MAX_LETTERS = 100


def by_similarity(name: str, names: Iterable[str]) -> list[str]:
    """Sort names by their similarity to `name`, the most similar first."""
    listed = list(names)
    return difflib.get_close_matches(name[:MAX_LETTERS], listed, n=max(1, len(listed)), cutoff=0)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar name, or the shortest that has this one in it; None if there is none."""
    given, known = name[:MAX_LETTERS].strip("-"), {one.strip("-"): one for one in names}
    close = difflib.get_close_matches(given, known, n=1, cutoff=MIN_SIMILARITY)
    if not close and len(given) >= MIN_PART:
        close = sorted((one for one in known if given in one), key=len)
    return known[close[0]] if close else None
