"""Reads images/s of one trainer, encoder or decoder from records or from the command line."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.outside import LARGEST
from sdbench.record.configuration import as_key, group, place_of_encoders, settings_of
from sdbench.record.store import BENCHMARK, FEED, OK, PRECOMPUTE, kind_of
from sdbench.report import feed_table
from sdbench.report.figures import MEASURED
from sdbench.report.runs import read_record, use_each
from sdbench.scaling.command_line import MachinesFlags
from sdbench.scaling.cost import Amount
from sdbench.scaling.machines import WorkerRates
from sdbench.scaling.points import IMAGE_SIZE, Row, rate_of
from sdbench.settings.data import ONLINE, PRECOMPUTED
from sdbench.settings.ray import RAY

CONFIGURATION = "configuration"
NUMBERS = re.compile(r"([1-9][0-9]*)=([^:]+)(?::([^:]+):([^:]+))?")


@dataclasses.dataclass(frozen=True)
class Worker:
    """A kind of worker with the flag that takes its rates and the programs that measure them.

    ``find`` returns the rate of one worker in a record with its interval, or None without one.
    """

    flag: str
    measured_by: str
    find: Callable[[Mapping[str, Any]], tuple[float, Mapping[str, Any] | None] | None]


def _of_trainer(place: str, record: Mapping[str, Any]) -> Any:
    if kind_of(record) != BENCHMARK or place_of_encoders(record["config"]) != place:
        return None
    return _of_each(record["summary"], "device")


def _of_encoder(record: Mapping[str, Any]) -> Any:
    if kind_of(record) == PRECOMPUTE:
        # With Ray the rate is that of decoders, encoders and the process together.
        if record["config"].get("engine") == RAY:
            return None
        return _of_each(record["summary"], "device")
    return _of_stage(record, "encoder")


def _of_decoder(record: Mapping[str, Any]) -> Any:
    if kind_of(record) != FEED or record["config"]["latents"] != ONLINE:
        return None
    # With an emulated step the rate is that of the trainer, and the record has none of a core.
    return _of_stage(record, "decoder") or _of_each(record["summary"], "core")


def _of_each(summary: Mapping[str, Any], each: str) -> Any:
    """Return the rate of one worker, and the interval of all scaled to it."""
    rate, rate_of_each = summary["images_per_second"], summary[f"images_per_second_per_{each}"]
    if rate_of_each is None:
        return None
    interval = summary.get("images_per_second_interval") or {}
    ends = {end: interval[end] for end in ("low", "high") if interval.get(end) is not None}
    return rate_of_each, {end: value * rate_of_each / rate for end, value in ends.items()}


def _of_stage(record: Mapping[str, Any], worker: str) -> Any:
    """Return the rate of an actor in a record of data.py --engine ray."""
    stages = record["summary"].get("ray") if kind_of(record) == FEED else None
    name = f"images_per_second_per_{worker}"
    return (stages[name], stages[f"{name}_interval"]) if stages and stages[name] else None


TRAINER = Worker(
    "--trainer_rates",
    "benchmark.py --latents precomputed",
    functools.partial(_of_trainer, PRECOMPUTED),
)
ENCODING_TRAINER = Worker(
    "--in_step_rates",
    "benchmark.py with encoders in the step",
    functools.partial(_of_trainer, ONLINE),
)
ENCODER = Worker("--encoder_rates", "precompute without Ray, or data.py --engine ray", _of_encoder)
DECODER = Worker(
    "--decoder_rates",
    "data.py on pictures, with --engine ray or without --emulate_step_seconds",
    _of_decoder,
)
# In the order of the fields of `WorkerRates`.
WORKERS = (TRAINER, ENCODER, DECODER, ENCODING_TRAINER)


def read_worker_rates(arguments: MachinesFlags, sizes: Collection[int]) -> WorkerRates:
    """Read the rates of all workers at these resolutions, in pixels, from their flags."""
    found = []
    for worker in WORKERS:
        texts = getattr(arguments, worker.flag.removeprefix("--"))
        rates = _read_rates(texts, worker)
        if texts and not rates.keys() >= set(sizes):
            raise ConfigError(
                f"{worker.flag} lacks a resolution of the recipe",
                value=" and ".join(f"{size} px" for size in rates),
                allowed="rates at " + " and ".join(f"{size} px" for size in sorted(sizes)),
                flag=worker.flag,
            )
        found.append(rates)
    return WorkerRates(*found)


def _read_rates(texts: Sequence[str], worker: Worker) -> dict[int, Amount]:
    """Read rates by resolution from records, ``SIZE=RATE`` or ``SIZE=RATE:LOW:HIGH``.

    Three or more records of a resolution give an interval between runs. A record that cannot be
    read is named on stderr and left out.
    """
    rows = [_parse(text, worker) for text in texts]
    files = [Path(text) for text, row in zip(texts, rows, strict=True) if row is None]
    records, _ = use_each(files, lambda file: (file, read_record(file, flag=worker.flag)))
    rows = [row for row in rows if row is not None]
    rows += [_find_row(file, record, worker) for file, record in records]
    by_size = group(rows, key_of=lambda row: row[IMAGE_SIZE])
    for size, of_size in by_size.items():
        configurations = {row[CONFIGURATION] for row in of_size}
        if len(of_size) > 1 and (len(configurations) > 1 or None in configurations):
            raise ConfigError(
                f"several rates at {size} px are not from runs of one configuration",
                value=" ".join(row["source"] for row in of_size),
                allowed="one rate for each resolution, or runs that differ in nothing",
                flag=worker.flag,
            )
    return {size: rate_of(of_size) for size, of_size in by_size.items()}


def _parse(text: str, worker: Worker) -> Row | None:
    """Return the row of a rate that is given as numbers; None for another text."""
    found = NUMBERS.fullmatch(text)
    if not found:
        return None
    size, *numbers = found.groups()
    try:
        rate, low, high = (math.nan if number is None else float(number) for number in numbers)
        is_right = 0 < rate <= LARGEST and (found[3] is None or 0 < low <= rate <= high <= LARGEST)
        is_right = is_right and len(size) < 10
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(
            "images/s of a worker are not above 0 or not within their interval",
            value=text,
            allowed="SIZE=RATE or SIZE=RATE:LOW:HIGH, e.g. 256=139:135:143, or a record",
            flag=worker.flag,
        )
    return _make_row(text, int(size), rate, low, high)


def _find_row(path: Path, record: Mapping[str, Any], worker: Worker) -> Row:
    kind, size = kind_of(record), record["config"]["image_size"]
    found = worker.find(record) if record["status"] == OK else None
    # A record of several resolutions has a text here.
    if found is None or not isinstance(size, int):
        raise ConfigError(
            "a record has no rate of such a worker at one resolution",
            value=f"{path}: {kind}, {record['status']}, {size} px",
            allowed=f"records of {worker.measured_by} that ended well, or SIZE=RATE",
            flag=worker.flag,
        )
    rate, interval = found
    low, high = ((interval or {}).get(end) for end in ("low", "high"))
    is_training = kind == BENCHMARK
    configuration = settings_of(record) if is_training else feed_table.configuration_of(record)
    return _make_row(str(path), size, rate, low, high, configuration=as_key(configuration))


def _make_row(
    source: str,
    size: int,
    rate: float,
    low: float | None,
    high: float | None,
    *,
    configuration: Any = None,
) -> Row:
    return {
        "source": source,
        "kind": MEASURED,
        IMAGE_SIZE: size,
        "images_per_second": rate,
        "images_per_second_low": low,
        "images_per_second_high": high,
        CONFIGURATION: configuration,
    }
