"""The command `python -m sdbench sweep`: runs many configurations, each in a process of its own.

A run that is out of memory, fails or takes too long is a row like any other. A sweep that was
interrupted goes on where it was.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import EXIT_INTERRUPTED
from sdbench.base.escape import for_terminal
from sdbench.base.files import replace_file
from sdbench.base.secrets import redact_values
from sdbench.base.stop import STOPS
from sdbench.launch.child import only_one_in
from sdbench.launch.runs import measure
from sdbench.launch.sweep_file import SweepFile, read_sweep_file
from sdbench.launch.sweep_state import SweepRun, check_environment, list_runs
from sdbench.record.row import COLUMNS, format_csv, make_row
from sdbench.record.store import FAILED, INVALID, OK, OOM, TIMEOUT
from sdbench.report.tables import Table, make_cell, make_table, to_terminal
from sdbench.report.terminal import format_rate
from sdbench.settings.kinds import PATH, SWITCH, list_of, one_of
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting

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
    runs = list_runs(sweep, folder=folder)
    if flags.dry_run:
        print(_describe(sweep, runs, _pending(runs, flags.retry), folder=folder))
        return 0
    with only_one_in(folder, what="sweep"):
        check_environment(folder, allow_other=flags.allow_mixed)
        pending = _pending(runs, flags.retry)
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
    print(f"\n{to_terminal(make_sweep_table(runs))}\n\ntable: {folder / 'sweep.csv'}")
    _warn_of_machines(runs)
    _say_what_is_missing(runs)
    ended = [outcome for run in runs if (outcome := run.outcome()) is not None]
    return 0 if ended and all(outcome["status"] in (OK, OOM) for outcome in ended) else 1


def make_sweep_table(runs: Sequence[SweepRun]) -> Table:
    """The settings that varied and the result, a row for each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.cell.varied))
    rows = []
    for run in runs:
        outcome, summary = run.outcome(), (run.record() or {}).get("summary")
        varied = redact_values(run.cell.varied)
        status = "not run" if outcome is None else outcome["status"]
        if outcome is not None and outcome["reason"]:
            status += f": {outcome['reason']}"
        peak_gib = summary["peak_memory_gib"] if summary else None
        rows.append(
            {
                **{name: make_cell(varied.get(name), unknown="") for name in names},
                "repeat": run.repeat,
                "images/s": format_rate(summary) if summary else "",
                "peak GiB": make_cell(peak_gib, unknown=""),
                "status": status,
            }
        )
    return make_table(rows, left=names)


def _pending(runs: Sequence[SweepRun], retry: tuple[str, ...]) -> list[SweepRun]:
    """The runs that have not ended, or have ended in a way that is to be retried."""
    outcomes = [run.outcome() for run in runs]
    return [
        run
        for run, outcome in zip(runs, outcomes, strict=True)
        if outcome is None or outcome["status"] in retry
    ]


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
        outcome = run.outcome()
        if run.folder not in to_run:
            statuses[run.cell.key].append(outcome["status"])
        if outcome is not None and outcome["status"] == OK:
            durations_s.append(outcome["duration_s"])
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
        outcome, record = run.outcome(), run.record()
        if outcome is not None:
            row = make_row(record) if record is not None else _row_without_record(run)
            rows.append(row | {"status": outcome["status"], "reason": outcome["reason"]})
    return rows


def _row_without_record(run: SweepRun) -> dict[str, Any]:
    settings = {COLUMN_OF_SETTING.get(name, name): v for name, v in run.cell.settings.items()}
    return {**settings, "source": run.folder.name, "kind": "measured"}


def _say_what_is_missing(runs: Sequence[SweepRun]) -> None:
    missing = [run for run in runs if run.outcome() is None]
    if missing:
        print(f"time is up, and {len(missing)} runs are missing; the same command makes them:")
        for run in missing:
            print(f"  {for_terminal(run.name)}")


def _warn_of_machines(runs: Sequence[SweepRun]) -> None:
    records = [run.record() for run in runs]
    machines = sorted({record["machine"]["slug"] for record in records if record is not None})
    if len(machines) > 1:
        print(f"caution: measured on different machines: {', '.join(machines)}", file=sys.stderr)
