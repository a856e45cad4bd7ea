"""How much does the same measurement differ from run to run?

The run is the unit of replication: only an interval over runs in fresh processes says what the next
run will give.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.escape import for_terminal
from sdbench.base.progress import Progress
from sdbench.base.stop import Terminated, stop_signals_raise
from sdbench.launch.child import Outcome, find_program, new_folder, run_child, tail
from sdbench.record.store import OK, write_json
from sdbench.report.terminal import format_number, format_rate
from sdbench.settings.config import SECONDS, parse_value
from sdbench.statistics.intervals import MIN_RUNS, between_runs_interval

EPILOG = """\
examples:
  python -m sdbench repeat 3 -- composer benchmark.py --model_name tiny --use_synth_data
  python -m sdbench repeat 5 -- composer benchmark.py --use_synth_data --use_ema
  python -m sdbench compare runs/repeat_A runs/repeat_B      (two such folders)

Three runs or more give an interval between runs. The exit code is 1 if a run failed; the others are
kept.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command several times.

    Args:
        argv: How often, and behind ``--`` the command.

    Returns:
        The exit code.
    """
    arguments, command = _parse(argv)
    folder = new_folder(arguments.folder, prefix="repeat")
    outcomes: list[Outcome] = []
    is_interrupted = False
    try:
        with stop_signals_raise(), Progress(arguments.times, unit="run") as progress:
            for number in range(1, arguments.times + 1):
                outcome = run_child(
                    command, folder=folder / str(number), timeout_s=arguments.timeout_s
                )
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
        return 130
    return 0 if all(outcome.status == OK for outcome in outcomes) else 1


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the runs came to.

    Returns:
        Each run with its rate, and over those that ended well their median, spread and, from three
        runs, interval between runs.
    """
    summaries = [outcome.record["summary"] for outcome in outcomes if outcome.status == OK]
    rates = [summary["images_per_second"] for summary in summaries]
    interval = between_runs_interval(rates)
    return {
        "runs": [
            {
                "run": None if outcome.run_folder is None else outcome.run_folder.name,
                "status": outcome.status,
                "reason": outcome.reason,
                "images_per_second": outcome.record["summary"]["images_per_second"]
                if outcome.status == OK
                else None,
                "flags": outcome.record["summary"].get("flags", []) if outcome.status == OK else [],
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
    """What a person reads when all runs have ended."""
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


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m sdbench repeat",
        usage="%(prog)s [-h] [--folder FOLDER] [--timeout_s S] N -- COMMAND ...",
        description="Run one measuring command N times, each in fresh processes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("times", type=int, metavar="N", help="how many runs")
    parser.add_argument("--folder", type=Path, help="where they go (default: runs/repeat_<time>)")
    parser.add_argument("--timeout_s", metavar="S", help="end a run after so many seconds")
    own, command = split_command(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(own)
    if arguments.times < 1:
        raise ConfigError(
            "there is nothing to run", value=arguments.times, allowed="1 or more", flag="N"
        )
    arguments.timeout_s = parse_timeout(arguments.timeout_s)
    return arguments, find_program(command)


def parse_timeout(text: str | None) -> float | None:
    """The value of --timeout_s, or None for no bound."""
    return None if text is None else parse_value("timeout_s", text, kind=SECONDS)


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first ``--`` and what behind it."""
    position = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:position]), list(argv[position + 1 :])


def _describe(outcome: Outcome) -> str:
    if outcome.status != OK:
        return f"{outcome.status}, {for_terminal(outcome.reason)}"
    return f"{format_rate(outcome.record['summary'])} images/s in {outcome.duration_s:.0f} s"
