"""The command `python -m sdbench repeat`: one measurement several times, each in fresh processes.

The run is the unit of replication: only an interval over runs predicts the next run.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from sdbench.base.errors import EXIT_INTERRUPTED
from sdbench.base.escape import for_terminal
from sdbench.base.files import write_json
from sdbench.base.progress import Progress
from sdbench.base.stop import Terminated
from sdbench.launch.child import (
    ChildFlags,
    Outcome,
    measuring_command,
    new_folder,
    run_child,
    tail,
)
from sdbench.record.store import OK
from sdbench.report.terminal import format_number, format_rate
from sdbench.settings.kinds import REPEATS
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting
from sdbench.statistics.intervals import MIN_RUNS, between_runs_interval

EPILOG = """\
examples:
  python -m sdbench repeat 3 -- composer benchmark.py --model_name tiny --use_synth_data
  python -m sdbench repeat 5 -- composer benchmark.py --use_synth_data --use_ema
  python -m sdbench compare runs/repeat_A runs/repeat_B      (two such folders)

Three runs or more give an interval between runs. The exit code is 1 if a run failed; the others are
kept.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatFlags(ChildFlags):
    """Flags of repeat."""

    times: int = setting(REPEATS, REQUIRED, "how many runs", is_positional=True, spelling="N")


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
        description="Run one measuring command N times, each in fresh processes.",
        epilog=EPILOG,
        rest="COMMAND ...",
    )
    flags, command = request.config, measuring_command(request.rest)
    folder = new_folder(flags.folder, prefix="repeat")
    outcomes: list[Outcome] = []
    is_interrupted = False
    try:
        with Progress(flags.times, unit="run") as progress:
            for number in range(1, flags.times + 1):
                outcome = run_child(command, folder=folder / str(number), timeout_s=flags.timeout_s)
                outcomes.append(outcome)
                progress.report(_describe(outcome))
                if outcome.status != OK:
                    progress.say(tail(folder / str(number)))
    except (KeyboardInterrupt, Terminated):
        is_interrupted = True
        print("interrupted: what has ended is kept", file=sys.stderr)
    summary = summarize(outcomes)
    if outcomes:
        write_json(folder / "repeat.json", summary)
        print(f"\n{format_summary(summary)}\n\nruns: {folder}")
    if is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if all(outcome.status == OK for outcome in outcomes) else 1


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
