"""Days, GPU-hours, cost and energy of a whole training at the throughput of a table.

    days = sum over the stages of images / images_per_second / 86,400
    GPU-hours = days x 24 x GPUs, cost = GPU-hours x price
    energy = GPU-hours x power of the board

Days are of pure training, without evaluation, checkpoints and broken nodes. Prices and powers come
from prices.yaml, which you can edit. Energy is that of the GPU boards at their maximum power,
without hosts and cooling. Intervals of the throughput carry over to every figure, as if that of all
stages deviated in the same direction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sdbench.base.errors import EXIT_OK, ConfigError
from sdbench.base.escape import for_terminal
from sdbench.base.files import refused_unless_read
from sdbench.base.output import fit
from sdbench.base.yaml_file import read_mapping
from sdbench.record.configuration import group
from sdbench.record.row import format_csv, make_row
from sdbench.record.store import BENCHMARK, OK, check_schema, kind_of
from sdbench.report.figures import (
    MEASURED,
    ChoiceFlags,
    as_text,
    find_name,
    mark_copies,
    names_device,
    read_figures,
    select_rows,
    write_out,
)
from sdbench.report.runs import read_record
from sdbench.report.tables import Field, tabulate, to_terminal
from sdbench.report.terminal import format_number
from sdbench.settings import request
from sdbench.settings.kinds import PATH, POSITIVE_NUMBER, TEXT, Kind
from sdbench.settings.setting import REQUIRED, setting, shared
from sdbench.statistics.intervals import between_runs_interval, mean_rate

Row = dict[str, Any]
# A value and the low and high ends of its 95 % interval. NaN: unknown.
Amount = np.ndarray

# Figures that differ in one of these columns are of different work.
KIND_OF_WORK = ("gpu", "latents", "precision", "ema", "model", "preset", "engine")
SECONDS_PER_DAY = 86_400
HOURS_PER_DAY = 24
# Each beside its schema.
RECIPES_FILE = Path(__file__).with_name("recipes.yaml")
PRICES_FILE = Path(__file__).with_name("prices.yaml")

EPILOG = """\
examples:
  python -m sdbench scaling cost results/quoted/mosaicml_diffusion_a100.csv --recipe mosaicml
  python -m sdbench scaling cost results/quoted/mosaicml_diffusion_benchmark_a100.csv \\
      --where num_gpus=128 --recipe mosaicml-all-512 --price 4.50
"""


def _parse_price(text: str) -> float | str:
    try:
        dollars = float(text)
    except ValueError:
        return TEXT.parse(text)
    return POSITIVE_NUMBER.parse(dollars)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostFlags:
    """Flags of cost: the figures, what is trained, and what a GPU-hour costs."""

    tables: tuple[Path, ...] = setting(
        PATH,
        (),
        "figures in CSV, names of tables in results/quoted, or folders of runs",
        is_positional=True,
        takes_several=True,
        spelling="[TABLE ...]",
    )
    where: tuple[str, ...] = shared(ChoiceFlags, "where")
    recipe: str = setting(TEXT, REQUIRED, "name of a training in --recipes")
    recipes: Path | None = setting(
        PATH, None, "YAML file of trainings (default: sdbench/forecast/recipes.yaml)"
    )
    price: float | str | None = setting(
        Kind("a name, or a number above 0", _parse_price, "USD_PER_GPU_HOUR"),
        None,
        "dollars per GPU-hour, or the name of a row of --prices",
    )
    prices: Path | None = setting(
        PATH, None, "YAML file of prices and powers (default: sdbench/forecast/prices.yaml)"
    )
    out: Path | None = setting(PATH, None, "write the rows, of the kind modelled, as CSV")


class Tariff(NamedTuple):
    """The price of a GPU-hour in dollars or the power of a GPU board in watts, and its source.

    `others` are the names of further rows for the same GPU, in words.
    """

    value: float
    source: str
    others: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `cost`, the command of the group `scaling`, and return its exit code."""
    prog = "python -m sdbench scaling"
    description = "Days, GPU-hours, cost and energy of a training."
    commands = {"cost": "at the throughput of a table, and a price of a GPU-hour"}
    name, rest = request.choose_command(
        commands, argv, prog=prog, description=description, epilog=EPILOG
    )
    prog = f"{prog} {name}"
    _run(request.parse(CostFlags, rest, prog=prog, description=__doc__, epilog=EPILOG).config)
    return EXIT_OK


