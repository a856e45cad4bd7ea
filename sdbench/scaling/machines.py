"""Machines, hours and cost of a training for three ways to encode its pictures.

    trained = trainers x images/s of one x scaling efficiency
    encoders = trained x (1 + margin) / images/s of one, decoders likewise
    hours = images / images/s of the slowest workers / 3600
    cost = hours x sum over the kinds of machines of number x price

Pictures are encoded by GPUs beside the trainers (online preprocessing), in the step of the
trainers, or once before the training. Works from images/s of one trainer, one encoder and one
decoder (a CPU worker with a core of its own that reads, decodes and tokenizes): records of this
suite, or numbers. By default there are enough encoders and decoders to keep the trainers from
waiting, with a margin; with numbers that you give, the slowest workers set the pace. Intervals of
the rates carry over to every figure, as if all rates deviated in the same direction; those of hours
and cost are for the planned machines. Not included: storage of latents, interrupted runs, and slow
networks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sdbench.analysis import feed_table
from sdbench.base.errors import ConfigError
from sdbench.record.configuration import as_key, group, place_of_encoders, settings_of
from sdbench.record.store import BENCHMARK, FEED, OK, PRECOMPUTE, kind_of
from sdbench.report.figures import MEASURED
from sdbench.report.runs import read_record, use_each
from sdbench.report.tables import Field, tabulate
from sdbench.report.terminal import NOT_KNOWN, format_number
from sdbench.scaling import points
from sdbench.scaling.cost import RecipeFlags, describe_recipe, load_machine, load_recipe, source_of
from sdbench.scaling.points import IMAGE_SIZE, Amount, Row, range_field, value_field, whole_field
from sdbench.settings.data import ONLINE, PRECOMPUTED
from sdbench.settings.kinds import (
    NOT_NEGATIVE_NUMBER,
    PATH,
    POSITIVE,
    POSITIVE_NUMBER,
    TEXT,
    Kind,
    number,
    whole_number,
)
from sdbench.settings.ray import RAY
from sdbench.settings.setting import REQUIRED, setting, shared

EPILOG = """\
examples:
  python -m sdbench scaling machines --recipe anyscale --num_trainers 32 \\
      --scaling_efficiency 0.95 --trainer_rates 256=138.7:135:142 512=44.3:43:46 \\
      --in_step_rates 256=70:68:72 512=24:23:25 \\
      --encoder_rates 256=100:95:105 512=32:31:33 --decoder_rates 256=25:24:26 512=18:17:19 \\
      --trainer_machine p4de.24xlarge-reserved --encoder_machine g5.2xlarge-on-demand \\
      --num_encoders 48 --num_dataset_images 800000000
      The rates are made up: give records of your machines, --encoder_rates runs/*_precompute-* ...
"""

# More than 1 is not scaling: the rates were measured badly.
EFFICIENCY = number("a number above 0, at most 1", lambda value: 0 < value <= 1)
GIVEN_RATE = re.compile(r"([1-9][0-9]{0,8})=([^:]+)(?::([^:]+):([^:]+))?")
SECONDS_PER_HOUR = 3600
# Relative rounding error of a quotient that is a whole number.
ROUNDING = 1e-9

ONLINE_PREPROCESSING = "encoders beside the trainers"
IN_STEP = "encoders in the step"
PRECOMPUTED_ONCE = "latents made once, before"
TRAINERS, ENCODERS, DECODERS = "trainers", "encoders", "decoders"
COUNTS = ("num_trainers", "num_encoders", "num_decoders")
# A worker of each kind, and what measures its rate, by the flag of the rates.
TRAINER, ENCODING_TRAINER = "trainer_rates", "in_step_rates"
ENCODER, DECODER = "encoder_rates", "decoder_rates"
WORKERS = {
    TRAINER: ("one trainer on latents", "benchmark.py --latents precomputed"),
    ENCODING_TRAINER: (
        "one trainer with encoders in the step",
        "benchmark.py with encoders in the step",
    ),
    ENCODER: ("one encoder", "precompute without Ray, or data.py --engine ray"),
    DECODER: (
        "one decoder",
        "data.py on pictures, with --engine ray or without --emulate_step_seconds",
    ),
}
# Where the encoders of a record of benchmark.py are.
PLACES = {TRAINER: PRECOMPUTED, ENCODING_TRAINER: ONLINE}
# Images/s of one worker by its flag and by resolution, in pixels.
Rates = Mapping[str, Mapping[int, Amount]]


def _parse_rate(text: str) -> Row | Path:
    """Return the row of a figure that is given, or the path of a record."""
    found = GIVEN_RATE.fullmatch(text)
    if found is None:
        return PATH.parse(text)
    rate, *ends = (POSITIVE_NUMBER.parse(part) for part in found.groups()[1:] if part is not None)
    low, high = ends or (None, None)
    if ends and not low <= rate <= high:
        raise ValueError
    return {
        "source": text,
        "kind": "given",
        IMAGE_SIZE: int(found[1]),
        "images_per_second": rate,
        "images_per_second_low": low,
        "images_per_second_high": high,
    }


RATE_OR_RECORD = Kind(
    "IMAGE_SIZE=RATE or IMAGE_SIZE=RATE:LOW:HIGH in images/s, e.g. 256=139:135:143, or a record",
    _parse_rate,
    "TEXT",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachinesFlags:
    """Flags of machines."""

    recipe: str = shared(RecipeFlags, "recipe")
    recipes: Path | None = shared(RecipeFlags, "recipes")
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
        "images/s of one encoder: records of precompute or of data.py --engine ray, or SIZE=RATE",
        takes_several=True,
    )
    decoder_rates: tuple[Row | Path, ...] = setting(
        RATE_OR_RECORD,
        REQUIRED,
        "images/s of one CPU worker with a core of its own: records of data.py, or SIZE=RATE",
        takes_several=True,
    )
    in_step_rates: tuple[Row | Path, ...] = setting(
        RATE_OR_RECORD,
        (),
        "images/s of one trainer that encodes in its step: records of benchmark.py, or SIZE=RATE "
        "(default: this way is left out)",
        takes_several=True,
    )
    num_trainers: int = setting(POSITIVE, REQUIRED, "GPUs that train")
    scaling_efficiency: float = setting(
        EFFICIENCY,
        REQUIRED,
        "assumed images/s of one of these trainers, over those in --trainer_rates; 1 if those were "
        "measured on as many trainers",
    )
    num_encoders: int | None = setting(POSITIVE, None, "(default: as many as the trainers need)")
    num_decoders: int | None = setting(POSITIVE, None, "(default: as many as the trainers need)")
    margin: float = setting(
        NOT_NEGATIVE_NUMBER, 0.1, "spare capacity of encoders and decoders, as a share"
    )
    trainer_machine: str = setting(TEXT, REQUIRED, "a row under machines in --prices")
    encoder_machine: str = setting(TEXT, REQUIRED, "likewise; its CPU cores decode")
    num_dataset_images: int | None = setting(
        whole_number(1, 10**12),
        None,
        "pictures to encode if that is done once (default: as many as each stage trains on)",
    )
    prices: Path | None = shared(RecipeFlags, "prices")
    out: Path | None = setting(PATH, None, points.OUT_HELP)


class Machines(NamedTuple):
    """Machines of one kind."""

    row: Row
    number: int

    def __str__(self) -> str:
        return f"{self.number} x {self.row['name']}"


def run(flags: MachinesFlags) -> None:
    """Print the machines that a training takes, by where its pictures are encoded."""
    recipe = load_recipe(flags)
    stages = recipe["stages"]
    rates = _read_rates(flags, {stage["image_size"] for stage in stages})
    trainer = load_machine(flags.trainer_machine, flag="--trainer_machine", path=flags.prices)
    encoder = load_machine(flags.encoder_machine, flag="--encoder_machine", path=flags.prices)
    feedings = [_feed(stage["image_size"], rates, encoder, flags) for stage in stages]
    ways = _plan_ways(stages, rates, trainer, flags, feedings)
    sums = {way: {"way": way, **_sum(jobs)} for way, jobs in ways.items()}
    jobs = [{"way": way, **job} for way, of_way in ways.items() for job in of_way]
    lines = [*describe_recipe(recipe), *_describe_machines(trainer, encoder, flags)]
    lines += _describe_rates(rates)
    points.show(
        lines, tabulate(FEEDING, feedings), tabulate(JOB, jobs), tabulate(WAY, sums.values())
    )
    print()
    for amount, word, unit in (("cost_usd", "cheapest", "USD"), ("hours", "fastest", "hours")):
        print(_advise({way: row[amount] for way, row in sums.items()}, word=word, unit=unit))
    source = f"recipe {recipe['name']} at rates of one worker"
    common = {"source": source, "kind": points.MODELLED, "recipe": recipe["name"]}
    points.write_rows(flags.out, [{**common, **job} for job in jobs])


def _read_rates(flags: MachinesFlags, sizes: Collection[int]) -> Rates:
    """Read the rates of all workers at these resolutions, in pixels, from their flags.

    Three or more records of a resolution give an interval between runs. A record that cannot be
    read, or has no such rate, is named on stderr and left out.
    """
    found: dict[str, dict[int, Amount]] = {}
    for worker in WORKERS:
        given = getattr(flags, worker)
        files = [one for one in given if isinstance(one, Path)]
        rows, _ = use_each(files, functools.partial(_read_row, worker=worker))
        rows += [one for one in given if not isinstance(one, Path)]
        by_size = group(rows, key_of=lambda row: row[IMAGE_SIZE])
        for size, of_size in by_size.items():
            configurations = {row.get("configuration") for row in of_size}
            if len(of_size) > 1 and (len(configurations) > 1 or None in configurations):
                raise ConfigError(
                    f"several rates at {size} px are not from runs of one configuration",
                    value=" ".join(row["source"] for row in of_size),
                    allowed="one rate for each resolution, or runs that differ in nothing",
                    flag=f"--{worker}",
                )
        if given and not by_size.keys() >= set(sizes):
            raise ConfigError(
                f"--{worker} lacks a resolution of the recipe",
                value=" and ".join(f"{size} px" for size in by_size),
                allowed="rates at " + " and ".join(f"{size} px" for size in sorted(sizes)),
                flag=f"--{worker}",
            )
        found[worker] = {size: points.rate_of(of_size) for size, of_size in by_size.items()}
    return found


def _read_row(path: Path, *, worker: str) -> Row:
    record = read_record(path, flag=f"--{worker}")
    size = record["config"]["image_size"]
    found = _find_rate(record, worker) if record["status"] == OK else None
    # A record of several resolutions has a text here.
    if found is None or not isinstance(size, int):
        raise ConfigError(
            "a record has no rate of such a worker at one resolution",
            value=f"{path}: {kind_of(record)}, {record['status']}, {size} px",
            allowed=f"records of {WORKERS[worker][1]} that ended well, or SIZE=RATE",
            flag=f"--{worker}",
        )
    rate, interval = found
    is_training = kind_of(record) == BENCHMARK
    settings = settings_of(record) if is_training else feed_table.configuration_of(record)
    return {
        "source": str(path),
        "kind": MEASURED,
        IMAGE_SIZE: size,
        "images_per_second": rate,
        "images_per_second_low": interval.get("low"),
        "images_per_second_high": interval.get("high"),
        "configuration": as_key(settings),
    }


def _find_rate(
    record: Mapping[str, Any], worker: str
) -> tuple[float, Mapping[str, float | None]] | None:
    """The rate of one worker in a record, and its interval; None if the record has no such rate."""
    kind, config, summary = kind_of(record), record["config"], record["summary"]
    name = f"images_per_second_per_{worker.removesuffix('_rates')}"
    stages = summary.get("ray") or {}
    if kind == FEED and stages.get(name):
        return stages[name], stages[f"{name}_interval"] or {}
    if kind == FEED and worker == DECODER and config["latents"] == ONLINE:
        name = "images_per_second_per_core"
    elif (kind == BENCHMARK and place_of_encoders(config) == PLACES.get(worker)) or (
        # With Ray the rate is that of decoders, encoders and the process together.
        kind == PRECOMPUTE and worker == ENCODER and config.get("engine") != RAY
    ):
        name = "images_per_second_per_device"
    else:
        return None
    # With an emulated step the rate is that of the trainer, and the record has none of a core.
    if summary[name] is None:
        return None
    interval = summary.get("images_per_second_interval") or {}
    share = summary[name] / summary["images_per_second"]
    ends = {end: interval.get(end) for end in ("low", "high")}
    return summary[name], {end: value and share * value for end, value in ends.items()}


def _feed(size: int, rates: Rates, encoder: Row, flags: MachinesFlags) -> dict[str, Any]:
    """The encoders and decoders that keep the trainers busy at a resolution, and their machines."""
    trained = flags.num_trainers * flags.scaling_efficiency * rates[TRAINER][size]
    wanted = trained * (1 + flags.margin)
    encoders, decoders = (
        np.ceil(wanted / points.swap_ends(rates[worker][size]) * (1 - ROUNDING))
        for worker in (ENCODER, DECODER)
    )
    num_encoders = flags.num_encoders or int(encoders[0])
    num_decoders = flags.num_decoders or int(decoders[0])
    for_encoders = math.ceil(num_encoders / encoder["num_devices"])
    for_decoders = math.ceil(num_decoders / encoder["num_cpu_cores"])
    return {
        "image_size": size,
        "trained": trained,
        "encoders_needed": encoders,
        "decoders_needed": decoders,
        "num_encoders": num_encoders,
        "num_decoders": num_decoders,
        "machines": Machines(encoder, max(for_encoders, for_decoders)),
    }


def _plan_ways(
    stages: Sequence[Row],
    rates: Rates,
    trainer: Row,
    flags: MachinesFlags,
    feedings: Sequence[Mapping[str, Any]],
) -> dict[str, list[Row]]:
    """The jobs of each way to train, in order; without encoders in the step if no rate is known."""
    ways: dict[str, list[Row]] = {ONLINE_PREPROCESSING: [], IN_STEP: [], PRECOMPUTED_ONCE: []}
    trainers = Machines(trainer, math.ceil(flags.num_trainers / trainer["num_devices"]))
    num_own_decoders = trainers.number * trainer["num_cpu_cores"]
    training_ranks = {"num_trainers": flags.num_trainers}
    for stage, feeding in zip(stages, feedings, strict=True):
        size = stage["image_size"]
        beside = {name: feeding[name] for name in ("num_encoders", "num_decoders")}
        training = {TRAINERS: feeding["trained"]}
        encoding = {ENCODERS: feeding["num_encoders"] * rates[ENCODER][size]}
        decoding = {DECODERS: feeding["num_decoders"] * rates[DECODER][size]}
        # Workers whose number was computed from the need are fast enough.
        at_work = training | (encoding if flags.num_encoders else {})
        at_work |= decoding if flags.num_decoders else {}
        both = [trainers, feeding["machines"]]
        ways[ONLINE_PREPROCESSING].append(_make_job(stage, at_work, both, training_ranks | beside))
        if size in rates[ENCODING_TRAINER]:
            rate = flags.num_trainers * flags.scaling_efficiency * rates[ENCODING_TRAINER][size]
            at_work = {TRAINERS: rate, DECODERS: num_own_decoders * rates[DECODER][size]}
            counts = training_ranks | {"num_decoders": num_own_decoders}
            ways[IN_STEP].append(_make_job(stage, at_work, [trainers], counts))
        once = {**stage, "num_images": flags.num_dataset_images or stage["num_images"]}
        ways[PRECOMPUTED_ONCE] += [
            _make_job(once, encoding | decoding, [feeding["machines"]], beside),
            _make_job(stage, training, [trainers], training_ranks),
        ]
    return {way: jobs for way, jobs in ways.items() if jobs}


def _make_job(
    stage: Row,
    at_work: Mapping[str, Amount],
    machines: Sequence[Machines],
    counts: Mapping[str, int],
) -> Row:
    """A stage of the training, or the encoding of its data set, at the pace of the slowest workers.

    Slowest are the workers with the lowest rate, and others whose known interval overlaps it.
    """
    names = sorted(at_work, key=lambda name: at_work[name][0])
    lowest = at_work[names[0]]
    # Comparisons with NaN are False: without an interval no other worker counts as the slowest.
    slowest = [names[0], *(name for name in names[1:] if at_work[name][1] < lowest[2])]
    # An end that one of them lacks is NaN.
    rate = functools.reduce(np.minimum, at_work.values())
    hours = stage["num_images"] / points.swap_ends(rate) / SECONDS_PER_HOUR
    work = "train" if "num_trainers" in counts else "encode"
    return {
        "job": f"{work} at {stage['image_size']} px",
        **stage,
        **{name: counts.get(name, 0) for name in COUNTS},
        "machines": ", ".join(map(str, machines)),
        "images_per_second": rate,
        "slowest": " or ".join(slowest),
        "hours": hours,
        "cost_usd": hours * sum(each.number * each.row["value"] for each in machines),
    }


def _sum(jobs: Sequence[Row]) -> Row:
    sums = {name: sum(job[name] for job in jobs) for name in ("hours", "cost_usd")}
    return sums | {
        name: round(sum(float(job["hours"][0]) * job[name] for job in jobs)) for name in COUNTS
    }


def _describe_machines(trainer: Row, encoder: Row, flags: MachinesFlags) -> list[str]:
    lines = [
        f"assumed: scaling efficiency {flags.scaling_efficiency:g} of {flags.num_trainers} "
        f"trainers, and a margin of {flags.margin:.0%} for encoders and decoders"
    ]
    for one in (trainer, encoder) if trainer != encoder else (trainer,):
        lines.append(
            f"machine {one['name']}: devices {one['num_devices']}, CPU cores "
            f"{one['num_cpu_cores']}, {format_number(one['value'])} USD an hour ({source_of(one)})"
        )
    return lines


def _describe_rates(rates: Rates) -> list[str]:
    return [
        f"images/s of {WORKERS[worker][0]}: "
        + ", ".join(
            f"{format_number(rate[0])} ({points.in_words(rate, unknown=NOT_KNOWN)}) at {size} px"
            for size, rate in sorted(by_size.items())
        )
        for worker, by_size in rates.items()
        if by_size
    ]


def _advise(amounts: Mapping[str, Amount], *, word: str, unit: str) -> str:
    best = min(amounts, key=lambda way: amounts[way][0])
    others = {way: amount for way, amount in amounts.items() if way != best}
    overlapping = [way for way, amount in others.items() if amount[1] <= amounts[best][2]]
    sentence = f"The {word} is {best}, {amounts[best][0]:,.0f} {unit}"
    if overlapping:
        sentence += f"; the intervals do not exclude {' or '.join(overlapping)}"
    if any(math.isnan(amount[1]) for amount in amounts.values()):
        sentence += "; some rates have no interval, so that is not tested"
    return f"{sentence}."


FEEDING = (
    Field("px", "image_size"),
    value_field("trainers take, images/s", "trained", digits=5),
    range_field("95 % interval", "trained", unknown=NOT_KNOWN),
    whole_field("encoders needed", "encoders_needed"),
    range_field("low to high", "encoders_needed", unknown=NOT_KNOWN),
    whole_field("decoders needed", "decoders_needed"),
    range_field("low to high", "decoders_needed", unknown=NOT_KNOWN),
    Field("planned", lambda row: f"{row['num_encoders']} encoders, {row['num_decoders']} decoders"),
    Field("on", "machines"),
)
HOURS = (
    value_field("hours", "hours", digits=5),
    range_field("95 % interval", "hours", unknown=NOT_KNOWN),
)
JOB = (
    *(Field(name, name) for name in ("way", "job", "machines")),
    value_field("images/s", "images_per_second", digits=5),
    Field("slowest", "slowest"),
    *HOURS,
    whole_field("cost, USD", "cost_usd"),
)
WAY = (
    Field("way", "way"),
    *HOURS,
    Field("days", lambda row: float(row["hours"][0]) / 24),
    Field("GPU-hours of trainers", "num_trainers"),
    Field("of encoders", "num_encoders"),
    Field("core-hours of decoders", "num_decoders"),
    whole_field("cost, USD", "cost_usd"),
    range_field("95 % interval, USD", "cost_usd", unknown=NOT_KNOWN),
)
