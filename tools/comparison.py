"""Shared by the comparisons beside this file: sides in turn, medians, ratios and result files."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def make_parser(
    description: str, *, repeats: int, output: str, takes_flags: bool = False
) -> argparse.ArgumentParser:
    """Make a parser with `--repeats`, `--output` of a kind of file, and flags for all sides."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=repeats, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help=f"{output} to write")
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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result to a file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
