"""`by_likeness` and `nearest`: which of the names that there are was meant by one that is none."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable

# Less is no likeness. Two letters of three in the same order are 0.67.
MIN_LIKENESS = 0.65
# Of being like some words of a longer name, against being like the whole of one.
PART = 0.9
# Of the names that are compared; more takes too long.
MAX_LETTERS = 100


def by_likeness(name: str, names: Iterable[str]) -> list[str]:
    """Names in the order of their likeness to another one, the most alike first.

    A name may be meant by some of its words, as ``device_train_microbatch_size`` is by
    ``micro_batch``.
    """
    return sorted(names, key=functools.partial(_likeness, name), reverse=True)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name most like another one; None if none is like it."""
    first = next(iter(by_likeness(name, names)), "")
    return first if _likeness(name, first)[0] >= MIN_LIKENESS else None


def _likeness(name: str, other: str) -> tuple[float, float]:
    """From 0 to 1, of the other name or words in it; and of the whole of it, for equals."""
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
