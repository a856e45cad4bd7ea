"""Units that records and messages use, and counts of things in words."""

BYTES_PER_GIB = 1024**3


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 run``, ``2 runs``; `plural` is for a noun without an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
