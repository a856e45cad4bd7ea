"""Reads records and steps, groups runs by configuration, and describes them in words and cells."""

from __future__ import annotations

import collections
import datetime
import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sdbench.base.errors import ConfigError
from sdbench.base.files import refused_unless_read
from sdbench.base.outside import is_bounded, open_table
from sdbench.base.units import counted
from sdbench.record.configuration import (
    as_key,
    count_devices,
    describe_model,
    describe_place,
    group,
    other_settings,
    settings_of,
)
from sdbench.record.store import load_record
from sdbench.report.tables import Cell, make_cell, median_cell
from sdbench.report.terminal import FLAG_MEANINGS, format_rates
from sdbench.statistics.occasions import Time

T = TypeVar("T")

LATENTS_IN_WORDS = {
    "online": "the encoders run in the step (online)",
    "precomputed": "latents and text embeddings made beforehand (precomputed)",
    "beside": "the encoders run in other processes while the ranks train (beside)",
    "subject": "one subject is learned from latents that stay on the device (dreambooth)",
    "moments": "VAE moments made beforehand, text encoder in the step (moments)",
}
# Runs that a cell or a point of a chart names.
MAX_NAMED_RUNS = 5


def read_record(path: Path, *, flag: str) -> dict[str, Any]:
    """Read a record, given by its file or the folder of its run, or raise ConfigError."""
    allowed = "a record that this version of the suite reads, as it was written"
    with refused_unless_read(path, "a record", allowed=allowed, flag=flag):
        return load_record(path)


def read_steps(
    path: Path, *, columns: Sequence[str], flag: str, least: int = 0
) -> list[dict[str, Any]]:
    """Read columns of a steps.csv, the phase as text and others as numbers, or raise ConfigError.

    A row that a full disk has cut off is left out, and a loss that is not finite becomes NaN. A
    table of fewer than `least` steps is refused.
    """
    steps = []
    allowed = f"a table with the columns {', '.join(columns)}, as the run wrote it"
    with refused_unless_read(path, "a table of steps", allowed=allowed, flag=flag):
        for row in open_table(path, required=columns):
            if None in row.values():
                continue
            step = {name: row[name] if name == "phase" else float(row[name]) for name in columns}
            if not is_bounded(step.get("loss", 0.0)):
                step["loss"] = math.nan
            others = [value for name, value in step.items() if name not in ("phase", "loss")]
            if min(others, default=0) < 0 or not all(map(is_bounded, others)):
                raise ValueError("it has a number that no step can have")
            if step.get("images_per_second") == 0:
                raise ValueError("it has a rate of 0")
            steps.append(step)
        if len(steps) < least:
            raise ValueError(f"it has {counted(len(steps), 'step')}, and {least} are needed")
    return steps


def read_time(started_utc: str | None, *, of: str | Path) -> Time:
    """The start of a run, given in ISO 8601. Raises ConfigError if it cannot be read."""
    if started_utc is None:
        return Time(None)
    try:
        # A time without a zone is in UTC.
        started = datetime.datetime.fromisoformat(started_utc)
        if started.tzinfo is None:
            started = started.replace(tzinfo=datetime.UTC)
        return Time(started.timestamp())
    except (ValueError, OverflowError):
        raise ConfigError(
            "the start time of a run cannot be read",
            value=started_utc,
            allowed="a time such as 2026-11-21T05:48:24+00:00",
            flag=f"started_utc of {of}",
        ) from None


def use_each(paths: Iterable[Path], use: Callable[[Path], T]) -> tuple[list[T], list[Path]]:
    """The results of `use`, and the paths for which it raised ConfigError, named on stderr."""
    whole, left_out = [], []
    for path in paths:
        try:
            whole.append(use(path))
        except ConfigError as error:
            left_out.append(path)
            print(f"left out: {error}", file=sys.stderr)
    return whole, left_out


