"""The command `python -m sdbench sweep`: runs many configurations, each in a process of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sdbench.launch.run_loop import Run, make_runs
from sdbench.launch.sweep_file import read_sweep_file
from sdbench.record.store import OK, OOM
from sdbench.settings.kinds import PATH, SWITCH
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting

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
    # In rounds: a slow change of the machine affects all cells alike.
    runs = [
        Run(cell.described, cell.command, cell.varied, number, folder / f"{cell.key}-{number}")
        for number in range(1, sweep.repeats + 1)
        for cell in sweep.cells
    ]
    return make_runs(
        runs,
        folder=folder,
        begun_by={},
        accepted={OK, OOM},
        timeout_s=sweep.timeout_s,
        budget_s=sweep.budget_s,
        is_dry_run=flags.dry_run,
    )
