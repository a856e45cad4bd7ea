"""Shared by the comparisons beside this file: sides in turn, medians, ratios and result files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.measure import hardware
from sdbench.record import provenance
from sdbench.statistics.intervals import compare

ROOT = Path(__file__).resolve().parents[1]


def make_parser(
    description: str,
    *,
    repeats: int,
    output: str,
    takes_flags: bool = False,
    needs_output: bool = True,
) -> argparse.ArgumentParser:
    """Make a parser with `--repeats`, `--output` of a kind of file, and flags for all sides."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=repeats, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, required=needs_output, help=f"{output} to write")
    if takes_flags:
        parser.add_argument("flags", nargs="*", help="for all sides, behind --")
    return parser


def in_turn(names: Iterable[str], *, repeats: int) -> Iterator[tuple[int, str]]:
    """Yield the number of each repeat, from 1, with each name; each repeat starts one name later.

    So a machine that becomes slower or faster favours no side.
    """
    names = list(names)
    for repeat in range(repeats):
        start = repeat % len(names)
        yield from ((repeat + 1, name) for name in names[start:] + names[:start])


def launch(*arguments: str) -> str:
    """Run Python with these arguments in the repository and return its output, or exit with it."""
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if result.returncode != 0:
        sys.exit(f"exit {result.returncode}: {' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout


def spread(values: Sequence[float]) -> str:
    """Return the median of values with the least and the greatest."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def time_readers(
    readers: Mapping[str, Callable[[], int]], *, baseline: str, unit: str, repeats: int
) -> dict[str, Any]:
    """Time readers, which return the number of units that they read, in turn.

    Returns:
        Rates and their medians, the ratio of the last reader to the baseline, and the machine.
    """
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _, name in in_turn(readers, repeats=repeats):
        started_s = time.perf_counter()
        num_units = readers[name]()
        rates[name].append(num_units / (time.perf_counter() - started_s))
        print(f"{name}: {rates[name][-1]:.1f} {unit}/s", file=sys.stderr)
    *_, side = readers
    ratio = compare(rates[side], rates[baseline])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    texts = ", ".join(f"{name} {rate:.1f} {unit}/s" for name, rate in medians.items())
    print(f"{side} / {baseline}: {ratio.ratio:.2f}, {ratio.verdict}; medians {texts}")
    return {
        f"{unit}_per_second": rates,
        f"median_{unit}_per_second": medians,
        "ratio": ratio.ratio,
        "ratio_interval": None if ratio.interval is None else dataclasses.asdict(ratio.interval),
        "verdict": ratio.verdict,
        **describe_origin(),
    }


def describe_origin() -> dict[str, Any]:
    """Return the machine, the versions of packages and the commit."""
    return {
        "machine": hardware.as_dict(hardware.inspect_machine()),
        "versions": provenance.package_versions(),
        "git": provenance.git_state(),
    }


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write a result to a file, if there is one."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
