"""The machines of a training as text and as rows of a CSV file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.report.tables import Cell, Field, make_cell, make_table, tabulate, to_terminal
from sdbench.report.terminal import NOT_KNOWN, format_number
from sdbench.scaling.answers import amount_columns, format_range, range_field, whole_field
from sdbench.scaling.cost import Amount, Machine
from sdbench.scaling.machines import Feeding, Fleet, Job, WorkerRates, add


def describe_fleet(fleet: Fleet) -> list[str]:
    """Lines on what is assumed, and on the machines with the sources of their prices."""
    machines = {one.name: one for one in _machines_of(fleet) if one is not None}
    prices = [
        f"machine {name}: devices {one.num_devices}, CPU cores {one.num_cpu_cores}, "
        f"{format_number(one.usd_per_hour)} USD an hour ({one.source})"
        for name, one in machines.items()
    ]
    return [
        f"assumed: scaling efficiency {fleet.scaling_efficiency:g} of {fleet.num_trainers} "
        f"trainers, and a margin of {fleet.margin:.0%} for encoders and decoders",
        *prices,
    ]


def _machines_of(fleet: Fleet) -> tuple[Machine | None, ...]:
    return fleet.trainer_machine, fleet.encoder_machine, fleet.decoder_machine


def describe_rates(rates: WorkerRates) -> list[str]:
    """A line on each kind of worker with images/s of one."""
    names = {
        "trainer": "one trainer on latents",
        "encoding_trainer": "one trainer with encoders in the step",
        "encoder": "one encoder",
        "decoder": "one decoder",
    }
    return [
        f"images/s of {name}: "
        + ", ".join(f"{_with_range(rate)} at {size} px" for size, rate in sorted(by_size.items()))
        for field, name in names.items()
        if (by_size := getattr(rates, field))
    ]


def format_feedings(feedings: Sequence[Feeding]) -> str:
    """Make the table of encoders and decoders that the trainers take at each resolution."""
    rows = [
        {
            "px": one.image_size,
            "trainers take, images/s": _cell(one.trained),
            "95 % interval": _range(one.trained),
            "encoders needed": round(one.encoders_needed[0]),
            "low to high": _range(one.encoders_needed),
            "decoders needed": round(one.decoders_needed[0]),
            "low to high ": _range(one.decoders_needed),
            "planned": f"{one.num_encoders} encoders, {one.num_decoders} decoders",
            "on": _describe_machines(one.machines),
        }
        for one in feedings
    ]
    return to_terminal(make_table(rows))


def format_jobs(ways: Mapping[str, Sequence[Job]]) -> str:
    """Make the table of all jobs, those of a way below each other."""
    return to_terminal(tabulate(JOB, job_rows(ways, recipe="")))


def format_ways(ways: Mapping[str, Sequence[Job]]) -> str:
    """Make the table of the ways to train with their sums."""
    rows = [
        {
            "way": way,
            **amount_columns("hours", _hours(jobs)),
            "days": format_number(_hours(jobs)[0] / 24),
            "GPU-hours of trainers": round(_worked(jobs, "num_trainers")),
            "of encoders": round(_worked(jobs, "num_encoders")),
            "core-hours of decoders": round(_worked(jobs, "num_decoders")),
            **amount_columns("cost_usd", _cost(jobs)),
        }
        for way, jobs in ways.items()
    ]
    return to_terminal(tabulate(WAY, rows))


def advise(ways: Mapping[str, Sequence[Job]], *, terabytes: float) -> list[str]:
    """Sentences on the cheapest and the fastest way, and on what has no price here."""
    sentences = []
    for word, amount_of, unit in (("cheapest", _cost, "USD"), ("fastest", _hours, "hours")):
        amounts = {way: amount_of(jobs) for way, jobs in ways.items()}
        best = min(amounts, key=lambda way: amounts[way][0])
        others = {way: amount for way, amount in amounts.items() if way != best}
        overlapping = [way for way, amount in others.items() if amount[1] <= amounts[best][2]]
        sentence = f"The {word} is {best}, {amounts[best][0]:,.0f} {unit}"
        if overlapping:
            sentence += f"; the intervals do not exclude {' or '.join(overlapping)}"
        if any(math.isnan(amount[1]) for amount in amounts.values()):
            sentence += "; some rates have no interval, so that is not tested"
        sentences.append(f"{sentence}.")
    size = f"{terabytes:,.1f} TB" if terabytes >= 1 else f"{1000 * terabytes:,.1f} GB"
    return [*sentences, f"Latents made once take {size} of storage, whose price is not in it."]


def job_rows(ways: Mapping[str, Sequence[Job]], *, recipe: str) -> list[dict[str, Any]]:
    """Make the rows of the CSV file, one for each job."""
    return [
        {
            "source": f"recipe {recipe} at rates of one worker",
            "kind": "modelled",
            "recipe": recipe,
            "way": way,
            "job": _name(job),
            "image_size": job.image_size,
            "num_images": job.num_images,
            "num_trainers": job.num_trainers,
            "num_encoders": job.num_encoders,
            "num_decoders": job.num_decoders,
            "machines": _describe_machines(job.machines),
            **amount_columns("images_per_second", job.images_per_second),
            "slowest": " or ".join(job.slowest),
            **amount_columns("hours", job.hours),
            **amount_columns("cost_usd", job.cost_usd),
        }
        for way, jobs in ways.items()
        for job in jobs
    ]


def _name(job: Job) -> str:
    return f"{'train' if job.num_trainers else 'encode'} at {job.image_size} px"


def _hours(jobs: Sequence[Job]) -> Amount:
    return add([job.hours for job in jobs])


def _cost(jobs: Sequence[Job]) -> Amount:
    return add([job.cost_usd for job in jobs])


def _worked(jobs: Sequence[Job], workers: str) -> float:
    """Hours times workers of a kind."""
    return sum(float(job.hours[0]) * getattr(job, workers) for job in jobs)


def _describe_machines(machines: Sequence[tuple[Machine, int]]) -> str:
    return ", ".join(f"{number} x {machine.name}" for machine, number in machines)


def _cell(amount: Amount) -> Cell:
    return make_cell(float(amount[0]), num_digits=5)


def _range(amount: Amount) -> str:
    return NOT_KNOWN if math.isnan(amount[1]) else format_range(*amount[1:])


def _with_range(amount: Amount) -> str:
    return f"{format_number(amount[0])} ({_range(amount)})"


HOURS = (
    Field("hours", "hours", digits=5),
    range_field("95 % interval", "hours", unknown=NOT_KNOWN),
)
JOB = (
    *(Field(name, name) for name in ("way", "job", "machines")),
    Field("images/s", "images_per_second", digits=5),
    Field("slowest", "slowest"),
    *HOURS,
    whole_field("cost, USD", "cost_usd"),
)
WAY = (
    Field("way", "way"),
    *HOURS,
    *(Field(name, name) for name in ("days", "GPU-hours of trainers", "of encoders")),
    Field("core-hours of decoders", "core-hours of decoders"),
    whole_field("cost, USD", "cost_usd"),
    range_field("95 % interval, USD", "cost_usd", unknown=NOT_KNOWN),
)
