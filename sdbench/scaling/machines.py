"""The command `scaling machines`: machines of a training, by where pictures are encoded.

    trained = trainers x images/s of one x scaling efficiency
    encoders = trained x (1 + margin) / images/s of one, rounded up; decoders likewise
    hours = images / images/s of the slowest workers / 3600
    cost = hours x sum over the kinds of machines of number x price

A decoder is a CPU worker with a core of its own that reads, decodes and tokenizes. Intervals assume
that all rates deviate in the same direction; intervals of hours and cost are for the planned
machines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from sdbench.report.tables import Field, tabulate
from sdbench.report.terminal import NOT_KNOWN, format_number
from sdbench.scaling.cost import (
    RecipeFlags,
    describe_recipe,
    load_machine,
    load_recipe,
    source_of,
)
from sdbench.scaling.points import (
    MODELLED,
    OUT_HELP,
    Amount,
    Row,
    in_words,
    range_field,
    show,
    swap_ends,
    value_field,
    whole_field,
    write_rows,
)
from sdbench.scaling.worker_rates import (
    DECODER,
    ENCODER,
    ENCODING_TRAINER,
    TRAINER,
    Rates,
    RatesFlags,
    read_rates,
)
from sdbench.settings.kinds import (
    NOT_NEGATIVE_NUMBER,
    PATH,
    POSITIVE,
    TEXT,
    number,
    whole_number,
)
from sdbench.settings.setting import REQUIRED, setting, shared

DESCRIPTION = """\
How many machines of which kind a training takes, for how long and at which price, if its pictures
are encoded by GPUs beside the trainers (online preprocessing), in the step of the trainers, or once
before the training. Works from images/s of one trainer, one encoder and one decoder (a CPU worker
that reads, decodes and tokenizes): records of this suite, or numbers. Encoders and decoders are as
many as keep the trainers from waiting, with a margin, or as many as you have: then the slowest
decides. Intervals of the rates are carried to every figure. What it does not know it leaves out:
storage of latents, disturbed runs, and what a network slows down.
"""

EPILOG = """\
examples:
  python -m sdbench scaling machines --recipe seed002 --num_trainers 32 --scaling_efficiency 0.95 \\
      --trainer_rates 256=138.7:135:142 512=44.3:43:46 --in_step_rates 256=70:68:72 512=24:23:25 \\
      --encoder_rates 256=100:95:105 512=32:31:33 --decoder_rates 256=25:24:26 512=18:17:19 \\
      --trainer_machine p4de.24xlarge-reserved --encoder_machine g5.2xlarge-on-demand \\
      --num_encoders 48 --num_dataset_images 800000000
      The rates are made up: give records of your machines, --encoder_rates runs/*_precompute-* ...
"""

# More than 1 is not scaling: the rates were measured badly.
EFFICIENCY = number("a number above 0, at most 1", lambda value: 0 < value <= 1)
SECONDS_PER_HOUR = 3600
# Relative rounding error of a quotient that is a whole number.
ROUNDING = 1e-9

ONLINE_PREPROCESSING = "encoders beside the trainers"
IN_STEP = "encoders in the step"
PRECOMPUTED_ONCE = "latents made once, before"
TRAINERS, ENCODERS, DECODERS = "trainers", "encoders", "decoders"
COUNTS = ("num_trainers", "num_encoders", "num_decoders")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachinesFlags(RatesFlags):
    """Flags of machines."""

    recipe: str = shared(RecipeFlags, "recipe")
    recipes: Path | None = shared(RecipeFlags, "recipes")
    num_trainers: int = setting(POSITIVE, REQUIRED, "GPUs that train")
    scaling_efficiency: float = setting(
        EFFICIENCY,
        REQUIRED,
        "assumed: images/s of one of these trainers over those in --trainer_rates; 1 if these were "
        "measured on as many",
    )
    num_encoders: int | None = setting(POSITIVE, None, "(default: as many as the trainers take)")
    num_decoders: int | None = setting(POSITIVE, None, "(default: as many as the trainers take)")
    margin: float = setting(
        NOT_NEGATIVE_NUMBER, 0.1, "share by which encoders and decoders may do more than is taken"
    )
    trainer_machine: str = setting(TEXT, REQUIRED, "a row under machines in --prices")
    encoder_machine: str = setting(TEXT, REQUIRED, "likewise")
    decoder_machine: str | None = setting(
        TEXT, None, "likewise (default: the CPU cores of the encoders' machines)"
    )
    num_dataset_images: int | None = setting(
        whole_number(1, 10**12),
        None,
        "pictures that are encoded if that is done once (default: those of each stage, none twice)",
    )
    prices: Path | None = shared(RecipeFlags, "prices")
    out: Path | None = setting(PATH, None, OUT_HELP)


def run(flags: MachinesFlags) -> None:
    """Print the machines that a training takes, by where its pictures are encoded."""
    recipe = load_recipe(flags)
    stages = recipe["stages"]
    rates = read_rates(flags, {stage["image_size"] for stage in stages})
    machines = {
        name: load_machine(chosen, flag=f"--{name}_machine", path=flags.prices)
        for name in ("trainer", "encoder", "decoder")
        if (chosen := getattr(flags, f"{name}_machine")) is not None
    }
    feedings = [_feed(stage["image_size"], rates, machines, flags) for stage in stages]
    ways = _plan_ways(stages, rates, machines, flags, feedings)
    sums = {way: {"way": way, **_sum(jobs)} for way, jobs in ways.items()}
    jobs = [{"way": way, **job} for way, of_way in ways.items() for job in of_way]
    lines = describe_recipe(recipe) + _describe_machines(machines, flags) + _describe_rates(rates)
    tables = ((FEEDING, feedings), (JOB, jobs), (WAY, sums.values()))
    show(lines, *(tabulate(fields, rows) for fields, rows in tables))
    print()
    for amount, word, unit in (("cost_usd", "cheapest", "USD"), ("hours", "fastest", "hours")):
        print(_advise({way: row[amount] for way, row in sums.items()}, word=word, unit=unit))
    source = f"recipe {recipe['name']} at rates of one worker"
    common = {"source": source, "kind": MODELLED, "recipe": recipe["name"]}
    write_rows(flags.out, [{**common, **job} for job in jobs])


def _feed(
    size: int, rates: Rates, machines: Mapping[str, Row], flags: MachinesFlags
) -> dict[str, Any]:
    """The encoders and decoders that keep the trainers busy at a resolution, and their machines."""
    trained = flags.num_trainers * flags.scaling_efficiency * rates[TRAINER][size]
    wanted = trained * (1 + flags.margin)
    encoders, decoders = (
        np.ceil(wanted / swap_ends(rates[worker][size]) * (1 - ROUNDING))
        for worker in (ENCODER, DECODER)
    )
    num_encoders = flags.num_encoders or int(encoders[0])
    num_decoders = flags.num_decoders or int(decoders[0])
    encoding = machines["encoder"]
    decoding = machines.get("decoder", encoding)
    for_encoders = math.ceil(num_encoders / encoding["num_devices"])
    for_decoders = math.ceil(num_decoders / decoding["num_cpu_cores"])
    beside = [(encoding, for_encoders), (decoding, for_decoders)]
    if "decoder" not in machines:  # the decoders are on the cores of the encoders' machines
        beside = [(encoding, max(for_encoders, for_decoders))]
    return {
        "image_size": size,
        "trained": trained,
        "encoders_needed": encoders,
        "decoders_needed": decoders,
        "num_encoders": num_encoders,
        "num_decoders": num_decoders,
        "machines": beside,
    }


def _plan_ways(
    stages: Sequence[Row],
    rates: Rates,
    machines: Mapping[str, Row],
    flags: MachinesFlags,
    feedings: Sequence[Mapping[str, Any]],
) -> dict[str, list[Row]]:
    """The jobs of each way to train, in order.

    Encoders in the step are left out if their rate is not known.
    """
    ways: dict[str, list[Row]] = {ONLINE_PREPROCESSING: [], IN_STEP: [], PRECOMPUTED_ONCE: []}
    trainer = machines["trainer"]
    trainers = (trainer, math.ceil(flags.num_trainers / trainer["num_devices"]))
    num_own_decoders = trainers[1] * trainer["num_cpu_cores"]
    training_ranks = {"num_trainers": flags.num_trainers}
    for stage, feeding in zip(stages, feedings, strict=True):
        size = stage["image_size"]
        beside = {name: feeding[name] for name in ("num_encoders", "num_decoders")}
        training = {TRAINERS: feeding["trained"]}
        encoding = {ENCODERS: feeding["num_encoders"] * rates[ENCODER][size]}
        decoding = {DECODERS: feeding["num_decoders"] * rates[DECODER][size]}
        # Workers whose number follows from the need are fast enough.
        at_work = training | (encoding if flags.num_encoders else {})
        at_work |= decoding if flags.num_decoders else {}
        both = [trainers, *feeding["machines"]]
        ways[ONLINE_PREPROCESSING].append(_make_job(stage, at_work, both, training_ranks | beside))
        if size in rates[ENCODING_TRAINER]:
            rate = flags.num_trainers * flags.scaling_efficiency * rates[ENCODING_TRAINER][size]
            at_work = {TRAINERS: rate, DECODERS: num_own_decoders * rates[DECODER][size]}
            counts = training_ranks | {"num_decoders": num_own_decoders}
            ways[IN_STEP].append(_make_job(stage, at_work, [trainers], counts))
        once = {**stage, "num_images": flags.num_dataset_images or stage["num_images"]}
        ways[PRECOMPUTED_ONCE] += [
            _make_job(once, encoding | decoding, feeding["machines"], beside),
            _make_job(stage, training, [trainers], training_ranks),
        ]
    if len(ways[IN_STEP]) < len(stages):
        del ways[IN_STEP]
    return ways


def _make_job(
    stage: Row,
    at_work: Mapping[str, Amount],
    machines: Sequence[tuple[Row, int]],
    counts: Mapping[str, int],
) -> Row:
    """A stage of the training, or the encoding of its data set, at the pace of the slowest.

    The slowest are the workers with the lowest rate, and others whose known interval overlaps.
    """
    names = sorted(at_work, key=lambda name: at_work[name][0])
    lowest = at_work[names[0]]
    # Comparisons with NaN are False: without an interval no other worker counts as the slowest.
    slowest = [names[0], *(name for name in names[1:] if at_work[name][1] < lowest[2])]
    # NaN for an end that one of them lacks.
    rate = reduce(np.minimum, at_work.values())
    hours = stage["num_images"] / swap_ends(rate) / SECONDS_PER_HOUR
    work = "train" if "num_trainers" in counts else "encode"
    return {
        "job": f"{work} at {stage['image_size']} px",
        **stage,
        **{name: counts.get(name, 0) for name in COUNTS},
        "machines": _count_machines(machines),
        "images_per_second": rate,
        "slowest": " or ".join(slowest),
        "hours": hours,
        "cost_usd": hours * sum(number * machine["value"] for machine, number in machines),
    }


def _sum(jobs: Sequence[Row]) -> Row:
    sums = {name: sum(job[name] for job in jobs) for name in ("hours", "cost_usd")}
    return sums | {
        name: round(sum(float(job["hours"][0]) * job[name] for job in jobs)) for name in COUNTS
    }


def _describe_machines(machines: Mapping[str, Row], flags: MachinesFlags) -> list[str]:
    by_name = {machine["name"]: machine for machine in machines.values()}
    return [
        f"assumed: scaling efficiency {flags.scaling_efficiency:g} of {flags.num_trainers} "
        f"trainers, and a margin of {flags.margin:.0%} for encoders and decoders",
        *(
            f"machine {name}: devices {one['num_devices']}, CPU cores {one['num_cpu_cores']}, "
            f"{format_number(one['value'])} USD an hour ({source_of(one)})"
            for name, one in by_name.items()
        ),
    ]


def _describe_rates(rates: Rates) -> list[str]:
    return [
        f"images/s of {worker.name}: "
        + ", ".join(
            f"{format_number(rate[0])} ({in_words(rate, unknown=NOT_KNOWN)}) at {size} px"
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


def _count_machines(machines: Sequence[tuple[Row, int]]) -> str:
    return ", ".join(f"{number} x {machine['name']}" for machine, number in machines)


FEEDING = (
    Field("px", "image_size"),
    value_field("trainers take, images/s", "trained", digits=5),
    range_field("95 % interval", "trained", unknown=NOT_KNOWN),
    whole_field("encoders needed", "encoders_needed"),
    range_field("low to high", "encoders_needed", unknown=NOT_KNOWN),
    whole_field("decoders needed", "decoders_needed"),
    range_field("low to high", "decoders_needed", unknown=NOT_KNOWN),
    Field("planned", lambda row: f"{row['num_encoders']} encoders, {row['num_decoders']} decoders"),
    Field("on", lambda row: _count_machines(row["machines"])),
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
