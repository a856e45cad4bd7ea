"""What does one check say, and to whom?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

OK, SKIPPED, WARNING, ERROR = "ok", "skipped", "warning", "error"
BYTES_PER_MIB, BYTES_PER_GIB = 1024**2, 1024**3
# From the least to the most severe.
LEVELS = (SKIPPED, OK, WARNING, ERROR)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        level: One of `LEVELS`. An error is what a job would fail of, or what would make its
            figures worthless.
        found: What was seen, or why nothing was looked at.
        advice: What to do about it; empty where nothing has to be done.
    """

    level: str
    found: str
    advice: str = ""


def ok(found: str) -> Finding:
    """All is well."""
    return Finding(OK, found)


def skipped(reason: str) -> Finding:
    """There is nothing to look at."""
    return Finding(SKIPPED, reason)


def warning(found: str, advice: str) -> Finding:
    """A job would run, not as well as it could."""
    return Finding(WARNING, found, advice)


def error(found: str, advice: str) -> Finding:
    """A job would fail, or its figures would be worthless."""
    return Finding(ERROR, found, advice)


def number_of(number: int, noun: str) -> str:
    """A number and what it counts, e.g. ``1 rank`` or ``2 ranks``."""
    if number != 1:
        noun = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun}"


def show_bytes(number: float) -> str:
    """A size in memory or on a disk."""
    if number < BYTES_PER_GIB:
        return f"{number / BYTES_PER_MIB:.0f} MiB"
    return f"{number / BYTES_PER_GIB:.1f} GiB"


def join(findings: Sequence[Finding]) -> Finding:
    """Several findings about one thing as a single one, as severe as the worst of them.

    Args:
        findings: At least one; what the worst say comes first.
    """
    worst_first = sorted(findings, key=lambda finding: -LEVELS.index(finding.level))
    return Finding(
        worst_first[0].level,
        "; ".join(finding.found for finding in worst_first),
        "; ".join(dict.fromkeys(finding.advice for finding in worst_first if finding.advice)),
    )
