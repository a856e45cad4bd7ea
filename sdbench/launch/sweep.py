"""The command `python -m sdbench sweep`: runs many configurations, each in a process of its own.

A run that is out of memory, fails or takes too long is a row like any other. When a run has ended,
its outcome is written atomically to cell.json. The next start makes the runs without this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.escape import for_terminal
from sdbench.base.files import refused_unless_read, replace_file, write_json
from sdbench.base.outside import read_json_object
from sdbench.base.secrets import redact_values
from sdbench.base.units import counted
from sdbench.launch.child import Outcome, only_one_in
from sdbench.launch.runs import Run, in_rounds, measure
from sdbench.launch.sweep_file import Cell, SweepFile, read_sweep_file
from sdbench.record.provenance import git_state, package_versions
from sdbench.record.row import COLUMNS, format_csv, make_row
from sdbench.record.store import OK, OOM, RECORD_NAME, load_record
from sdbench.report.tables import Table, make_cell, make_table, to_terminal
from sdbench.report.terminal import format_rate
from sdbench.settings.kinds import PATH, SWITCH
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting

STATE_NAME, ENVIRONMENT_NAME = "cell.json", "environment.json"
RESULT = ("status", "reason", "exit_code", "duration_s", "run")
EPILOG = """\
a sweep file:
  launcher: composer -n 2             (default: composer)
  timeout_s: 1800                     (of each run; default: 3600)
  budget_s: 540                       (of all runs of one start; default: none)
  repeats: 3                          (default: 1)
  base: {use_synth_data: true, preset: fast}
  grid: {device_train_microbatch_size: [4, 8, 16], use_ema: [true, false]}
  list: [{device_train_microbatch_size: 32, attention: eager}]

examples:
  python -m sdbench sweep sweeps/tiny.yaml
  python -m sdbench sweep sweeps/seeds.yaml --dry_run

The same command resumes a sweep; a run whose folder is gone is made again. Runs that are out of
memory, or that the budget leaves no time for, are not failures. The exit code is 1 if a run failed
otherwise, took too long or was invalid, and 130 if the sweep was stopped.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Flags of sweep."""

    file: Path = setting(PATH, REQUIRED, "YAML file of the sweep", is_positional=True)
    dry_run: bool = setting(SWITCH, False, "show the plan and stop")
    folder: Path | None = setting(
        PATH, None, "where the runs go (default: runs/sweep_<name of FILE>)"
    )


@dataclasses.dataclass
class SweepRun(Run):
    """The n-th measurement of a cell of a sweep."""

    cell: Cell
    repeat: int  # from 1
    outcome: dict[str, Any] | None = None  # cell.json, of a run that has ended and has its record
    record: dict[str, Any] | None = None  # if it could be read when the run ended

    def read(self) -> None:
        """Read how the run has ended."""
        path = self.folder / STATE_NAME
        if not path.is_file():
            return
        outcome = _read(path, read_json_object)
        if outcome["run"] is not None:
            place = self.folder / outcome["run"]
            if not (place / RECORD_NAME).is_file():
                return
            if outcome["status"] == OK:
                self.record = _read(place, load_record)
            else:
                with contextlib.suppress(OSError, ValueError):  # cell.json gives the reason
                    self.record = load_record(place)
        self.outcome = outcome

    def end(self, outcome: Outcome) -> None:
        """Write the outcome."""
        self.record = outcome.record
        self.outcome = {
            "settings": dict(self.cell.settings),
            "command": list(self.command),
            **{name: getattr(outcome, name) for name in RESULT},
        }
        write_json(self.folder / STATE_NAME, self.outcome)


def main(argv: Sequence[str] | None = None) -> int:
    """Begin or resume a sweep; returns the exit code."""
    flags = parse(
        SweepFlags,
        argv,
        prog="python -m sdbench sweep",
        description="Measure a grid or a list of settings of benchmark.py, each in a process of "
        "its own.",
        epilog=EPILOG,
    ).config
    sweep = read_sweep_file(flags.file)
    folder = flags.folder or Path("runs") / f"sweep_{flags.file.stem}"
    end_s = time.monotonic() + (sweep.budget_s or math.inf)
    runs = [
        SweepRun(cell.described, cell.command, folder / f"{cell.key}-{repeat}", cell, repeat)
        for repeat, cell in in_rounds(sweep.cells, times=sweep.repeats)
    ]
    with contextlib.nullcontext() if flags.dry_run else only_one_in(folder):
        if not flags.dry_run:
            _check_environment(folder)
        for run in runs:
            run.read()
        print(_describe(sweep, runs, folder=folder), flush=True)
        if flags.dry_run:
            return 0
        pending = [run for run in runs if run.outcome is None]
        try:
            for run, outcome in measure(pending, timeout_s=sweep.timeout_s, end_s=end_s):
                run.end(outcome)
        finally:
            replace_file(folder / "sweep.csv", format_csv(_make_rows(runs), columns=COLUMNS))
    print(f"\n{to_terminal(_make_table(runs))}\n\ntable: {folder / 'sweep.csv'}")
    missing = [run for run in runs if run.outcome is None]
    if missing:
        num_missing = counted(len(missing), "missing run")
        print(f"time is up; the same command makes the {num_missing}:")
        print("\n".join(f"  {for_terminal(run.name)}" for run in missing))
    machines = {run.record["machine"]["slug"] for run in runs if run.record is not None}
    if len(machines) > 1:  # e.g. another GPU, which environment.json does not have
        names = for_terminal(", ".join(sorted(machines)))
        print(f"caution: measured on different machines: {names}", file=sys.stderr)
    statuses = {run.outcome["status"] for run in runs if run.outcome is not None}
    return 0 if statuses and statuses <= {OK, OOM} else 1


def _check_environment(folder: Path) -> None:
    """Refuse to go on with a sweep that was begun under other code, libraries or hardware."""
    import psutil

    here = {
        "commit": git_state()["commit"],
        **package_versions(),
        "num_cpu_cores": psutil.cpu_count(),
        # Rounded: the kernel takes a little more or less of it from one boot to the next.
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
    }
    path = folder / ENVIRONMENT_NAME
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
            "the sweep was begun under other code, libraries or hardware: rows would not compare",
            value="; ".join(changes),
            allowed="the same ones, or another folder",
            flag="--folder",
        )


def _read(path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Read a file of the sweep; a cell.json has to hold a whole outcome."""
    allowed = "the file as it was written; without it the sweep makes the run again"
    with refused_unless_read(path, "a file of the sweep", allowed=allowed, flag="--folder"):
        content = read(path)
        if path.name == STATE_NAME and not {*RESULT} <= content.keys():
            raise ValueError("a key is missing")
    return content