def group_runs(records: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group runs by configuration, in the order in which each configuration first occurs."""
    return list(group(records, key_of=lambda record: as_key(settings_of(record))).values())


def describe_work(model: str | None, image_size: int | None, latents: str | None) -> str:
    """The columns `WORK` of a row, or `work_of` a record, in words."""
    name = model or "model not told"
    size = "resolution not told" if image_size is None else f"{image_size} px"
    place = "place of the encoders not told" if latents is None else latents
    return f"{name}, {size}, {LATENTS_IN_WORDS.get(place, place)}"


def describe_device(record: dict[str, Any]) -> str:
    """The name of the device that trained; of a CPU, with its number of cores."""
    return f"{record['machine']['device_name']}{_describe_cores(record)}"


def describe_devices(record: dict[str, Any]) -> str:
    """The devices that trained, e.g. ``8 x NVIDIA H200``; a CPU with its number of cores."""
    return f"{count_devices(record['machine'], record['ranks'])}{_describe_cores(record)}"


def _describe_cores(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return f", {machine['num_cpu_cores']} cores" if machine["device_type"] == "cpu" else ""


def tell_apart(
    records: Sequence[dict[str, Any]], *, without: Collection[str] = ()
) -> tuple[str, list[str]]:
    """The facts that configurations share, and a label for each; a record stands for each.

    A label has the facts that differ, and the commit and the start time as far as it needs them to
    be unique. The label of a single configuration is its preset and the user's settings. Facts
    named in `without` are left out.
    """
    facts = [
        {name: text for name, text in _facts_of(record).items() if name not in without}
        for record in records
    ]
    names = dict.fromkeys(name for each in facts for name in each)
    if len(facts) == 1:
        shared = set(names) - {"preset", *other_settings(records[0])}
    else:
        shared = {name for name in names if len({each.get(name) for each in facts}) == 1}
    labels = [
        ", ".join(text for name, text in each.items() if name not in shared) for each in facts
    ]
    codes = [f"code {(record['git']['commit'] or 'unknown')[:7]}" for record in records]
    starts = [record["started_utc"][:19].replace("T", " ") for record in records]
    for details in (codes, starts):
        numbers = collections.Counter(labels)
        labels = [
            label if numbers[label] == 1 else ", ".join(filter(None, (label, detail)))
            for label, detail in zip(labels, details, strict=True)
        ]
    common = ", ".join(text for name, text in facts[0].items() if name in shared)
    return common, [label or "no other setting" for label in labels]


def describe_run(record: dict[str, Any]) -> str:
    """The device, the work and the settings of a run in words."""
    return ", ".join(_facts_of(record).values())


def describe_configuration(record: dict[str, Any]) -> str:
    """The settings of a run in words, without its device, its model and its kind of work."""
    told_elsewhere = {"device", "model", "image_size", "latents"}
    if record["config"]["data_format"] == "synthetic":
        told_elsewhere |= {"num_workers", "data_format"}
    facts = _facts_of(record).items()
    return ", ".join(text for name, text in facts if name not in told_elsewhere)


def _facts_of(record: dict[str, Any]) -> dict[str, str]:
    """The settings of a run in words, by name."""
    config = record["config"]
    return {
        "device": describe_devices(record),
        "model": describe_model(record),
        "image_size": f"{config['image_size']} px",
        "latents": describe_place(config),
        "preset": str(config["preset"]),
        "engine": f"engine {config['engine']}",
        "precision": str(config["precision"]),
        "use_ema": "EMA" if config["use_ema"] else "no EMA",
        "batch_size": f"global batch {config['batch_size']}",
        "micro_batch": f"micro-batch {config['device_train_microbatch_size']}",
        "num_workers": f"num_workers {config['num_workers']}",
        "data_format": f"data_format {config['data_format']}",
        **{
            name: f"{name} {value}"
            for name, value in other_settings(record).items()
            if name != "lora_rank"  # the model tells it
        },
    }


def name_runs(runs: Sequence[str]) -> str:
    """The names of the first few runs, and the number of the others."""
    left_out = len(runs) - MAX_NAMED_RUNS
    shown = ", ".join(runs[:MAX_NAMED_RUNS])
    return f"{shown} and {left_out} more" if left_out > 0 else shown


def rates_cell(runs: Sequence[dict[str, Any]]) -> Cell:
    """Images/s of the runs of one configuration with their intervals, sorted by the median."""
    median = summary_cell(runs, "images_per_second")
    return Cell(format_rates([run["summary"] for run in runs]), median.value)


def summary_cell(runs: Iterable[dict[str, Any]], name: str, **form: Any) -> Cell:
    """Median over the runs of a figure of their summaries; `form` is passed to `median_cell`."""
    return median_cell((run["summary"].get(name) for run in runs), **form)


def peak_memory_cell(runs: Iterable[dict[str, Any]]) -> Cell:
    """Largest peak memory of a rank, in GiB."""
    peak_gib = max(run["summary"]["peak_memory_gib"] for run in runs)
    return Cell(f"{peak_gib:.1f}", peak_gib)


def notes_cell(runs: Sequence[dict[str, Any]]) -> Cell:
    """The flags of the runs in words, and whether their code had uncommitted changes."""
    flags = dict.fromkeys(flag for run in runs for flag in run["summary"]["flags"] or ())
    notes = [f"{flag}: {FLAG_MEANINGS[flag]}" for flag in flags]
    if any(run["git"]["dirty"] for run in runs):
        notes.append("the code had uncommitted changes")
    return make_cell("; ".join(notes) or None, unknown="")
