"""`make_runs` is the loop of sweep and repeat: it makes runs, and goes on where it was stopped.

A run that is out of memory, fails or takes too long is a row like any other. When a run has ended,
its outcome is written atomically to outcome.json. The next start makes the runs without this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.escape import for_terminal
from sdbench.base.files import check_folder, refused_unless_read, replace_file, write_json
from sdbench.base.outside import read_json_object
from sdbench.base.progress import Progress
from sdbench.base.secrets import redact_values
from sdbench.base.units import counted
from sdbench.launch.child import LOCK_NAME, Outcome, only_one_in, run_child, tail
from sdbench.record.provenance import git_state, package_versions
from sdbench.record.row import RUN_COLUMNS, format_csv, make_row
from sdbench.record.store import OK, OOM, RECORD_NAME, TIMEOUT, load_record
from sdbench.report.tables import Table, make_cell, make_table, to_terminal
from sdbench.report.terminal import format_rate

OUTCOME_NAME, ENVIRONMENT_NAME, TABLE_NAME = "outcome.json", "environment.json", "runs.csv"
SAVED = ("status", "reason", "exit_code", "duration_s", "cause", "run")  # of an Outcome


@dataclasses.dataclass
class Run:
    """The n-th measurement of a command, in a process of its own."""

    name: str  # of the command, for people; may be empty
    command: Sequence[str]
    varied: Mapping[str, Any]  # what tells the command from the others: columns of the table
    repeat: int  # from 1
    folder: Path  # made for it; what an earlier attempt has left there is removed
    outcome: Outcome | None = None  # of a run that has ended and has its record

    def read(self) -> None:
        """Read how the run has ended."""
        path = self.folder / OUTCOME_NAME
        if not path.is_file():
            return
        content = _read(path, read_json_object)
        record = None
        if content["run"] is not None:
            place = self.folder / content["run"]
            if not (place / RECORD_NAME).is_file():
                return
            if content["status"] == OK:
                record = _read(place, load_record)
            else:
                with contextlib.suppress(OSError, ValueError):  # outcome.json gives the reason
                    record = load_record(place)
        self.outcome = Outcome(**{name: content[name] for name in SAVED}, record=record)

    def end(self, outcome: Outcome) -> None:
        """Write the outcome."""
        saved = {name: getattr(outcome, name) for name in SAVED}
        write_json(self.folder / OUTCOME_NAME, {"command": list(self.command), **saved})
        self.outcome = outcome


def make_runs(
    runs: Sequence[Run],
    *,
    folder: Path,
    begun_by: Mapping[str, Any],
    accepted: Collection[str],
    check: Callable[[Run, Outcome], None] = lambda run, outcome: None,
    timeout_s: float = math.inf,
    budget_s: float | None = None,
    is_dry_run: bool = False,
) -> int:
    """Make the runs that have not ended, in their order; returns the exit code.

    Args:
        runs: All runs of the folder, round by round; each gets its outcome.
        folder: Their folder, in which one command is at work at a time.
        begun_by: What must be the same each time that the loop goes on, by name.
        accepted: Statuses of runs that are no failure.
        check: Called when a run ends; what it refuses is not saved, and ends the loop.
        timeout_s: Bound on each run.
        budget_s: Bound on this start; a run that it cuts off is made the next time.
        is_dry_run: Whether to show the plan only.
    """
    end_s = time.monotonic() + (budget_s or math.inf)
    with contextlib.nullcontext() if is_dry_run else _enter(folder, begun_by):
        for run in runs:
            run.read()
        print(_describe(runs, folder=folder, timeout_s=timeout_s, budget_s=budget_s), flush=True)
        if is_dry_run:
            return 0
        try:
            missing = [run for run in runs if run.outcome is None]
            for run, outcome in _measure(missing, timeout_s=timeout_s, end_s=end_s):
                check(run, outcome)
                run.end(outcome)
        finally:  # a stop signal loses no run that has ended
            replace_file(folder / TABLE_NAME, format_csv(_make_rows(runs), columns=RUN_COLUMNS))
    print(f"\n{to_terminal(_make_table(runs))}\n\ntable: {folder / TABLE_NAME}")
    missing = [run for run in runs if run.outcome is None]
    if missing:
        num_missing = counted(len(missing), "missing run")
        print(f"time is up; the same command makes the {num_missing}:")
        print("\n".join(f"  {for_terminal(run.name)}" for run in missing))
    ended = [run.outcome for run in runs if run.outcome is not None]
    machines = {one.record["machine"]["slug"] for one in ended if one.record is not None}
    if len(machines) > 1:  # e.g. another GPU, which environment.json does not have
        names = for_terminal(", ".join(sorted(machines)))
        print(f"caution: measured on different machines: {names}", file=sys.stderr)
    return 0 if ended and {one.status for one in ended} <= {*accepted} else 1


def _measure(
    runs: Sequence[Run], *, timeout_s: float, end_s: float
) -> Iterator[tuple[Run, Outcome]]:
    """Make runs until `end_s`, on the monotonic clock; the one that it cuts off is not yielded."""
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


@contextlib.contextmanager
def _enter(folder: Path, begun_by: Mapping[str, Any]) -> Iterator[None]:
    """Keep others out of the folder; refuse one begun by something else, or in other conditions."""
    import psutil

    here = {
        "commit": git_state()["commit"],
        **package_versions(),
        "num_cpu_cores": psutil.cpu_count(),
        # Rounded: the kernel takes a little more or less of it from one boot to the next.
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        **redact_values(begun_by),
    }
    path = folder / ENVIRONMENT_NAME
    if not (folder / LOCK_NAME).exists():  # else the folder was begun by a command of the suite
        check_folder(folder)
    with only_one_in(folder):
        if not path.is_file():
            write_json(path, here)
        began = _read(path, read_json_object)
        changes = [
            f"{name} {began.get(name)} -> {here.get(name)}"
            for name in sorted({*began, *here})
            if began.get(name) != here.get(name)
        ]
        if changes:
            raise ConfigError(
                "the runs of this folder were begun by another command, or under other code, "
                "libraries or hardware: they would not compare",
                value="; ".join(changes),
                allowed="the same ones, or another folder",
                flag="--folder",
            )
        yield


def _read(path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Read a file of the loop; an outcome.json has to hold a whole outcome."""
    allowed = "the file as it was written; without it the run is made again"
    with refused_unless_read(path, "a file of earlier runs", allowed=allowed, flag="--folder"):
        content = read(path)
        if path.name == OUTCOME_NAME and not {*SAVED} <= content.keys():
            raise ValueError("a key is missing")
    return content


