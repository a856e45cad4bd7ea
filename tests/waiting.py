"""`wait_for`: wait until something is so."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_for(
    is_so: Callable[[], object], *, what: str, within_s: float = 240, log: Path | None = None
) -> None:
    """Wait until something is so; an AssertionError says what was not in time, and shows a log."""
    end_s = time.monotonic() + within_s
    while not is_so():
        said = "" if log is None else f":\n{log.read_text(errors='replace')}"
        assert time.monotonic() < end_s, f"{what} did not happen within {within_s:g} s{said}"
        time.sleep(0.05)