def _run(arguments: CostFlags) -> None:
    """Print time, cost and energy of a recipe, and write them to the file of --out."""
    recipe = _load_recipe(arguments)
    rows = _read_figures(arguments)
    _check_one_kind(rows)
    gpu = _first_known(rows, "gpu")
    price = _load_price(gpu, arguments)
    power = _first_for(gpu, _read_rows(arguments.prices, "power"))
    by_count, left_out = _find_rates(rows, {stage["image_size"] for stage in recipe["stages"]})
    common = {
        "source": f"recipe {recipe['name']} at {_describe_sources(rows)}",
        "kind": "modelled",
        "gpu": gpu,
        "recipe": recipe["name"],
        "latents": _first_known(rows, "latents"),
    }
    found = [
        {
            **common,
            **_estimate(recipe, by_count[num_gpus], num_gpus=num_gpus, price=price, power=power),
        }
        for num_gpus in sorted(by_count)
    ]
    lines = [*_describe_recipe(recipe), *_describe_tariffs(gpu, price, power), *left_out]
    print("\n".join(fit(for_terminal(line), hanging=2) for line in lines))
    print(f"\n{to_terminal(tabulate(COST, found))}")
    _write_rows(arguments.out, found)


def _estimate(
    recipe: Row,
    by_size: Mapping[int, Amount],
    *,
    num_gpus: int,
    price: Tariff | None,
    power: Tariff | None,
) -> Row:
    """Estimate a training at images/s of all GPUs together, by resolution in pixels.

    Days exclude interruptions and evaluation; energy is that of the GPU boards alone.
    """
    seconds = sum(
        stage["num_images"] / _swap_ends(by_size[stage["image_size"]]) for stage in recipe["stages"]
    )
    days = seconds / SECONDS_PER_DAY
    gpu_hours = days * HOURS_PER_DAY * num_gpus
    return {
        "num_gpus": num_gpus,
        "days_to_train": days,
        "gpu_hours": gpu_hours,
        "cost_usd": gpu_hours * (price.value if price else math.nan),
        "energy_kwh": gpu_hours * (power.value / 1000 if power else math.nan),
    }


def _describe_recipe(recipe: Row) -> list[str]:
    """Lines on a recipe, its stages and its source."""
    stages = ", then ".join(
        f"{stage['num_images']:,} images at {stage['image_size']} px" for stage in recipe["stages"]
    )
    return [f"recipe {recipe['name']}: {recipe['about']}", f"  {stages} ({recipe['source']})"]


def _describe_tariffs(gpu: str | None, price: Tariff | None, power: Tariff | None) -> list[str]:
    """Lines on price and power with their sources, or on the rows to add for them."""
    name = gpu or "a GPU that is not named"
    lines = []
    for title, tariff, unit, key in (
        ("price", price, "USD per GPU-hour", "prices"),
        ("power", power, "W per GPU board", "power"),
    ):
        if tariff is None:
            lines.append(
                f"{title}: n/a for {name}; add a row with gpus: [{name}] under {key} in "
                f"{'/'.join(PRICES_FILE.parts[-3:])}, or in a file like it given with --prices"
            )
            continue
        source = tariff.source + (f"; --price chooses {tariff.others}" if tariff.others else "")
        lines.append(f"{title}: {format_number(tariff.value)} {unit} ({source})")
    return lines


def _load_recipe(arguments: CostFlags) -> Row:
    """Read the recipe with this name, which may be an unambiguous beginning."""
    recipes = _read_file(arguments.recipes, like=RECIPES_FILE, flag="--recipes")
    name = find_name(
        arguments.recipe, list(recipes), what="there is no such recipe", flag="--recipe"
    )
    return {"name": name, **recipes[name]}


def _load_price(gpu: str | None, arguments: CostFlags) -> Tariff | None:
    """The price of a GPU-hour: --price, or the first row for this GPU; None without a row."""
    rows, chosen = _read_rows(arguments.prices, "prices"), arguments.price
    return _first_for(gpu, rows) if chosen is None else _choose_price(chosen, rows)[0]


def _choose_price(chosen: float | str, rows: Sequence[Row]) -> tuple[Tariff, list[str] | None]:
    """The price that --price gives, and the GPUs that it is for; None: for any."""
    if isinstance(chosen, float):
        return Tariff(chosen, "given with --price"), None
    by_name = {row["name"]: row for row in rows}
    name = find_name(chosen, list(by_name), what="there is no such price", flag="--price")
    return Tariff(float(by_name[name]["value"]), _source_of(by_name[name])), by_name[name]["gpus"]


