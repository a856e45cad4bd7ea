"""Images/s of one trainer, encoder or decoder, from records or as given on the command line."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.record.configuration import as_key, group, settings_of
from sdbench.record.store import BENCHMARK, FEED, OK, PRECOMPUTE, kind_of
from sdbench.report import feed_table
from sdbench.report.figures import MEASURED
from sdbench.report.runs import read_record
from sdbench.scaling.command_line import MachinesFlags
from sdbench.scaling.cost import Amount
from sdbench.scaling.machines import WorkerRates
from sdbench.scaling.points import IMAGE_SIZE, Row, rate_of
from sdbench.settings.data import ONLINE, PRECOMPUTED

CONFIGURATION = "configuration"
NUMBERS = re.compile(r"([1-9][0-9]*)=([^:]+)(?::([^:]+):([^:]+))?")


@dataclasses.dataclass(frozen=True)
class Worker:
    """A worker whose rate is asked for.

    Attributes:
        flag: The flag that takes its rates.
        kind: Kind of the records that measure it.
        measured_by: Those records in words.
        config: Values that the record's settings must have.
    """

    flag: str
    kind: str
    measured_by: str
    config: tuple[tuple[str, Any], ...]


TRAINER = Worker(
    "--trainer_rates",
    BENCHMARK,
    "benchmark.py --latents precomputed",
    (("latents", PRECOMPUTED),),
)
ENCODING_TRAINER = Worker(
    "--in_step_rates", BENCHMARK, "benchmark.py --latents online", (("latents", ONLINE),)
)
ENCODER = Worker("--encoder_rates", PRECOMPUTE, "python -m sdbench precompute", ())
DECODER = Worker(
    "--decoder_rates",
    FEED,
    "data.py on pictures, without --emulate_step_seconds",
    (("latents", ONLINE), ("emulate_step_seconds", None)),
)

# In the order of the fields of `WorkerRates`.
WORKERS = (TRAINER, ENCODER, DECODER, ENCODING_TRAINER)


def read_worker_rates(arguments: MachinesFlags, sizes: Collection[int]) -> WorkerRates:
    """The rates of all workers.

    Args:
        arguments: The flags that give them.
        sizes: Resolutions that are needed, in pixels.

    Raises:
        ConfigError: If one cannot be read, or is missing at a resolution.
    """
    given = {worker: getattr(arguments, worker.flag.removeprefix("--")) for worker in WORKERS}
    found = {worker: read_rates(texts, worker) for worker, texts in given.items()}
    for worker, rates in found.items():
        if given[worker] and not rates.keys() >= set(sizes):
            raise ConfigError(
                f"{worker.flag} lacks a resolution of the recipe",
                value=" and ".join(f"{size} px" for size in rates),
                allowed="rates at " + " and ".join(f"{size} px" for size in sorted(sizes)),
                flag=worker.flag,
            )
    return WorkerRates(*found.values())


def read_rates(texts: Sequence[str], worker: Worker) -> dict[int, Amount]:
    """Images/s of one worker by resolution in pixels, with intervals where they are known.

    Args:
        texts: Records, or numbers of the form ``SIZE=RATE`` or ``SIZE=RATE:LOW:HIGH``. Three
            records or more of a resolution give an interval between runs.
        worker: The worker.

    Raises:
        ConfigError: If a text is neither, a record is not of such a worker, or the rates of a
            resolution are not those of runs of one configuration.
    """
    rows = [_parse(text, worker) or _read(Path(text), worker) for text in texts]
    by_size = group(rows, key_of=lambda row: row[IMAGE_SIZE])
    for size, of_size in by_size.items():
        configurations = {row[CONFIGURATION] for row in of_size}
        if len(of_size) > 1 and (len(configurations) > 1 or None in configurations):
            raise ConfigError(
                f"several rates at {size} px are not those of runs of one configuration",
                value=" ".join(row["source"] for row in of_size),
                allowed="one rate for each resolution, or runs that differ in nothing",
                flag=worker.flag,
            )
    return {size: rate_of(of_size) for size, of_size in by_size.items()}


def _parse(text: str, worker: Worker) -> Row | None:
    """The row of a rate that is given as numbers; None if the text is none."""
    found = NUMBERS.fullmatch(text)
    if not found:
        return None
    size, *numbers = found.groups()
    try:
        rate, low, high = (math.nan if number is None else float(number) for number in numbers)
        is_right = 0 < rate < math.inf and (found[3] is None or 0 < low <= rate <= high < math.inf)
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(
            "images/s of a worker are no numbers above 0, or do not lie in their interval",
            value=text,
            allowed="SIZE=RATE or SIZE=RATE:LOW:HIGH, e.g. 256=139:135:143, or a record",
            flag=worker.flag,
        )
    return _make_row(text, int(size), rate, low, high)


def _read(path: Path, worker: Worker) -> Row:
    record = read_record(path, flag=worker.flag)
    config, summary = record["config"], record["summary"] or {}
    found = {name: config.get(name) for name, _ in worker.config}
    size, rate = config["image_size"], summary.get("images_per_second")
    is_right = kind_of(record) == worker.kind and found == dict(worker.config)
    if not (is_right and record["status"] == OK and rate and isinstance(size, int)):
        raise ConfigError(
            "a record has no rate of such a worker at one resolution",
            value=f"{path}: {kind_of(record)}, {record['status']}, {size} px, {found}",
            allowed=f"records of {worker.measured_by} that ended well, or SIZE=RATE",
            flag=worker.flag,
        )
    is_training = worker.kind == BENCHMARK
    configuration = settings_of(record) if is_training else feed_table.configuration_of(record)
    each = "core" if worker.kind == FEED else "device"
    rate_of_each = summary[f"images_per_second_per_{each}"]
    interval = summary.get("images_per_second_interval") or {}
    ends = [interval.get(end) for end in ("low", "high")]
    low, high = (math.nan if end is None else end * rate_of_each / rate for end in ends)
    return _make_row(str(path), size, rate_of_each, low, high, configuration=as_key(configuration))


def _make_row(
    source: str, size: int, rate: float, low: float, high: float, *, configuration: Any = None
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
