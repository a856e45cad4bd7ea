"""The command `python -m sdbench sweep`: runs many configurations, each in a process of its own.

A run that is out of memory, fails or takes too long is a row like any other. When a run has ended,
its outcome is written to cell.json in one piece. A run without this file is made by the next start.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import EXIT_INTERRUPTED, ConfigError
from sdbench.base.escape import for_terminal
from sdbench.base.files import replace_file, write_json
from sdbench.base.outside import read_json_object
from sdbench.base.secrets import redact_values
from sdbench.base.stop import STOPS
from sdbench.launch.child import Outcome, only_one_in
from sdbench.launch.runs import Run, in_rounds, measure
from sdbench.launch.sweep_file import Cell, SweepFile, read_sweep_file
from sdbench.record.provenance import git_state, package_versions
from sdbench.record.row import COLUMNS, format_csv, make_row
from sdbench.record.store import FAILED, INVALID, OK, OOM, RECORD_NAME, TIMEOUT, load_record
from sdbench.report.tables import Table, make_cell, make_table, to_terminal
from sdbench.report.terminal import format_rate
from sdbench.settings.kinds import PATH, SWITCH, list_of, one_of
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting

STATE_NAME, ENVIRONMENT_NAME = "cell.json", "environment.json"
# Columns in a table of figures of the settings that have another name there.
COLUMN_OF_SETTING = {
    "use_ema": "ema",
    "device_train_microbatch_size": "micro_batch",
    "batch_size": "global_batch",
    "model_name": "model",
}
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
  python -m sdbench sweep sweeps/seeds.yaml --retry oom,timeout

Started again, the same command goes on where it was. Running out of memory is a finding, and so is
what the budget leaves no time for; the exit code is 1 if a run failed otherwise, took too long or
was invalid, and 130 if the sweep was stopped.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Flags of sweep."""

    file: Path = setting(PATH, REQUIRED, "YAML file of the sweep", is_positional=True)
    dry_run: bool = setting(SWITCH, False, "show the plan and stop")
    folder: Path | None = setting(
        PATH, None, "where the runs go (default: runs/sweep_<name of FILE>)"
    )
    retry: tuple[str, ...] = setting(
        list_of(one_of(FAILED, OOM, TIMEOUT, INVALID)),
        (),
        "make runs that ended so again",
    )
    allow_mixed: bool = setting(
        SWITCH,
        False,
        "go on with a sweep that was begun under another commit or other libraries",
    )


