"""Finds the largest micro-batch that fits and the fastest one.

Every probe is a process of its own, so that none finds memory that a failed one has left behind.
The fastest is measured once more in a fresh process, with the settings of the command.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.cause import KILLED
from sdbench.base.errors import EXIT_INTERRUPTED, ConfigError, MemoryEstimateError, RunError
from sdbench.base.escape import for_terminal
from sdbench.base.files import write_json
from sdbench.base.stop import STOPS
from sdbench.launch.child import ChildFlags, Outcome, measuring_command, new_folder, run_child
from sdbench.record.store import FAILED, OK, OOM
from sdbench.report.terminal import format_number
from sdbench.settings.compiling import NUM_GRAPH_STEPS
from sdbench.settings.kinds import POSITIVE
from sdbench.settings.request import parse
from sdbench.settings.setting import setting

FLAG = "--device_train_microbatch_size"
# What a run without enough memory ends by, if it cannot say `oom` itself.
MEMORY_CAUSES = (KILLED, MemoryEstimateError.__name__)
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
class SearchFlags(ChildFlags):
    """Flags of search."""

    max_micro_batch: int = setting(POSITIVE, 256, "try none above it")
    multiple_of: int = setting(POSITIVE, 4, "between powers of two try multiples of it only")


@dataclasses.dataclass(frozen=True)
class Probe:
    """A micro-batch and the outcome of its run.

    Attributes:
        micro_batch: Images per forward and backward pass on one rank.
        outcome: How its run ended.
    """

    micro_batch: int
    outcome: Outcome

    @property
    def fits(self) -> bool:
        """Whether it ran to its end."""
        return self.outcome.status == OK

    @property
    def is_too_large(self) -> bool:
        """Whether it failed, or was refused, for want of memory."""
        outcome = self.outcome
        return outcome.status == OOM or (
            outcome.status == FAILED and outcome.cause in MEMORY_CAUSES
        )


class Search:
    """Probes micro-batches, each once."""

    def __init__(self, command: Sequence[str], *, folder: Path, timeout_s: float | None) -> None:
        """Prepare a search.

        Args:
            command: Program and arguments, without a micro-batch.
            folder: Gets a folder for each run.
            timeout_s: Bound on each run.
        """
        self.probes: dict[int, Probe] = {}
        self._command = command
        self._folder = folder
        self._timeout_s = timeout_s

    def probe(self, micro_batch: int) -> Probe:
        """Run a micro-batch for a few steps, unless it has been.

        Raises:
            RunError: It failed for another reason than memory.
        """
        if micro_batch not in self.probes:
            flags = [FLAG, str(micro_batch), *SHORT]
            outcome = run_child(
                [*without_flags(self._command, LONGER), *flags],
                folder=self._folder / f"probe-{micro_batch}",
                timeout_s=self._timeout_s,
            )
            probe = Probe(micro_batch, outcome)
            print(f"  micro-batch {micro_batch}: {describe(outcome)}", flush=True)
            if not probe.fits and not probe.is_too_large:
                raise RunError(
                    f"micro-batch {micro_batch} ended for another reason than memory: "
                    f"{outcome.status}, {outcome.reason}"
                )
            self.probes[micro_batch] = probe
        return self.probes[micro_batch]

    def find_largest(self, *, limit: int, multiple: int) -> None:
        """Double until one does not fit, then halve the gap.

        Args:
            limit: Largest micro-batch to try.
            multiple: Between powers of two only multiples of this are tried.
        """
        fits, too_large = 1, None
        first = self.probe(1)
        if not first.fits:
            raise RunError(f"not even micro-batch 1 fits: {first.outcome.reason}")
        limit = min(limit, _device_batch(first.outcome.record) or limit)
        while too_large is None and fits < limit:
            size = min(2 * fits, limit)
            if self.probe(size).fits:
                fits = size
            else:
                too_large = size
        while too_large is not None:
            middle = (fits + too_large) // 2 // multiple * multiple
            if middle <= fits:
                return
            if self.probe(middle).fits:
                fits = middle
            else:
                too_large = middle

    @property
    def fitting(self) -> list[Probe]:
        """Those that fit, the smallest first."""
        return sorted((p for p in self.probes.values() if p.fits), key=lambda p: p.micro_batch)

    @property
    def fastest(self) -> Probe:
        """The one with the highest rate in its few steps."""
        return max(self.fitting, key=lambda p: p.outcome.summary["images_per_second"])


def _device_batch(record: dict[str, Any]) -> int | None:
    """A rank's share of the global batch; None on a CPU whose batch grows with the micro-batch."""
    is_given = record["origin"]["batch_size"] in ("flag", "file")
    if not is_given and record["machine"]["device_type"] == "cpu":
        return None
    return record["config"]["batch_size"] // record["ranks"]["world_size"]