def find_prices(gpus: Sequence[str], chosen: float | str | None = None) -> dict[str, Tariff | None]:
    """The price of a GPU-hour of each GPU: as `chosen` by --price, else the first in prices.yaml.

    A number is the price of all. The name of a row is refused if it is for none of them. None: a
    GPU without a row.
    """
    rows = _read_rows(None, "prices")
    found = {gpu: _first_for(gpu, rows) for gpu in gpus}
    if chosen is None:
        return found
    price, of_row = _choose_price(chosen, rows)
    if of_row is not None and not set(of_row) & set(gpus):
        raise ConfigError(
            "this price is for none of the GPUs asked for",
            value=chosen,
            allowed=f"a number, or a row of prices.yaml for {' or '.join(gpus)}",
            flag="--price",
        )
    return {gpu: price if of_row is None or gpu in of_row else found[gpu] for gpu in gpus}


def _source_of(row: Row) -> str:
    """The source of a row of the file of prices, with its date."""
    return f"{row['source']}; {row['date']}"


def _first_for(gpu: str | None, rows: Sequence[Row]) -> Tariff | None:
    """The first row for a GPU, which may be named with its machine: ``H100 (p5.48xlarge)``.

    A name that no row has means the GPUs whose names have its words, as ``A100`` does.
    """
    names = () if gpu is None else (gpu, gpu.split(" (")[0])
    found = [row for row in rows if any(name in row["gpus"] for name in names)]
    if not found and names:
        found = [row for row in rows if any(names_device(names[1], one) for one in row["gpus"])]
    if not found:
        return None
    others = " or ".join(row["name"] for row in found[1:] if "name" in row)
    return Tariff(float(found[0]["value"]), _source_of(found[0]), others)


def _read_rows(path: Path | None, key: str) -> list[Row]:
    return _read_file(path, like=PRICES_FILE, flag="--prices").get(key, [])


def _read_file(path: Path | None, *, like: Path, flag: str) -> dict[str, Any]:
    """Read a YAML file with the schema of `like`, a file of this folder; `like` without a path."""
    path, allowed = path or like, f"a YAML file like {like.name}"
    content = read_mapping(path, allowed=allowed, flag=flag)
    with refused_unless_read(path, "the file", allowed=allowed, flag=flag):
        check_schema(content, like.with_suffix(".schema.json"))
    return content


def _find_rates(
    rows: Sequence[Row], sizes: Collection[int]
) -> tuple[dict[int, dict[int, Amount]], list[str]]:
    """Find images/s by number of GPUs and by resolution, and a line about each number left out."""
    complete: dict[int, dict[int, Amount]] = {}
    left_out = []
    for count, of_count in group(rows, key_of=lambda row: row["num_gpus"]).items():
        by_size = group(of_count, key_of=lambda row: row.get("image_size"))
        if missing := sorted(set(sizes) - by_size.keys()):
            lacks = " and ".join(f"{size} px" for size in missing)
            left_out.append(f"left out: {count} GPUs, without a figure at {lacks}")
        else:
            complete[count] = {size: _rate_of(by_size[size]) for size in sizes}
    if not complete:
        raise ConfigError(
            "no number of GPUs has a figure at each resolution of the recipe",
            value="; ".join(left_out),
            allowed="figures at " + " and ".join(f"{size} px" for size in sorted(sizes)),
            flag="TABLE or --recipe",
        )
    return complete, left_out


def _read_figures(arguments: CostFlags) -> list[Row]:
    """Read the rows with a figure that meet the conditions of --where, each run once."""
    required = ("num_gpus", "images_per_second")
    rows = mark_copies(
        row
        for path in arguments.tables
        for row in ([_row_of_run(path)] if path.is_dir() else read_figures(path, required=required))
    )
    rows = select_rows(rows, arguments.where)
    rows = [
        row
        for row in rows
        if row.get("status") in (None, OK)
        and row["images_per_second"] is not None
        and row["num_gpus"]
    ]
    if not rows:
        raise ConfigError(
            "no row has a figure of a GPU",
            value=" ".join(map(str, arguments.tables)),
            allowed="rows with num_gpus and images_per_second whose status is ok",
            flag="TABLE and --where",
        )
    _check_each_once(rows)
    return rows


def _row_of_run(folder: Path) -> Row:
    record = read_record(folder, flag="TABLE")
    if kind_of(record) != BENCHMARK:
        raise ConfigError(
            "only runs that measure training have a figure to count with",
            value=f"{folder}: {kind_of(record)}",
            allowed="runs of benchmark.py",
            flag="TABLE",
        )
    return make_row(record)


