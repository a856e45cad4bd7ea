"""`by_likeness` and `nearest`: which of the names that there are was meant by one that is none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Share of a name's letters that another one has in the same order, below which it is not like it.
MIN_SHARE = 0.5


def by_likeness(name: str, names: Iterable[str]) -> list[str]:
    """Names in the order of their likeness to another one, the most alike first.

    A part of a long name (``microbatch`` of ``device_train_microbatch_size``) is more like it than
    like a name of its own length with some of the same letters.
    """

    def likeness(other: str) -> float:
        num_same, num_given, num_other = _count_letters(name, other)
        # Of the letters given, and of the letters of both.
        return num_same / max(num_given, 1) + 2 * num_same / max(num_given + num_other, 1)

    return sorted(names, key=likeness, reverse=True)


def nearest(name: str, names: Iterable[str], *, whole: bool = False) -> str | None:
    """The name most like another one; None if none is like it.

    Args:
        name: The one that is none of them.
        names: Those that there are.
        whole: It is no part of a long name: the share counts of the letters of both.
    """
    for other in by_likeness(name, names):
        num_same, num_given, num_other = _count_letters(name, other)
        num_letters = max(num_given, num_other if whole else 1)
        if num_same >= MIN_SHARE * num_letters:
            return other
    return None


def _count_letters(name: str, other: str) -> tuple[int, int, int]:
    """Letters and digits in both, in the same order; in the one; in the other."""
    ours, theirs = (
        "".join(filter(str.isalnum, one.removeprefix("--").lower())) for one in (name, other)
    )
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks()), len(ours), len(theirs)
