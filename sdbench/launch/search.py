"""The command `python -m sdbench search`: finds the largest and the fastest micro-batch.

Every probe is a process of its own, and so never meets memory that a failed one still holds.
The fastest is measured once more in a fresh process, with the settings of the command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sdbench.base.cause import KILLED
from sdbench.base.errors import MemoryEstimateError, RunError
from sdbench.launch.child import Outcome, measuring_command, refuse_flag
from sdbench.launch.runs import Run, RunsFlags, measure, new_folder
from sdbench.record.store import FAILED, OK, OOM
from sdbench.settings.computing import NUM_GRAPH_STEPS
from sdbench.settings.kinds import POSITIVE
from sdbench.settings.request import parse
from sdbench.settings.setting import setting

FLAG = "--device_train_microbatch_size"
# What a run without enough memory ends by, if it cannot say `oom` itself.
MEMORY_CAUSES = (KILLED, MemoryEstimateError.__name__)
# Between powers of two only multiples of it are tried.
MULTIPLE = 4
# Flags that make a run longer: for the winner, not for probes.
LONGER = ("--target_precision", "--max_measure_batches", "--max_duration")
# As many steps of warm-up as --cuda_graph needs.
SHORT = ("--warmup_batches", str(NUM_GRAPH_STEPS), "--measure_batches", "3")
SHORT += ("--profile_batches", "0", "--no_measure_peak", "--no_profile_trace")
EPILOG = """\
examples:
  python -m sdbench search -- composer benchmark.py --use_synth_data --use_ema
  python -m sdbench search --max_micro_batch 64 -- composer benchmark.py --use_synth_data
  python -m sdbench search -- python benchmark.py --model_name tiny --use_synth_data

The micro-batch is doubled until one runs out of memory (or the estimate refuses it, on a CPU), then
the gap is halved. The global batch stays what the command makes of it: as given, 2048 by default on
GPUs, and on a CPU one micro-batch per rank, which then grows with the micro-batch.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchFlags(RunsFlags):
    """Flags of search."""

    max_micro_batch: int = setting(POSITIVE, 256, "try none above it")


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
    flags = request.config
    refuse_flag(FLAG, request.rest, why="the micro-batch is what is searched for", flag="COMMAND")
    command = measuring_command(request.rest)
    folder = new_folder(flags.folder, prefix="search")
    print(f"Probing micro-batches up to {flags.max_micro_batch} in {folder}", flush=True)
    outcomes: dict[int, Outcome] = {}
    short = _without_flags(command, LONGER)
    probes = (
        Run(f"micro-batch {size}", [*short, FLAG, str(size), *SHORT], folder / f"probe-{size}")
        for size in propose(outcomes, limit=flags.max_micro_batch)
    )
    for probe, outcome in measure(probes, alone_in=folder, timeout_s=flags.timeout_s):
        has_no_memory = outcome.status == FAILED and outcome.cause in MEMORY_CAUSES
        if outcome.status not in (OK, OOM) and not has_no_memory:
            raise RunError(
                f"{probe.name} ended for another reason than memory: {outcome.status}, "
                f"{outcome.reason}"
            )
        outcomes[int(probe.folder.name.removeprefix("probe-"))] = outcome
    rates = {
        size: outcome.summary["images_per_second"]
        for size, outcome in outcomes.items()
        if outcome.status == OK
    }
    winner = max(rates, key=lambda size: rates[size])
    print(f"Measuring micro-batch {winner} again, with the command's own settings")
    run = Run(f"micro-batch {winner}", [*command, FLAG, str(winner)], folder / "winner")
    ((_, final),) = measure([run], alone_in=folder, timeout_s=flags.timeout_s)
    bound = "" if len(rates) < len(outcomes) else " (the largest that was tried)"
    print(f"\nlargest micro-batch that fits: {max(rates)}{bound}")
    print(f"fastest: {winner}, {final.described}\nruns: {folder}")
    return 0 if final.status == OK else 1


def propose(outcomes: Mapping[int, Outcome], *, limit: int) -> Iterator[int]:
    """The micro-batches to try: doubled until one does not fit, then halving the gap.

    The caller fills in how each has ended before it asks for the next.
    """
    yield 1
    if outcomes[1].status != OK:
        raise RunError(f"not even micro-batch 1 fits: {outcomes[1].reason}")
    limit = min(limit, _device_batch(outcomes[1].record) or limit)
    fits, too_large = 1, None
    while fits < limit:
        if too_large is None:
            size = min(2 * fits, limit)
        else:
            size = (fits + too_large) // 2 // MULTIPLE * MULTIPLE
            if size <= fits:
                return
        yield size
        if outcomes[size].status == OK:
            fits = size
        else:
            too_large = size


def _device_batch(record: dict[str, Any]) -> int | None:
    """A rank's share of the global batch; None on a CPU whose batch grows with the micro-batch."""
    is_given = record["origin"]["batch_size"] in ("flag", "file")
    if not is_given and record["machine"]["device_type"] == "cpu":
        return None
    return record["config"]["batch_size"] // record["ranks"]["world_size"]


def _without_flags(command: Sequence[str], names: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in command:
        name, equals, _ = argument.partition("=")
        if not skip and name not in names:
            kept.append(argument)
        skip = not skip and name in names and not equals
    return kept