def _check_each_once(rows: Sequence[Row]) -> None:
    """Refuse a repeated figure, which a mean would count twice."""
    different = {frozenset(cell for cell in row.items() if cell[1] is not None) for row in rows}
    if len(different) < len(rows):
        raise ConfigError(
            "a row occurs twice, and would count as two figures",
            value=f"{len(rows)} rows, {len(different)} of them different",
            allowed="each figure once; repeated measurements differ in a column, e.g. source",
            flag="TABLE",
        )


def _check_one_kind(rows: Sequence[Row], columns: Sequence[str] = KIND_OF_WORK) -> None:
    """Refuse rows that differ in one of the columns. Empty cells do not count."""
    for column in columns:
        values = _known_values(rows, column)
        if len(values) > 1:
            raise ConfigError(
                f"the figures mix several values of {column}, and a cost is for one",
                value=" and ".join(map(as_text, values)),
                allowed=f"one {column}",
                flag=f"--where {column}=...",
            )


def _known_values(rows: Sequence[Row], column: str) -> list[Any]:
    """Return the distinct values of a column without empty cells."""
    return list(dict.fromkeys(row[column] for row in rows if row.get(column) is not None))


def _first_known(rows: Sequence[Row], column: str) -> Any:
    """Return the first value of a column; None if the column is empty."""
    return next(iter(_known_values(rows, column)), None)


def _describe_sources(rows: Sequence[Row]) -> str:
    """The sources of the rows, or their number if there are many."""
    sources = _known_values(rows, "source")
    return f"{len(sources)} sources" if len(sources) > 3 else " and ".join(map(as_text, sources))


def _rate_of(rows: Sequence[Row]) -> Amount:
    """Return images/s of one configuration; three or more runs give a between-runs interval."""
    _check_one_kind(rows, ("kind", "micro_batch", "global_batch"))
    figures = [float(row["images_per_second"]) for row in rows]
    if len(rows) == 1:
        ends = (rows[0].get(f"images_per_second_{end}") for end in ("low", "high"))
        return _make_amount(figures[0], *ends)
    if any(row.get("kind") != MEASURED for row in rows):
        _check_one_kind(rows, ("source",))
    mean, interval = mean_rate(figures), between_runs_interval(figures)
    return _make_amount(mean, interval.low, interval.high) if interval else _make_amount(mean)


def _make_amount(value: float, low: float | None = None, high: float | None = None) -> Amount:
    """Make an amount; an end that is None is unknown."""
    return np.array([value, low, high], dtype=float)


def _swap_ends(amount: Amount) -> Amount:
    """Return the amount with swapped ends, to divide by it."""
    return amount[[0, 2, 1]]


def _in_words(amount: Amount) -> str:
    """The interval of an amount in words; a single unknown end is 0 or unbounded."""
    _, low, high = amount
    if math.isnan(low) and math.isnan(high):
        return ""
    begin = format_number(low) if math.isfinite(low) else "0"
    end = format_number(high) if math.isfinite(high) else "unbounded"
    return f"{begin} to {end}"


def _write_rows(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to the CSV file of --out, if there is one; an amount has three columns."""
    if path is None:
        return
    written = []
    for row in rows:
        cells = dict(row)
        for name, value in row.items():
            if isinstance(value, np.ndarray):
                ends = zip(("", "_low", "_high"), value, strict=True)
                cells |= {f"{name}{end}": _known(number) for end, number in ends}
        written.append(cells)
    print()
    write_out(path, format_csv(written, columns=tuple(written[0])))


def _known(number: float) -> float | None:
    return None if math.isnan(number) else float(number)


def _value_field(heading: str, name: str) -> Field:
    """The column of the values of an amount."""
    return Field(heading, lambda row: _known(row[name][0]))


def _whole_field(heading: str, name: str) -> Field:
    """The same, rounded to whole numbers."""
    return Field(heading, lambda row: None if math.isnan(row[name][0]) else round(row[name][0]))


def _range_field(heading: str, name: str) -> Field:
    """The column of the intervals of an amount."""
    return Field(heading, lambda row: _in_words(row[name]))


COST = (
    Field("GPUs", "num_gpus"),
    _value_field("days", "days_to_train"),
    _range_field("95 % interval", "days_to_train"),
    _whole_field("GPU-hours", "gpu_hours"),
    _whole_field("cost, USD", "cost_usd"),
    _range_field("95 % interval, USD", "cost_usd"),
    _whole_field("energy of the boards, kWh", "energy_kwh"),
)
