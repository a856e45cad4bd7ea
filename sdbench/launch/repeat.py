"""The command `python -m sdbench repeat`: measures a command several times in fresh processes.

The run is the unit of replication: only an interval over runs predicts the next run. Two commands
take turns, so that a machine that changes within the hour changes for both.
"""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from sdbench.analysis import compare
from sdbench.base.errors import EXIT_BAD_INPUT, ConfigError
from sdbench.base.units import counted
from sdbench.launch.child import Outcome, measuring_command, split_words
from sdbench.launch.run_loop import Run, make_runs
from sdbench.record.store import OK
from sdbench.report.terminal import format_number
from sdbench.settings.kinds import PATH, REPEATS, TEXT
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting
from sdbench.statistics.intervals import MIN_RUNS, between_runs_interval

CANDIDATE, BASELINE = "candidate", "baseline"
EPILOG = """\
examples:
  python -m sdbench repeat 3 -- composer benchmark.py --model_name tiny --use_synth_data
  python -m sdbench repeat 5 --against 'composer benchmark.py --use_synth_data' \\
      -- composer benchmark.py --use_synth_data --use_ema
  python -m sdbench repeat 5 --against 'composer ../before/benchmark.py --use_synth_data' \\
      -- composer benchmark.py --use_synth_data
  python -m sdbench compare runs/repeat_A/baseline runs/repeat_A/candidate    (once more)

Three runs or more give an interval between runs. With --against the two commands take turns, and
are compared: without turns, five runs now and five runs of the same command an hour later differ by
more than chance. With --folder the same command resumes: it makes the runs that are missing, or
whose folder is gone. The exit code is 1 if a run failed (the others are kept), and 2 if the command
is refused.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatFlags:
    """Flags of repeat."""

    times: int = setting(
        REPEATS, REQUIRED, "how many runs of each command", is_positional=True, spelling="N"
    )
    against: str | None = setting(
        TEXT,
        None,
        "a second command, in one pair of quotes: the baseline that COMMAND takes turns with and "
        "is compared with",
    )
    folder: Path | None = setting(PATH, None, "folder for the runs (default: runs/repeat_<time>)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command several times, or two in turn; returns the exit code."""
    request = parse(
        RepeatFlags,
        argv,
        prog="python -m sdbench repeat",
        description="Run a measuring command N times, each in fresh processes, or two of them in "
        "turn.",
        epilog=EPILOG,
        rest="COMMAND ...",
    )
    flags = request.config
    candidate, baseline = measuring_command(request.rest), None
    commands = {"": candidate}  # its runs are in the folder itself
    if flags.against is not None:
        baseline = measuring_command(split_words(flags.against, flag="--against"))
        commands = {BASELINE: baseline, CANDIDATE: candidate}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    folder = flags.folder or Path("runs") / f"repeat_{now}"
    runs = [
        Run(name, command, {"side": name} if name else {}, number, folder / name / str(number))
        for number in range(1, flags.times + 1)
        for name, command in commands.items()
    ]
    try:
        exit_code = make_runs(
            runs,
            folder=folder,
            begun_by={"N": flags.times, "COMMAND": candidate, "--against": baseline},
            accepted={OK},
            check=_check,
        )
    finally:  # of a stopped command, too
        for name in commands:
            ended = [run.outcome for run in runs if run.name == name and run.outcome is not None]
            if ended:
                print(f"\n{describe(ended)}\n\nruns: {folder / name}")
    if flags.against is not None:
        sides = [str(folder / BASELINE), str(folder / CANDIDATE)]
        print(f"\npython -m sdbench compare {shlex.join(sides)}\n", flush=True)
        try:
            compare.main(sides)
        except ConfigError as error:
            print(f"not compared: {error}", file=sys.stderr)
    return exit_code


def _check(run: Run, outcome: Outcome) -> None:
    """Refuse a command that its program refuses: all other runs would be refused as well."""
    # A launcher may change the exit code.
    if outcome.exit_code == EXIT_BAD_INPUT or outcome.cause == ConfigError.__name__:
        raise ConfigError(
            f"the command is refused ({outcome.reason})",
            value=shlex.join(run.command),
            allowed="a command that runs",
            flag="--against" if run.name == BASELINE else "COMMAND",
        )


def describe(outcomes: Sequence[Outcome]) -> str:
    """The rates of all runs that have ended well, and an interval between runs."""
    summaries = [one.summary for one in outcomes if one.summary]
    if not summaries:
        return "no run ended well"
    rates = [summary["images_per_second"] for summary in summaries]
    median, low, high = map(format_number, (statistics.median(rates), min(rates), max(rates)))
    lines = [f"images/s of {counted(len(rates), 'run')}: median {median}, from {low} to {high}"]
    interval = between_runs_interval(rates)
    if interval is None:
        lines.append(f"no interval between runs: it takes {MIN_RUNS} that ended well")
    else:
        variation_percent = 100 * statistics.stdev(rates) / statistics.mean(rates)
        lines.append(
            f"95 % interval between runs: {format_number(interval.low)} to "
            f"{format_number(interval.high)} (run to run the rate varies by "
            f"{variation_percent:.1f} %)"
        )
    flags = sorted({flag for summary in summaries for flag in summary["flags"] or ()})
    if flags:
        lines.append(f"caution: {', '.join(flags)} in at least one run")
    return "\n".join(lines)
