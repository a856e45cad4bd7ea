"""The command `python -m sdbench search`: finds the largest and the fastest micro-batch.

Every probe is a fresh process, so it never meets memory that a failed one still holds. The fastest
is measured once more in a fresh process, with the settings of the command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sdbench.base.cause import KILLED
from sdbench.base.errors import MemoryEstimateError, RunError
from sdbench.launch.child import Outcome, measuring_command, refuse_flag
from sdbench.launch.runs import Run, measure, new_folder
from sdbench.record.store import OK, OOM
from sdbench.settings.computing import NUM_GRAPH_STEPS
from sdbench.settings.kinds import PATH
from sdbench.settings.request import parse
from sdbench.settings.setting import setting

FLAG = "--device_train_microbatch_size"
# Causes by which a run without enough memory ends, if it cannot say `oom` itself.
MEMORY_CAUSES = (KILLED, MemoryEstimateError.__name__)
MAX_MICRO_BATCH = 256
# Between powers of two, only multiples of this are tried.
MULTIPLE = 4
# Flags that make a run longer: for the winner, not for probes.
LONGER = ("--target_precision", "--max_measure_batches", "--max_duration")
# --cuda_graph needs so many steps of warm-up.
SHORT = ("--warmup_batches", str(NUM_GRAPH_STEPS), "--measure_batches", "3")
SHORT += ("--profile_batches", "0", "--no_measure_peak", "--no_profile_trace")
EPILOG = """\
examples:
  python -m sdbench search -- composer benchmark.py --use_synth_data --use_ema
  python -m sdbench search -- python benchmark.py --model_name tiny --use_synth_data

The micro-batch is doubled until one runs out of memory (or the estimate refuses it, on a CPU), then
the gap is halved. The global batch stays what the command makes of it: as given, 2048 by default on
GPUs, and on a CPU one micro-batch per rank, which then grows with the micro-batch.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """Flags of search."""

    folder: Path | None = setting(PATH, None, "folder for the runs (default: runs/search_<time>)")


def main(argv: Sequence[str] | None = None) -> int:
    """Search with short runs, and measure the fastest again; returns the exit code."""
    request = parse(
        SearchFlags,
        argv,
        prog="python -m sdbench search",
        description="Find the largest and the fastest micro-batch of a command of benchmark.py.",
        epilog=EPILOG,
        rest="COMMAND ...",
    )
    refuse_flag(FLAG, request.rest, why="the micro-batch is what is searched for", flag="COMMAND")
    command = measuring_command(request.rest)
    folder = new_folder(request.config.folder, prefix="search")
    print(f"Probing micro-batches up to {MAX_MICRO_BATCH} in {folder}", flush=True)
    short = _without_flags(command, LONGER)
    ended_well: dict[int, Outcome] = {}

    def fits(size: int) -> bool:
        """Try a micro-batch in a short run."""
        outcome = _measure(
            size, [*short, FLAG, str(size), *_shorten(short)], folder / f"probe-{size}"
        )
        if outcome.status == OK:
            ended_well[size] = outcome
        elif outcome.status != OOM and outcome.cause not in MEMORY_CAUSES:
            raise RunError(
                f"micro-batch {size} ended for another reason than memory: {outcome.status}, "
                f"{outcome.reason}"
            )
        elif size == 1:
            raise RunError(f"not even micro-batch 1 fits: {outcome.reason}")
        return outcome.status == OK

    fits(1)
    record, limit = ended_well[1].record, MAX_MICRO_BATCH
    is_given = record["origin"]["batch_size"] in ("flag", "file")
    if is_given or record["machine"]["device_type"] != "cpu":  # else it grows with the micro-batch
        limit = min(limit, record["config"]["batch_size"] // record["ranks"]["world_size"])
    largest, too_large = 1, None
    while largest < limit:
        if too_large is None:
            size = min(2 * largest, limit)
        else:
            size = (largest + too_large) // 2 // MULTIPLE * MULTIPLE
        if size <= largest:
            break
        if fits(size):
            largest = size
        else:
            too_large = size
    winner = max(ended_well, key=lambda size: ended_well[size].summary["images_per_second"])
    print(f"Measuring micro-batch {winner} again, with the command's own settings")
    final = _measure(winner, [*command, FLAG, str(winner)], folder / "winner")
    bound = " (the largest that was tried)" if too_large is None else ""
    print(f"\nlargest micro-batch that fits: {largest}{bound}")
    print(f"fastest: {winner}, {final.described}\nruns: {folder}")
    return 0 if final.status == OK else 1


def _shorten(words: Sequence[str]) -> tuple[str, ...]:
    """Flags of a short run; with buckets the plan sees to the first step of each shape."""
    has_buckets = any(word.partition("=")[0] == "--buckets" for word in words)
    return SHORT[4:] if has_buckets else SHORT


def _measure(size: int, command: Sequence[str], folder: Path) -> Outcome:
    ((_, outcome),) = measure([Run(f"micro-batch {size}", command, folder)])
    return outcome


def _without_flags(command: Sequence[str], names: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in command:
        name, equals, _ = argument.partition("=")
        if not skip and name not in names:
            kept.append(argument)
        skip = not skip and name in names and not equals
    return kept