@dataclasses.dataclass
class SweepRun(Run):
    """The n-th measurement of a cell of a sweep.

    Attributes:
        cell: The cell.
        repeat: Its number, from 1.
        outcome: The content of cell.json; None if the run has not ended, or if its record is gone.
    """

    cell: Cell
    repeat: int
    outcome: dict[str, Any] | None = None

    def read(self) -> None:
        """Read how the run has ended, if it has."""
        path = self.folder / STATE_NAME
        if not path.is_file():
            return
        outcome = _read_file(path, without="the run is made again")
        if not {"status", "reason", "duration_s", "run"} <= outcome.keys():
            raise _broken(path, "a key is missing", without="the run is made again")
        run = outcome["run"]
        if run is None or (self.folder / run / RECORD_NAME).is_file():
            self.outcome = outcome

    def record(self) -> dict[str, Any] | None:
        """The record; None without one, or if it could not be read when the run ended."""
        if self.outcome is None or self.outcome["run"] is None:
            return None
        path = self.folder / self.outcome["run"]
        try:
            return load_record(path)
        except ValueError as error:
            if self.outcome["status"] != OK:
                return None  # cell.json gives the reason
            raise _broken(path, error, without="the run is made again") from None

    def end(self, outcome: Outcome) -> None:
        """Write the outcome."""
        self.outcome = {
            "settings": dict(self.cell.settings),
            "command": list(self.command),
            "status": outcome.status,
            "reason": outcome.reason,
            "exit_code": outcome.exit_code,
            "duration_s": outcome.duration_s,
            "run": outcome.run,
        }
        write_json(self.folder / STATE_NAME, self.outcome)

    def clear(self) -> None:
        """Remove the files of an unfinished or failed attempt."""
        (self.folder / STATE_NAME).unlink(missing_ok=True)  # first: a half-cleared run is no run
        self.outcome = None
        if self.folder.is_dir():
            shutil.rmtree(self.folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Begin a sweep or go on with it; returns the exit code."""
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
    if flags.dry_run:
        print(_describe(sweep, runs, _find_pending(runs, flags.retry), folder=folder))
        return 0
    with only_one_in(folder, what="sweep"):
        _check_environment(folder, allow_other=flags.allow_mixed)
        pending = _find_pending(runs, flags.retry)
        print(_describe(sweep, runs, pending, folder=folder), flush=True)
        made = measure(
            pending,
            alone_in=folder,
            timeout_s=sweep.timeout_s,
            end_s=end_s,
            num_runs=len(pending),
        )
        try:
            for run, outcome in made:
                run.end(outcome)
        except STOPS:
            print("interrupted: the same command goes on here", file=sys.stderr)
            return EXIT_INTERRUPTED
        finally:
            replace_file(folder / "sweep.csv", format_csv(_make_rows(runs), columns=COLUMNS))
    print(f"\n{to_terminal(_make_table(runs))}\n\ntable: {folder / 'sweep.csv'}")
    missing = [run for run in runs if run.outcome is None]
    if missing:
        print(f"time is up, and {len(missing)} runs are missing; the same command makes them:")
        print("\n".join(f"  {for_terminal(run.name)}" for run in missing))
    machines = {record["machine"]["slug"] for run in runs if (record := run.record()) is not None}
    if len(machines) > 1:  # another GPU, too, which the environment does not tell
        names = for_terminal(", ".join(sorted(machines)))
        print(f"caution: measured on different machines: {names}", file=sys.stderr)
    statuses = {run.outcome["status"] for run in runs if run.outcome is not None}
    return 0 if statuses and statuses <= {OK, OOM} else 1


def _find_pending(runs: Sequence[SweepRun], retry: tuple[str, ...]) -> list[SweepRun]:
    """The runs that have not ended, or have ended in a way that is to be retried."""
    for run in runs:
        run.read()
    return [run for run in runs if run.outcome is None or run.outcome["status"] in retry]


def _check_environment(folder: Path, *, allow_other: bool) -> None:
    """Refuse to go on with a sweep that was begun under other code, libraries or hardware."""
    import psutil

    here = {
        "commit": git_state()["commit"],
        **package_versions(),
        "num_cpu_cores": psutil.cpu_count(),
        # Rounded: a kernel takes a little more or less of it from one boot to the next.
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
    }
    path = folder / ENVIRONMENT_NAME
    if not path.is_file():
        write_json(path, here)
        return
    began = _read_file(path, without="the sweep goes on unchecked")
    changes = [
        f"{name} {began.get(name)} -> {here.get(name)}"
        for name in sorted({*began, *here})
        if began.get(name) != here.get(name)
    ]
    if changes and not allow_other:
        raise ConfigError(
            "the sweep was begun under other code, libraries or hardware: rows would not compare",
            value="; ".join(changes),
            allowed="the same ones, another folder, or --allow_mixed",
            flag="--folder or --allow_mixed",
        )


def _read_file(path: Path, *, without: str) -> dict[str, Any]:
    """Read a file that the sweep has written; `without` says what happens if it is removed."""
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise _broken(path, error, without=without) from None


def _broken(path: Path, error: object, *, without: str) -> ConfigError:
    return ConfigError(
        f"a file of the sweep cannot be read ({error})",
        value=str(path),
        allowed=f"the file as it was written; without it {without}",
        flag="--folder",
    )


def _make_table(runs: Sequence[SweepRun]) -> Table:
    """The settings that varied and the result, a row for each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.cell.varied))
    rows = []
    for run in runs:
        outcome = run.outcome or {"status": "not run", "reason": None}
        summary = (run.record() or {}).get("summary") or {}
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


def _describe(
    sweep: SweepFile, runs: Sequence[SweepRun], pending: Sequence[SweepRun], *, folder: Path
) -> str:
    """The plan: the state of every cell and the expected duration of the rest."""
    lines = [
        f"{len(sweep.cells)} cells x {sweep.repeats} in {folder}: {len(runs) - len(pending)} of "
        f"{len(runs)} runs are done"
    ]
    to_run = {run.folder for run in pending}
    statuses: dict[str, list[str]] = {cell.key: [] for cell in sweep.cells}
    durations_s = []
    for run in runs:
        if run.outcome is not None and run.folder not in to_run:
            statuses[run.cell.key].append(run.outcome["status"])
        if run.outcome is not None and run.outcome["status"] == OK:
            durations_s.append(run.outcome["duration_s"])
    for cell in sweep.cells:
        state = ", ".join(statuses[cell.key]) or "to run"
        lines.append(f"  {for_terminal(cell.described)}: {state}")
    if pending and durations_s:
        left_s = len(pending) * statistics.median(durations_s)
        lines.append(f"about {left_s / 60:.0f} min, from the runs that have ended")
    elif pending:
        bound_s = min(len(pending) * sweep.timeout_s, sweep.budget_s or math.inf)
        lines.append(
            "how long it takes is not known before the first run has ended; at most "
            f"{bound_s / 60:.0f} min by the time-out{' and the budget' * bool(sweep.budget_s)}"
        )
    return "\n".join(lines)


def _make_rows(runs: Sequence[SweepRun]) -> list[dict[str, Any]]:
    """One row per run that has ended, in the columns of all tables of figures."""
    rows = []
    for run in runs:
        if run.outcome is None:
            continue
        settings = {COLUMN_OF_SETTING.get(name, name): v for name, v in run.cell.settings.items()}
        record = run.record()
        if record is None:
            row = {**settings, "source": run.folder.name, "kind": "measured"}
        else:
            row = make_row(record)
        rows.append(row | {"status": run.outcome["status"], "reason": run.outcome["reason"]})
    return rows
