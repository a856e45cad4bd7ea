"""`nearest` finds the known name that is most like an unknown one."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable

# Two letters of three in the same order are 0.67: eks for esk. In longer names as many agree by
# chance: convolution and resolution.
MIN_SIMILARITY = 0.65
MIN_SIMILARITY_OF_LONG = 0.68
SHORT = 4
# Weight of a match with some words of a longer name; a match with the whole name has 1.
PART = 0.8
# Longer names are cut off, since comparing them takes too long.
MAX_LETTERS = 100


def by_similarity(name: str, names: Iterable[str]) -> list[str]:
    """Sort names by their similarity to `name`, the most similar first.

    Some words of a name may match, as ``micro_batch`` matches ``device_train_microbatch_size``.
    """
    return sorted(names, key=functools.partial(_similarity, name), reverse=True)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar name; None if no name is similar."""
    first = next(iter(by_similarity(name, names)), "")
    is_short = len("".join(_words(name))) <= SHORT
    least = MIN_SIMILARITY if is_short else MIN_SIMILARITY_OF_LONG
    return first if _similarity(name, first)[0] >= least else None


def _similarity(name: str, other: str) -> tuple[float, float]:
    """Similarity from 0 to 1 to the other name or words of it; then, for ties, to all of it."""
    given, words = _words(name), _words(other)
    matcher = difflib.SequenceMatcher(None, b="".join(given), autojunk=False)

    def share(letters: str) -> float:
        matcher.set_seq1(letters)
        return matcher.ratio()

    whole = share("".join(words))
    parts = ("".join(words[a:b]) for b in range(1, len(words) + 1) for a in range(b))
    return max([whole, *(PART * share(part) for part in parts)]), whole


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name[:MAX_LETTERS].lower())
