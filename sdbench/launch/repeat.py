"""The command `python -m sdbench repeat`: one measurement several times, each in fresh processes.

The run is the unit of replication: only an interval over runs predicts the next run. Two commands
take turns, since what the machine is like an hour later is no difference between them.
"""

from __future__ import annotations

import dataclasses
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import EXIT_INTERRUPTED, ConfigError
from sdbench.base.escape import for_terminal
from sdbench.base.files import write_json
from sdbench.base.progress import Progress
from sdbench.base.stop import STOPS
from sdbench.launch.child import (
    ChildFlags,
    Outcome,
    in_rounds,
    measuring_command,
    new_folder,
    run_child,
    tail,
)
from sdbench.record.store import OK
from sdbench.report import compare
from sdbench.report.terminal import format_number, format_rate
from sdbench.settings.kinds import REPEATS, TEXT
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
are compared: the same command five times now and five times an hour later differs by more than
chance. The exit code is 1 if a run failed; the others are kept.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatFlags(ChildFlags):
    """Flags of repeat."""

    times: int = setting(
        REPEATS, REQUIRED, "how many runs of each command", is_positional=True, spelling="N"
    )
    against: str | None = setting(
        TEXT,
        None,
        "a second command, in one pair of quotes: the baseline, with which COMMAND takes turns and "
        "is compared",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command several times.

    Args:
        argv: How often, and behind ``--`` the command.

    Returns:
        The exit code.
    """
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
    commands = {CANDIDATE: measuring_command(request.rest)}
    if flags.against is not None:
        commands = {BASELINE: measuring_command(_split(flags.against)), **commands}
    folder = new_folder(flags.folder, prefix="repeat")
    # One command alone has no side: its runs are in the folder itself.
    folders = {side: folder / side if flags.against else folder for side in commands}
    outcomes: dict[str, list[Outcome]] = {side: [] for side in commands}
    is_interrupted = False
    try:
        with Progress(flags.times * len(commands), unit="run") as progress:
            for number, side in in_rounds(commands, times=flags.times):
                outcome = run_child(
                    commands[side],
                    folder=folders[side] / str(number),
                    timeout_s=flags.timeout_s,
                    alone_in=folder,
                )
                outcomes[side].append(outcome)
                progress.report(f"{side}: " * bool(flags.against) + _describe(outcome))
                if outcome.status != OK:
                    progress.say(tail(folders[side] / str(number)))
    except STOPS:
        is_interrupted = True
        print("interrupted: what has ended is kept", file=sys.stderr)
    for side, of_side in outcomes.items():
        if of_side:
            summary = summarize(of_side)
            write_json(folders[side] / "repeat.json", summary)
            print(f"\n{format_summary(summary)}\n\nruns: {folders[side]}")
    if is_interrupted:
        return EXIT_INTERRUPTED
    if flags.against is not None:
        _compare(folders)
    return 0 if all(one.status == OK for of_side in outcomes.values() for one in of_side) else 1


def _split(command: str) -> list[str]:
    """The words of a command in one text.

    Raises:
        ConfigError: A quote of it is not closed.
    """
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"this is no command ({error})",
            value=command,
            allowed="a command as in a shell, in one pair of quotes",
            flag="--against",
        ) from None


def _compare(folders: Mapping[str, Path]) -> None:
    """Print the comparison of both sides, or why there is none."""
    sides = [str(folders[BASELINE]), str(folders[CANDIDATE])]
    print(f"\npython -m sdbench compare {shlex.join(sides)}\n", flush=True)
    try:
        compare.main(sides)
    except ConfigError as error:
        print(f"not compared: {error}", file=sys.stderr)


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The content of repeat.json.

    Returns:
        Each run with its rate; over those that ended well their median and spread and, from three
        runs, the interval between runs.
    """
    rates = [one.summary["images_per_second"] for one in outcomes if one.summary]
    interval = between_runs_interval(rates)
    return {
        "runs": [
            {
                "run": None if outcome.run_folder is None else outcome.run_folder.name,
                "status": outcome.status,
                "reason": outcome.reason,
                "images_per_second": outcome.summary.get("images_per_second"),
                "flags": outcome.summary.get("flags", []),
                "duration_s": outcome.duration_s,
            }
            for outcome in outcomes
        ],
        "num_ok": len(rates),
        "images_per_second_median": statistics.median(rates) if rates else None,
        "images_per_second_min": min(rates, default=None),
        "images_per_second_max": max(rates, default=None),
        "variation_percent": 100 * statistics.stdev(rates) / statistics.mean(rates)
        if rates[1:]
        else None,
        "images_per_second_interval": None
        if interval is None
        else {"low": interval.low, "high": interval.high, "level": interval.level},
    }


def format_summary(summary: dict[str, Any]) -> str:
    """The printed result of all runs."""
    if not summary["num_ok"]:
        return "no run ended well"
    lines = [
        f"images/s of {summary['num_ok']} runs: median "
        f"{format_number(summary['images_per_second_median'])}, from "
        f"{format_number(summary['images_per_second_min'])} to "
        f"{format_number(summary['images_per_second_max'])}"
    ]
    interval = summary["images_per_second_interval"]
    if interval is None:
        lines.append(f"no interval between runs: it takes {MIN_RUNS} that ended well")
    else:
        lines.append(
            f"95 % interval between runs: {format_number(interval['low'])} to "
            f"{format_number(interval['high'])} (run to run the rate varies by "
            f"{summary['variation_percent']:.1f} %)"
        )
    flags = sorted({flag for run in summary["runs"] for flag in run["flags"]})
    if flags:
        lines.append(f"caution: {', '.join(flags)} in at least one run")
    return "\n".join(lines)


def _describe(outcome: Outcome) -> str:
    if outcome.status != OK:
        return f"{outcome.status}, {for_terminal(outcome.reason)}"
    return f"{format_rate(outcome.record['summary'])} images/s in {outcome.duration_s:.0f} s"