def _make_table(runs: Sequence[SweepRun]) -> Table:
    """The settings that varied and the result, a row for each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.cell.varied))
    rows = []
    for run in runs:
        outcome = run.outcome or {"status": "not run", "reason": None}
        summary = (run.record or {}).get("summary") or {}
        varied = redact_values(run.cell.varied)
        rows.append(
            {
                **{name: make_cell(varied.get(name), unknown="") for name in names},
                "repeat": run.repeat,
                "images/s": format_rate(summary) if summary else "",
                "peak GiB": make_cell(summary.get("peak_memory_gib"), unknown=""),
                "status": ": ".join(filter(None, (outcome["status"], outcome["reason"]))),
            }
        )
    return make_table(rows, left=names)


def _describe(sweep: SweepFile, runs: Sequence[SweepRun], *, folder: Path) -> str:
    """The plan: the state of every cell and the expected duration of the rest."""
    ended = [run for run in runs if run.outcome is not None]
    num_left = len(runs) - len(ended)
    statuses: dict[str, list[str]] = {cell.key: [] for cell in sweep.cells}
    for run in ended:
        statuses[run.cell.key].append(run.outcome["status"])
    lines = [
        f"{counted(len(sweep.cells), 'cell')} x {sweep.repeats} in {folder}: {len(ended)} of "
        f"{counted(len(runs), 'run')} done"
    ]
    for cell in sweep.cells:
        state = ", ".join(statuses[cell.key]) or "to run"
        lines.append(f"  {for_terminal(cell.described)}: {state}")
    if num_left:
        durations_s = [run.outcome["duration_s"] for run in ended if run.outcome["status"] == OK]
        bound = "about" if durations_s else "at most"
        each_s = statistics.median(durations_s) if durations_s else sweep.timeout_s
        left_s = min(num_left * each_s, sweep.budget_s or math.inf)
        lines.append(f"{bound} {left_s / 60:.0f} min")
    return "\n".join(lines)


def _make_rows(runs: Sequence[SweepRun]) -> list[dict[str, Any]]:
    """One row per run that has ended, in the columns of all tables of figures."""
    rows = []
    for run in runs:
        if run.outcome is None:
            continue
        row = {"source": run.folder.name, "kind": "measured", "other_settings": run.name}
        if run.record is not None:
            row = make_row(run.record)
        rows.append(row | {"status": run.outcome["status"], "reason": run.outcome["reason"]})
    return rows