def _make_table(runs: Sequence[Run]) -> Table:
    """What varied and the result, a row for each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.varied))
    rows = []
    for run in runs:
        summary = run.outcome.summary if run.outcome else {}
        varied = redact_values(run.varied)
        said = (run.outcome.status, run.outcome.reason) if run.outcome else ("not run",)
        rows.append(
            {
                **{name: make_cell(varied.get(name), unknown="") for name in names},
                "repeat": run.repeat,
                "images/s": format_rate(summary) if summary else "",
                "peak GiB": make_cell(summary.get("peak_memory_gib"), unknown=""),
                "status": ": ".join(filter(None, said)),
            }
        )
    return make_table(rows, left=names)


def _describe(
    runs: Sequence[Run], *, folder: Path, timeout_s: float, budget_s: float | None
) -> str:
    """The plan: the state of every command and the expected duration of the rest."""
    ended = [run.outcome for run in runs if run.outcome is not None]
    num_repeats = runs[-1].repeat
    num_commands = len(runs) // num_repeats
    lines = [
        f"{counted(num_commands, 'command')} x {num_repeats} in {folder}: {len(ended)} of "
        f"{counted(len(runs), 'run')} done"
    ]
    for number, run in enumerate(runs[:num_commands]):
        if run.name:
            statuses = [one.outcome.status for one in runs[number::num_commands] if one.outcome]
            lines.append(f"  {for_terminal(run.name)}: {', '.join(statuses) or 'to run'}")
    durations_s = [one.duration_s for one in ended if one.status == OK]
    each_s = statistics.median(durations_s) if durations_s else timeout_s
    num_left = len(runs) - len(ended)
    if num_left and each_s < math.inf:
        bound = "about" if durations_s else "at most"
        left_s = min(num_left * each_s, budget_s or math.inf)
        lines.append(f"{bound} {left_s / 60:.0f} min")
    return "\n".join(lines)


def _make_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per run that has ended, in the columns of all tables of figures."""
    rows = []
    for run in runs:
        if run.outcome is not None:
            row = {"source": run.folder.name, "kind": "measured", "other_settings": run.name}
            if run.outcome.record is not None:
                row = make_row(run.outcome.record)
            rows.append(row | {"status": run.outcome.status, "reason": run.outcome.reason})
    return rows
