"""`describe_outlook`: what the figures of a run mean, and the commands that follow it."""

from __future__ import annotations

import functools
import itertools
import operator
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.carried import RESULTS, THROUGHPUT
from sdbench.base.units import counted
from sdbench.record.row import RUN_COLUMNS, make_row
from sdbench.report.figures import MEASURED, describe_source, device_of, read_figures
from sdbench.report.runs import describe_device, use_each
from sdbench.report.terminal import align, format_number

# What an image takes. No column tells the model of quoted figures, which is this one.
WORK = ("model", "image_size", "latents")
QUOTED_MODEL = "sd2-base"
QUOTED = "quoted"
MACHINE = ("gpu", "device", "num_cpu_cores")
# The parts of a GPU's name that tell it from others, as H100 and 80GB.
CHIP = re.compile(r"\b(?!SXM)[A-Z]+\d+[A-Z]*\b|\b\d+GB\b")
MFU = {"mfu_percent": "", "mfu_of_matmul_percent": " of a matrix product"}
Row = Mapping[str, Any]


def describe_outlook(record: dict[str, Any], folder: Path, *, command: Sequence[str] | None) -> str:
    """A few lines for the terminal; `command` repeats the run, None if no single command does.

    An installed package has the figures of published runs, and not the runs.
    """
    row, place = make_row(record), os.path.relpath(folder)
    read = functools.partial(read_figures, required=RUN_COLUMNS)
    tables, _ = use_each(filter(Path.is_file, [THROUGHPUT]), read)
    others = [one for table in tables for one in table if one["source"] != row["source"]]
    # On a CPU the number of cores is that of the machine, on a GPU it matters little.
    machine = MACHINE[: 1 if row["gpu"] else None]
    here = [one for one in others if one["kind"] == MEASURED and _is_alike(one, row, machine)]
    published = [one for one in here if _is_alike(one, row, WORK) and one["images_per_second"]]
    quoted = [one for one in others if _is_quoted(one, row)]
    meanings, commands = [], []
    for name, known in (("published", published), ("quoted", quoted)):
        if known:
            meanings.append((f"beside {name}", _beside_best(row, known)))
    if tables and not published:
        device = describe_device(record)
        meanings.append(("beside published", f"no run of this work on {device} is published"))
    name = next((name for name in MFU if row[name] is not None), None)
    # More than 100 %: the product was timed while others used the machine.
    used = [one for one in here if name is not None and 0 < (one[name] or 0) <= 100]
    if used:
        best = max(used, key=operator.itemgetter(name))
        work = f"{best['model']}, {best['image_size']} px, {best['source']}"
        meanings.append(("best MFU", f"{best[name]:.1f} %{MFU[name]} on this device: {work}"))
    meanings.append(("how sure", _how_sure(record["summary"])))
    if command is not None:
        own = "--results_dir"  # which repeat gives each run
        words = [
            word
            for before, word in itertools.pairwise(["", *command])
            if own not in (before, word.partition("=")[0])
        ]
        commands.append(f"repeat 5 -- {shlex.join(words)}")
    has_runs = (RESULTS / "runs").is_dir()
    if published and has_runs:
        first = max(published, key=_rate_per_device)
        allowed = "" if first["precision"] == row["precision"] else " --allow precision"
        run = shlex.quote(os.path.relpath(RESULTS / "runs" / first["source"]))
        commands.append(f"compare {run} {shlex.quote(place)}{allowed}")
    else:
        commands.append(f"report {shlex.quote(os.path.dirname(place) or '.')} --out my.html")
    if has_runs:
        results = os.path.relpath(RESULTS)
        elsewhere = "" if results == "results" else f" --folder {shlex.quote(results)}"
        commands.append(f"publish {shlex.quote(place)}{elsewhere}")
    next_lines = "\n".join(f"  python -m sdbench {one}" for one in commands)
    return f"{align(meanings)}\n\nNext:\n{next_lines}"


def _is_alike(one: Row, other: Row, columns: Sequence[str]) -> bool:
    return all(one.get(name) == other.get(name) for name in columns)


def _is_quoted(figure: Row, row: Row) -> bool:
    """Whether a published figure of others is of this GPU and this work."""
    chip = set(CHIP.findall((device_of(figure) or "").partition(" (")[0]))
    return (
        figure["kind"] == QUOTED
        and bool(chip)
        and chip <= set(CHIP.findall(row["gpu"] or ""))
        and row["model"] == (figure.get("model") or QUOTED_MODEL)
        and _is_alike(figure, row, WORK[1:])
        and bool(figure["images_per_second"] and figure["num_gpus"])
    )


def _rate_per_device(row: Row) -> float:
    return row["images_per_second"] / (row.get("num_devices") or row["num_gpus"])


def _beside_best(row: Row, known: Sequence[Row]) -> str:
    best = max(known, key=_rate_per_device)
    rate = _rate_per_device(best)
    source = best["source"] if best["kind"] == MEASURED else describe_source(best)
    return (
        f"{100 * _rate_per_device(row) / rate:.0f} % of the best of "
        f"{counted(len(known), 'figure')} of this device and work: "
        f"{format_number(rate)} images/s per device, {source}"
    )


def _how_sure(summary: Mapping[str, Any]) -> str:
    """The interval in words."""
    interval, rate = summary["images_per_second_interval"], summary["images_per_second"]
    if interval is None:
        return "not at all: one run of too few steps for an interval"
    within = "with no upper bound"
    if interval["high"] is not None:
        far = max(interval["high"] - rate, rate - interval["low"]) / rate
        within = f"within {format_number(100 * far, num_digits=2)} %"
    return f"{within} by the steps of this run; a second run may differ by more: repeat it"
