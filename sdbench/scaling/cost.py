"""Days, GPU-hours, dollars and kilowatt-hours of a training at a given throughput.

    days = sum over the stages of images / images_per_second / 86,400
    GPU-hours = days x 24 x GPUs, cost = GPU-hours x price, energy = GPU-hours x power of the board

Intervals assume that the throughput of all stages deviates in the same direction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdbench.base.errors import ConfigError
from sdbench.base.yaml_file import read_mapping
from sdbench.report.figures import find_name

# A value and the low and high ends of its 95 % interval. NaN: unknown or unbounded.
Amount = np.ndarray

SECONDS_PER_DAY = 86_400
HOURS_PER_DAY = 24
RECIPES_FILE = Path(__file__).with_name("recipes.yaml")
PRICES_FILE = Path(__file__).with_name("prices.yaml")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A number of images at one resolution, in pixels."""

    image_size: int
    num_images: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training of one or more stages, of which ``about`` says what is trained, in words."""

    name: str
    about: str
    source: str
    global_batch: int
    stages: tuple[Stage, ...]


@dataclasses.dataclass(frozen=True)
class Tariff:
    """The price of a GPU-hour in dollars or the power of a GPU board in watts.

    ``source`` has a date; ``others`` are the names of other rows for this GPU.
    """

    value: float
    source: str
    others: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of machine in the file of prices.

    Attributes:
        name: Its name.
        num_devices: Trainers or encoders on it: its GPUs, or 1 if it computes on the CPU.
        num_cpu_cores: Cores; each can run a decoder.
        usd_per_hour: Price of the whole machine.
        source: Source of the price, with a date.
    """

    name: str
    num_devices: int
    num_cpu_cores: int
    usd_per_hour: float
    source: str


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Time, cost and energy of a training.

    Attributes:
        num_gpus: Number of GPUs.
        days_to_train: Days of training, without interruptions and evaluation.
        gpu_hours: GPU-hours.
        cost_usd: Dollars; NaN without a price.
        energy_kwh: Energy of the GPU boards alone; NaN without their power.
    """

    num_gpus: int
    days_to_train: Amount
    gpu_hours: Amount
    cost_usd: Amount
    energy_kwh: Amount


def make_amount(value: float, low: float | None = None, high: float | None = None) -> Amount:
    """Make an amount, with NaN for an unknown end of its interval."""
    return np.array([value, low, high], dtype=float)


def swap_ends(amount: Amount) -> Amount:
    """Return the amount with swapped ends, to divide by it."""
    return amount[[0, 2, 1]]


def estimate(
    recipe: Recipe,
    rates: Mapping[int, Amount],
    *,
    num_gpus: int,
    price: Tariff | None = None,
    power: Tariff | None = None,
) -> Estimate:
    """Estimate a training at images/s of all GPUs together, by resolution in pixels."""
    missing = [stage.image_size for stage in recipe.stages if stage.image_size not in rates]
    if missing:
        raise ConfigError(
            f"{num_gpus} GPUs have no figure at {missing[0]} px, which the recipe {recipe.name} "
            "needs",
            value=sorted(rates),
            allowed="figures at " + " and ".join(f"{one.image_size} px" for one in recipe.stages),
            flag="TABLE, --images_per_second or --recipe",
        )
    seconds = sum(stage.num_images / swap_ends(rates[stage.image_size]) for stage in recipe.stages)
    days = seconds / SECONDS_PER_DAY
    gpu_hours = days * HOURS_PER_DAY * num_gpus
    return Estimate(
        num_gpus=num_gpus,
        days_to_train=days,
        gpu_hours=gpu_hours,
        cost_usd=gpu_hours * (price.value if price else math.nan),
        energy_kwh=gpu_hours * (power.value / 1000 if power else math.nan),
    )


def load_recipe(name: str, *, path: Path | None = None) -> Recipe:
    """Read the recipe with this key, or with the only key that begins so, from a YAML file."""
    path = path or RECIPES_FILE
    content = read_mapping(path, allowed=f"a YAML file like {RECIPES_FILE.name}", flag="--recipes")
    key = find_name(name, list(content), what="there is no such recipe", flag="--recipe")
    try:
        values = content[key]
        stages = tuple(
            Stage(int(stage["image_size"]), int(stage["num_images"])) for stage in values["stages"]
        )
        if not stages or min(min(one.image_size, one.num_images) for one in stages) < 1:
            raise ValueError("a stage without images")
        return Recipe(key, values["about"], values["source"], int(values["global_batch"]), stages)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the recipe {key} cannot be read ({error})",
            value=str(path),
            allowed="about, source, global_batch and stages of image_size and num_images",
            flag="--recipes",
        ) from None


def load_price(
    gpu: str | None, *, chosen: str | None = None, path: Path | None = None
) -> Tariff | None:
    """Read the price of a GPU-hour: the one chosen by name or in dollars, or the first for a GPU.

    Returns:
        The price, or None without a row for this GPU.
    """
    path = path or PRICES_FILE
    if chosen is not None and _is_number(chosen):
        return Tariff(_positive(float(chosen), path=path), "given with --price")
    rows = _load_tariffs(path, "prices", per="GPU-hour", unit="USD", needed=("name",))
    if chosen is not None:
        names = [row["name"] for row in rows]
        name = find_name(chosen, names, what="there is no such price", flag="--price")
        rows = [row for row in rows if row["name"] == name]
    else:
        rows = [row for row in rows if _is_for(gpu, row)]
    return _first(rows)


def load_power(gpu: str | None, *, path: Path | None = None) -> Tariff | None:
    """Read the maximum power of a GPU board, in watts; None without a row for this GPU."""
    rows = _load_tariffs(path or PRICES_FILE, "power", per="GPU board", unit="W")
    return _first([row for row in rows if _is_for(gpu, row)])


def load_machine(name: str, *, flag: str, path: Path | None = None) -> Machine:
    """Read the machine with this name, or with the only name that begins so, which a flag gives."""
    needed = ("name", "num_devices", "num_cpu_cores")
    rows = _load_tariffs(
        path or PRICES_FILE, "machines", per="machine-hour", unit="USD", needed=needed
    )
    by_name = {row["name"]: row for row in rows}
    row = by_name[find_name(name, list(by_name), what="there is no such machine", flag=flag)]
    counts = [row["num_devices"], row["num_cpu_cores"]]
    if not all(type(count) is int and count > 0 for count in counts):
        raise ConfigError(
            f"the devices or cores of {row['name']} are not whole numbers above 0",
            value=counts,
            allowed="num_devices: its GPUs, or 1 if it computes on the CPU; num_cpu_cores",
            flag="--prices",
        )
    return Machine(row["name"], *counts, float(row["value"]), _source_of(row))


def _first(rows: Sequence[dict[str, Any]]) -> Tariff | None:
    if not rows:
        return None
    others = tuple(row["name"] for row in rows[1:] if "name" in row)
    return Tariff(float(rows[0]["value"]), _source_of(rows[0]), others)


def _source_of(row: Mapping[str, Any]) -> str:
    return f"{row['source']}; {row['date']}"


def _is_for(gpu: str | None, row: dict[str, Any]) -> bool:
    """Return True if a row is for a GPU, which may include its machine: ``H100 (p5.48xlarge)``."""
    return gpu is not None and (gpu in row["gpus"] or gpu.split(" (")[0] in row["gpus"])


def _load_tariffs(
    path: Path, key: str, *, per: str, unit: str, needed: Sequence[str] = ()
) -> list[dict[str, Any]]:
    allowed = f"a YAML file like {PRICES_FILE.name}"
    rows = read_mapping(path, allowed=allowed, flag="--prices").get(key) or []
    columns = {"gpus", "value", "unit", "per", "source", "date", *needed}
    for row in rows if isinstance(rows, list) else [rows]:
        is_whole = isinstance(row, dict) and columns <= row.keys() and isinstance(row["gpus"], list)
        if not is_whole or (row["unit"], row["per"]) != (unit, per):
            raise ConfigError(
                f"a row under {key} is not whole",
                value=row,
                allowed=f"{', '.join(sorted(columns))}; unit {unit}, per {per}",
                flag="--prices",
            )
        _positive(row["value"], path=path)
    return rows


def _positive(value: Any, *, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(
            "a price or power is not a positive number",
            value=value,
            allowed=f"a number above 0 (in {path.name} or after --price)",
            flag="--prices or --price",
        )
    return float(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
