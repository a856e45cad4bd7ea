"""`measure` makes runs one after the other: the loop of sweep and repeat."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from sdbench.base.escape import for_terminal
from sdbench.base.files import check_folder, refused_unless_written
from sdbench.base.progress import Progress
from sdbench.launch.child import Outcome, run_child, tail
from sdbench.record.store import OK, OOM, TIMEOUT

Item = TypeVar("Item")


@dataclasses.dataclass
class Run:
    """A measurement in a process of its own."""

    name: str  # for people; may be empty
    command: Sequence[str]
    folder: Path  # made for it; what an earlier attempt has left there is removed


RunT = TypeVar("RunT", bound=Run)


def measure(
    runs: Sequence[RunT], *, timeout_s: float = math.inf, end_s: float = math.inf
) -> Iterator[tuple[RunT, Outcome]]:
    """Make runs, each within `timeout_s`, until `end_s`, and show how each has ended.

    A run that is cut off at `end_s`, on the monotonic clock, is not yielded.
    """
    with Progress(len(runs), unit="run") as progress:
        for run in runs:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            shutil.rmtree(run.folder, ignore_errors=True)
            bound_s = min(timeout_s, left_s)
            bound = bound_s if bound_s < math.inf else None
            outcome = run_child(run.command, folder=run.folder, timeout_s=bound)
            if outcome.status == TIMEOUT and bound_s == left_s:
                return
            progress.report(": ".join(filter(None, (for_terminal(run.name), outcome.described))))
            if outcome.status not in (OK, OOM):
                progress.say(tail(run.folder))
            yield run, outcome


def in_rounds(items: Iterable[Item], *, times: int) -> list[tuple[int, Item]]:
    """Pairs of round, from 1, and item: a slow change of the machine affects all items alike."""
    return list(itertools.product(range(1, times + 1), items))


def new_folder(given: Path | None, *, prefix: str) -> Path:
    """Make an empty folder: the user's, or ``runs/<prefix>_<time>``."""
    with refused_unless_written(given or "runs", what="the output folder", flag="--folder"):
        while given is None:
            now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
            folder = Path("runs") / f"{prefix}_{now}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
            time.sleep(0.1)  # another command began within the same second
        check_folder(given)
        given.mkdir(parents=True, exist_ok=True)
        return given
