"""Images/s of one trainer, encoder or decoder, from records or from the command line."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.analysis import feed_table
from sdbench.base.errors import ConfigError
from sdbench.record.configuration import as_key, group, place_of_encoders, settings_of
from sdbench.record.store import BENCHMARK, FEED, OK, PRECOMPUTE, kind_of
from sdbench.report.figures import MEASURED
from sdbench.report.runs import read_record, use_each
from sdbench.scaling.points import (
    GIVEN_RATE,
    IMAGE_SIZE,
    RATE,
    Amount,
    Row,
    rate_of,
)
from sdbench.settings.data import ONLINE, PRECOMPUTED
from sdbench.settings.kinds import PATH, Kind
from sdbench.settings.ray import RAY
from sdbench.settings.setting import REQUIRED, setting

RATE_OR_RECORD = Kind(
    f"{RATE.allowed}, or a record",
    lambda text: (RATE if GIVEN_RATE.fullmatch(text) else PATH).parse(text),
    "TEXT",
)
# The rate of one worker and its interval; None: a record has neither.
Found = tuple[float, Mapping[str, Any]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatesFlags:
    """Images/s of one worker of each kind."""

    trainer_rates: tuple[Row | Path, ...] = setting(
        RATE_OR_RECORD,
        REQUIRED,
        "images/s of one trainer that is given latents: records of benchmark.py, or SIZE=RATE, or "
        "SIZE=RATE:LOW:HIGH",
        takes_several=True,
    )
    encoder_rates: tuple[Row | Path, ...] = setting(
        RATE_OR_RECORD,
        REQUIRED,
        "images/s of one encoder: records of precompute or of data.py --engine ray, or so",
        takes_several=True,
    )
    decoder_rates: tuple[Row | Path, ...] = setting(
        RATE_OR_RECORD,
        REQUIRED,
        "images/s of one CPU worker with a core of its own: records of data.py, or so",
        takes_several=True,
    )
    in_step_rates: tuple[Row | Path, ...] = setting(
        RATE_OR_RECORD,
        (),
        "images/s of one trainer that encodes in its step: records of benchmark.py, or so "
        "(default: this way is left out)",
        takes_several=True,
    )


class Worker(NamedTuple):
    """A kind of worker.

    Attributes:
        name: In words.
        flag: The flag that takes its rates, without dashes.
        measured_by: The programs that measure them.
        find: Returns the rate of one worker in a record.
    """

    name: str
    flag: str
    measured_by: str
    find: Callable[[Mapping[str, Any]], Found]


def _of_trainer(place: str, record: Mapping[str, Any]) -> Found:
    if kind_of(record) != BENCHMARK or place_of_encoders(record["config"]) != place:
        return None
    return _of_each(record["summary"], "device")


def _of_encoder(record: Mapping[str, Any]) -> Found:
    if kind_of(record) == FEED:
        return _of_stage(record, "encoder")
    # With Ray the rate is that of decoders, encoders and the process together.
    if kind_of(record) != PRECOMPUTE or record["config"].get("engine") == RAY:
        return None
    return _of_each(record["summary"], "device")


def _of_decoder(record: Mapping[str, Any]) -> Found:
    if kind_of(record) != FEED or record["config"]["latents"] != ONLINE:
        return None
    # With an emulated step the rate is that of the trainer, and the record has none of a core.
    return _of_stage(record, "decoder") or _of_each(record["summary"], "core")


def _of_each(summary: Mapping[str, Any], each: str) -> Found:
    """The rate of one worker, and the interval of all scaled to it."""
    rate, rate_of_each = summary["images_per_second"], summary[f"images_per_second_per_{each}"]
    if rate_of_each is None:
        return None
    interval = summary.get("images_per_second_interval") or {}
    known = {end: interval[end] for end in ("low", "high") if interval.get(end) is not None}
    return rate_of_each, {end: value * rate_of_each / rate for end, value in known.items()}


def _of_stage(record: Mapping[str, Any], worker: str) -> Found:
    """The rate of an actor in a record of data.py --engine ray."""
    stages = record["summary"].get("ray") or {}
    name = f"images_per_second_per_{worker}"
    return (stages[name], stages[f"{name}_interval"] or {}) if stages.get(name) else None


TRAINER = Worker(
    "one trainer on latents",
    "trainer_rates",
    "benchmark.py --latents precomputed",
    functools.partial(_of_trainer, PRECOMPUTED),
)
ENCODING_TRAINER = Worker(
    "one trainer with encoders in the step",
    "in_step_rates",
    "benchmark.py with encoders in the step",
    functools.partial(_of_trainer, ONLINE),
)
ENCODER = Worker(
    "one encoder",
    "encoder_rates",
    "precompute without Ray, or data.py --engine ray",
    _of_encoder,
)
DECODER = Worker(
    "one decoder",
    "decoder_rates",
    "data.py on pictures, with --engine ray or without --emulate_step_seconds",
    _of_decoder,
)
Rates = Mapping[Worker, Mapping[int, Amount]]


def read_rates(flags: RatesFlags, sizes: Collection[int]) -> Rates:
    """Read the rates of all workers at these resolutions, in pixels, from their flags.

    Three or more records of a resolution give an interval between runs. A record that cannot be
    read is named on stderr and left out.
    """
    found = {}
    for worker in (TRAINER, ENCODING_TRAINER, ENCODER, DECODER):
        given = getattr(flags, worker.flag)
        found[worker] = _read_rates(given, worker)
        if given and not found[worker].keys() >= set(sizes):
            raise ConfigError(
                f"--{worker.flag} lacks a resolution of the recipe",
                value=" and ".join(f"{size} px" for size in found[worker]),
                allowed="rates at " + " and ".join(f"{size} px" for size in sorted(sizes)),
                flag=f"--{worker.flag}",
            )
    return found


def _read_rates(given: Sequence[Row | Path], worker: Worker) -> dict[int, Amount]:
    files = [one for one in given if isinstance(one, Path)]
    records, _ = use_each(files, lambda file: (file, read_record(file, flag=f"--{worker.flag}")))
    rows = [one for one in given if not isinstance(one, Path)]
    rows += [_find_row(file, record, worker) for file, record in records]
    by_size = group(rows, key_of=lambda row: row[IMAGE_SIZE])
    for size, of_size in by_size.items():
        configurations = {row.get("configuration") for row in of_size}
        if len(of_size) > 1 and (len(configurations) > 1 or None in configurations):
            raise ConfigError(
                f"several rates at {size} px are not from runs of one configuration",
                value=" ".join(row["source"] for row in of_size),
                allowed="one rate for each resolution, or runs that differ in nothing",
                flag=f"--{worker.flag}",
            )
    return {size: rate_of(of_size) for size, of_size in by_size.items()}


def _find_row(path: Path, record: Mapping[str, Any], worker: Worker) -> Row:
    kind, size = kind_of(record), record["config"]["image_size"]
    found = worker.find(record) if record["status"] == OK else None
    # A record of several resolutions has a text here.
    if found is None or not isinstance(size, int):
        raise ConfigError(
            "a record has no rate of such a worker at one resolution",
            value=f"{path}: {kind}, {record['status']}, {size} px",
            allowed=f"records of {worker.measured_by} that ended well, or SIZE=RATE",
            flag=f"--{worker.flag}",
        )
    rate, interval = found
    settings = settings_of(record) if kind == BENCHMARK else feed_table.configuration_of(record)
    return {
        "source": str(path),
        "kind": MEASURED,
        IMAGE_SIZE: size,
        "images_per_second": rate,
        "images_per_second_low": interval.get("low"),
        "images_per_second_high": interval.get("high"),
        "configuration": as_key(settings),
    }