def without_flags(command: Sequence[str], names: Sequence[str]) -> list[str]:
    """A command without some flags and their values."""
    kept, skip = [], False
    for argument in command:
        name, equals, _ = argument.partition("=")
        if not skip and name not in names:
            kept.append(argument)
        skip = not skip and name in names and not equals
    return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `search`.

    Args:
        argv: Flags, and behind ``--`` the command.

    Returns:
        The exit code.
    """
    flags, command = _parse(argv)
    folder = new_folder(flags.folder, prefix="search")
    search = Search(command, folder=folder, timeout_s=flags.timeout_s)
    print(f"Probing micro-batches up to {flags.max_micro_batch} in {folder}", flush=True)
    final = None
    try:
        search.find_largest(limit=flags.max_micro_batch, multiple=flags.multiple_of)
        winner = search.fastest.micro_batch
        print(f"Measuring micro-batch {winner} again, with the command's own settings")
        final = run_child(
            [*command, FLAG, str(winner)],
            folder=folder / "winner",
            timeout_s=flags.timeout_s,
        )
    except STOPS:
        print("interrupted: what was probed is in the folder", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        if search.fitting:
            summary = summarize(search, final)
            write_json(folder / "search.json", summary)
    largest = summary["largest_micro_batch"]
    bound = "" if summary["is_bounded_by_memory"] else " (the largest that was tried)"
    print(f"\nlargest micro-batch that fits: {largest}{bound}")
    print(f"fastest: {winner}, {describe(final)}\nruns: {folder}")
    return 0 if final.status == OK else 1


def summarize(search: Search, final: Outcome | None) -> dict[str, Any]:
    """The content of search.json.

    Args:
        search: With at least one probe that fits.
        final: The winner, measured again; None if it has not come to that.
    """
    summary = {} if final is None else final.summary
    return {
        "largest_micro_batch": search.fitting[-1].micro_batch,
        "is_bounded_by_memory": len(search.fitting) < len(search.probes),
        "fastest_micro_batch": search.fastest.micro_batch,
        "images_per_second": summary.get("images_per_second"),
        "run": final.run_folder.name if summary else None,
        "probes": [
            {
                "micro_batch": micro_batch,
                "status": probe.outcome.status,
                "reason": probe.outcome.reason,
                **{
                    name: probe.outcome.summary.get(name)
                    for name in ("images_per_second", "peak_memory_gib")
                },
            }
            for micro_batch, probe in sorted(search.probes.items())
        ],
    }


def describe(outcome: Outcome) -> str:
    """The outcome of a run in a line."""
    if outcome.status != OK:
        return f"{outcome.status}, {for_terminal(outcome.reason)}"
    summary = outcome.record["summary"]
    memory = format_number(summary["peak_memory_gib"], num_digits=3)
    return f"{format_number(summary['images_per_second'])} images/s, {memory} GiB"


def _parse(argv: Sequence[str] | None) -> tuple[SearchFlags, list[str]]:
    request = parse(
        SearchFlags,
        argv,
        prog="python -m sdbench search",
        description="Find the largest and the fastest micro-batch of a command of benchmark.py.",
        epilog=EPILOG,
        rest="COMMAND ...",
    )
    if any(argument.split("=")[0] == FLAG for argument in request.rest):
        raise ConfigError(
            "the micro-batch is what is searched for",
            value=FLAG,
            allowed="a command without it",
            flag="COMMAND",
        )
    return request.config, measuring_command(request.rest)
