"""At how many images/s does a table, or the user, let a recipe run?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sdbench.base.errors import ConfigError
from sdbench.report.figures import MEASURED, as_text, parse_conditions
from sdbench.scaling.cost import Recipe, Value
from sdbench.scaling.table import IMAGE_SIZE, Row, check_one_kind, known_values
from sdbench.statistics.intervals import between_runs_interval

# Images/s of all GPUs together, by number of GPUs and by resolution.
Rates = dict[int, dict[int, Value]]


def parse_rates(texts: Sequence[str], *, gpu_counts: Sequence[int]) -> Rates:
    """Throughput as the user gives it.

    Args:
        texts: ``IMAGE_SIZE=IMAGES_PER_SECOND``.
        gpu_counts: Of how many GPUs it is: one number.

    Raises:
        ConfigError: If a text is none of that kind, or there is not one number of GPUs.
    """
    given = parse_conditions(texts, flag="--images_per_second")
    try:
        rates = {int(size): Value(float(rate)) for size, rate in given.items()}
    except ValueError:
        rates = {}
    if not rates or not all(0 < one.value < math.inf for one in rates.values()):
        raise ConfigError(
            "a throughput is no number",
            value=" ".join(texts),
            allowed="IMAGE_SIZE=IMAGES_PER_SECOND of all GPUs together, e.g. 256=1100 512=290",
            flag="--images_per_second",
        )
    if len(gpu_counts) != 1:
        raise ConfigError(
            "a throughput that is given is that of one number of GPUs",
            value=list(gpu_counts),
            allowed="one number",
            flag="--num_gpus",
        )
    return {gpu_counts[0]: rates}


def find_rates(rows: Sequence[Row], recipe: Recipe, *, gpu_counts: Sequence[int]) -> Rates:
    """Throughput of a table at the resolutions of a recipe.

    Args:
        rows: Figures of one kind of work, of any resolution.
        recipe: The training.
        gpu_counts: Numbers of GPUs to look at; none takes all of them.

    Raises:
        ConfigError: If there is no such number of GPUs, or several figures for one resolution that
            are no runs of one configuration.
    """
    groups: dict[int, dict[int, list[Row]]] = {}
    for row in rows:
        if not gpu_counts or row["num_gpus"] in gpu_counts:
            groups.setdefault(row["num_gpus"], {}).setdefault(row.get(IMAGE_SIZE), []).append(row)
    if not groups:
        raise ConfigError(
            "no figure is of so many GPUs",
            value=list(gpu_counts),
            allowed=", ".join(map(as_text, known_values(rows, "num_gpus"))),
            flag="--num_gpus; python -m sdbench scaling predict makes figures of others",
        )
    sizes = {stage.image_size for stage in recipe.stages}
    return {
        num_gpus: {size: _rate_of(runs) for size, runs in by_size.items() if size in sizes}
        for num_gpus, by_size in groups.items()
    }


def split_complete(rates: Rates, recipe: Recipe) -> tuple[Rates, list[str]]:
    """Keep the numbers of GPUs that have a throughput for every stage.

    Args:
        rates: Throughput.
        recipe: The training.

    Returns:
        Those, and a line for each of the others; all of them if none is complete.
    """
    needed = {stage.image_size for stage in recipe.stages}
    complete = {num_gpus: found for num_gpus, found in rates.items() if needed <= found.keys()}
    if not complete:
        return rates, []
    return complete, [
        f"left out: {num_gpus} GPUs, without a figure at {_sizes(needed, found)}"
        for num_gpus, found in rates.items()
        if num_gpus not in complete
    ]


def _sizes(needed: set[int], found: Mapping[int, Value]) -> str:
    return " and ".join(f"{size} px" for size in sorted(needed - found.keys()))


def _rate_of(rows: Sequence[Row]) -> Value:
    """The figure of one configuration; three or more runs have an interval between them."""
    check_one_kind(rows, ("kind", "micro_batch", "global_batch"))
    figures = [float(row["images_per_second"]) for row in rows]
    if len(rows) == 1:
        ends = (rows[0].get(f"images_per_second_{end}") for end in ("low", "high"))
        return Value(figures[0], *ends)
    if any(row.get("kind") != MEASURED for row in rows):
        check_one_kind(rows, ("source",))
    interval = between_runs_interval(figures)
    mean = math.exp(math.fsum(map(math.log, figures)) / len(figures))
    return Value(mean, interval.low, interval.high) if interval else Value(mean)
