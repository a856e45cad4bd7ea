"""Laws, predictions, costs and plans: rows of CSV files, and the tables that show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.base.escape import for_terminal
from sdbench.report.figures import as_text
from sdbench.report.tables import Cell, Field, make_table, tabulate, to_terminal
from sdbench.report.terminal import format_number
from sdbench.scaling.candidates import LIKELY, Candidate, Limits
from sdbench.scaling.cost import PRICES_FILE, Amount, Estimate, Recipe, Tariff
from sdbench.scaling.overhead import Forecast, efficiency
from sdbench.scaling.points import IMAGE_SIZE, Row, known_values
from sdbench.statistics.law import MAX_MEAN_ERROR, Prediction, Setup, StepLaw


def format_lines(lines: Sequence[str]) -> str:
    """Lines of plain text for a terminal."""
    return "\n".join(for_terminal(line) for line in lines)


def describe_figures(rows: Sequence[Row], law: StepLaw) -> list[str]:
    """Lines on the figures that a law was fitted to, and on its terms without a value."""
    kinds = [
        f"{column} {as_text(known_values(rows, column)[0])}"
        for column in ("gpu", IMAGE_SIZE, "latents", "precision", "ema", "model", "preset")
        if known_values(rows, column)
    ]
    lines = [f"figures: {len(law.points)}, {', '.join(kinds)}"]
    if len(rows) > len(law.points):
        lines.append(f"left out: {len(rows) - len(law.points)} modelled, which are no evidence")
    return [*lines, *law.notes]


def format_law(law: StepLaw) -> str:
    """Tables of the constants with their intervals, and of the error at each figure."""
    constants = [
        {"constant": term, "seconds": value, "95 % interval": format_range(low, high)}
        for term in law.terms
        for value, low, high in [law.constant(term)]
    ]
    errors = law.errors()
    points = [
        {
            **_setup_columns(point.setup),
            "step_time_s": point.step_time_s,
            "images_per_second": point.images_per_second,
            "law": point.setup.images_per_step / law.step_time_s(point.setup),
            "error": Cell(f"{error:+.1%}", error),
        }
        for point, error in zip(law.points, errors, strict=True)
    ]
    summary = (
        f"error of {len(errors)} figures: mean {law.mean_error:.2%}, "
        f"max {max(map(abs, errors)):.2%}"
    )
    if law.mean_error > MAX_MEAN_ERROR:
        summary += (
            "\nwarning: these figures do not follow the law, and nothing is predicted from it; see "
            "the largest errors"
        )
    tables = (make_table(constants), tabulate((*FIGURE, *LAW), points))
    return "\n\n".join((*map(to_terminal, tables), summary))


def format_predictions(predictions: Sequence[Prediction], *, asked_images: int | None) -> str:
    """The table of predictions, which are in ascending order of GPUs."""
    rows = prediction_rows(predictions, common={}, asked_images=asked_images)
    return to_terminal(tabulate((*FIGURE, *PREDICTION), rows))


def prediction_rows(
    predictions: Sequence[Prediction], *, common: Mapping[str, Any], asked_images: int | None
) -> list[dict[str, Any]]:
    """Make the rows of the CSV file of predictions.

    Args:
        predictions: In ascending order of GPUs.
        common: Values of all rows: source, image_size and the columns of `KIND_OF_WORK`.
        asked_images: The global batch that was asked for; None for weak scaling.
    """
    rows = []
    for one in predictions:
        setup, first = one.setup, predictions[0]
        speed_up = one.images_per_second / first.images_per_second
        rows.append(
            {
                "source": common.get("source"),
                "kind": "modelled",
                "gpu": common.get("gpu"),
                "num_gpus": setup.num_gpus,
                **{name: common.get(name) for name in ("image_size", "latents", "ema")},
                "micro_batch": setup.micro_batch,
                "global_batch": asked_images or setup.images_per_step,
                "images_per_step": setup.images_per_step,
                "images_per_second": one.images_per_second,
                "images_per_second_low": one.images_per_second_low,
                "images_per_second_high": one.images_per_second_high,
                **{name: common.get(name) for name in ("precision", "engine", "model", "preset")},
                "num_micro_batches": setup.num_micro_batches,
                "last_micro_batch": setup.last_micro_batch,
                "step_time_s": one.step_time_s,
                "speed_up": speed_up,
                "efficiency_percent": 100 * (speed_up * first.setup.num_gpus / setup.num_gpus),
                "extrapolated": one.is_extrapolated,
            }
        )
    return rows


def format_forecasts(forecasts: Sequence[Forecast]) -> str:
    """Make the table of changes of the overhead, each alone and with those above it."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for one in forecasts:
        share = efficiency(one, forecasts)
        setup = _setup_columns(one.setup)
        row = rows.setdefault(
            (one.name, one.setup.num_gpus),
            {"change": one.name} | {field.heading: field.cell_of(setup) for field in SETUP},
        )
        prefix = "with those above: " if one.is_together else "alone: "
        row[f"{prefix}step, ms"] = 1000 * one.step_time_s
        row[f"{prefix}efficiency"] = Cell(f"{share:.0%}", share)
    return to_terminal(make_table(rows.values()))


def describe_recipe(recipe: Recipe) -> list[str]:
    """Lines on a recipe, its stages and its source."""
    stages = ", then ".join(
        f"{stage.num_images:,} images at {stage.image_size} px" for stage in recipe.stages
    )
    return [f"recipe {recipe.name}: {recipe.about}", f"  {stages} ({recipe.source})"]


def describe_tariffs(gpu: str | None, price: Tariff | None, power: Tariff | None) -> list[str]:
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
        others = f"; --price chooses {' or '.join(tariff.others)}" if tariff.others else ""
        lines.append(f"{title}: {format_number(tariff.value)} {unit} ({tariff.source}{others})")
    return lines


def format_estimates(estimates: Sequence[Estimate]) -> str:
    """Make the table of days, GPU-hours, cost and energy by GPU count."""
    return to_terminal(tabulate(COST, estimate_rows(estimates, common={})))


def estimate_rows(
    estimates: Sequence[Estimate], *, common: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rows of the CSV file of estimates; all have the source, gpu, recipe and latents given."""
    return [
        {
            "source": common.get("source"),
            "kind": "modelled",
            "gpu": common.get("gpu"),
            "num_gpus": one.num_gpus,
            **{name: common.get(name) for name in ("recipe", "latents")},
            **amount_columns("days_to_train", one.days_to_train),
            **amount_columns("gpu_hours", one.gpu_hours),
            **amount_columns("cost_usd", one.cost_usd),
            **amount_columns("energy_kwh", one.energy_kwh),
        }
        for one in estimates
    ]


def describe_limits(limits: Limits) -> str:
    """The limits of a plan, e.g. ``10 days and 5,000 USD``."""
    parts = []
    if limits.max_days is not None:
        parts.append(f"{format_number(limits.max_days)} days")
    if limits.max_cost_usd is not None:
        parts.append(f"{limits.max_cost_usd:,.0f} USD")
    return " and ".join(parts)


def format_candidates(candidates: Sequence[Candidate], *, best: Candidate | None) -> str:
    """Make the table of candidates, with a mark at the best."""
    rows = estimate_rows([one.estimate for one in candidates], common={})
    for row, one in zip(rows, candidates, strict=True):
        notes = ["<- best"] if one is best else []
        if any(stage.is_extrapolated for stage in one.predictions):
            notes.append("extrapolated")
        row["micro-batch"] = ", ".join(str(stage.setup.micro_batch) for stage in one.predictions)
        row["images/step"] = one.predictions[0].setup.images_per_step
        row |= {"fits": one.fits, "note": " ".join(notes)}
    more = [Field(name, name) for name in ("micro-batch", "images/step", "fits", "note")]
    return to_terminal(tabulate((*COST, *more), rows))


def advise(candidates: Sequence[Candidate], best: Candidate | None, limits: Limits) -> str:
    """Advise which candidate to take, or name the fastest and the cheapest if none fits."""
    if best is None:
        fastest = min((one.estimate for one in candidates), key=lambda one: one.days_to_train[0])
        cheapest = min((one.estimate for one in candidates), key=lambda one: one.gpu_hours[0])
        return (
            f"Nothing here keeps {describe_limits(limits)}. The fastest is "
            f"{_describe_estimate(fastest)}; the cheapest is {_describe_estimate(cheapest)}."
        )
    sentence = f"Take {_describe_estimate(best.estimate, best.predictions)}."
    if best.fits == LIKELY:
        sentence += " It may miss the limits: its 95 % interval reaches beyond them."
    if any(stage.is_extrapolated for stage in best.predictions):
        sentence += " It lies beyond the figures: measure there before relying on it."
    return sentence


def _describe_estimate(one: Estimate, predictions: Sequence[Prediction] = ()) -> str:
    text = "1 GPU" if one.num_gpus == 1 else f"{one.num_gpus} GPUs"
    sizes = [str(prediction.setup.micro_batch) for prediction in predictions]
    if len(set(sizes)) == 1:
        text += f" with micro-batch {sizes[0]}"
    elif sizes:
        text += f" with micro-batches {' and '.join(sizes)}"
    days, low, high = one.days_to_train
    text += f": {format_number(days)} days"
    if not (math.isnan(low) and math.isnan(high)):
        text += f" ({format_range(low, high)})"
    if math.isnan(one.cost_usd[0]):
        return f"{text}, {one.gpu_hours[0]:,.0f} GPU-hours"
    return f"{text}, {one.cost_usd[0]:,.0f} USD"


def _setup_columns(setup: Setup) -> dict[str, int]:
    names = ("num_gpus", "images_per_step", "micro_batch", "num_micro_batches", "last_micro_batch")
    return {name: getattr(setup, name) for name in names}


def _device_batch(row: Row) -> int:
    return row["images_per_step"] // row["num_gpus"]


def _micro_batches(row: Row) -> str:
    """E.g. ``2 of 4, the last of 1``."""
    text = f"{row['num_micro_batches']} of {min(row['micro_batch'], _device_batch(row))}"
    if row["num_micro_batches"] > 1 and row["last_micro_batch"] < row["micro_batch"]:
        text += f", the last of {row['last_micro_batch']}"
    return text


def _note(row: Row) -> str:
    notes = ["extrapolated"] if row["extrapolated"] else []
    if row["images_per_step"] != row["global_batch"]:
        notes.insert(0, f"{row['images_per_step']} of {row['global_batch']} images in a step")
    return "; ".join(notes)


def amount_columns(name: str, amount: Amount) -> dict[str, float | None]:
    """An amount and the ends of its interval as columns of a CSV file; NaN is unknown."""
    return {
        f"{name}{end}": None if math.isnan(value) else float(value)
        for end, value in zip(("", "_low", "_high"), amount, strict=True)
    }


def range_field(heading: str, name: str, *, unknown: str = "") -> Field:
    """The column of the interval of an amount, from its columns in a CSV file."""

    def text_of(row: Row) -> str:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return unknown if low is None and high is None else format_range(low, high)

    return Field(heading, text_of)


def whole_field(heading: str, name: str) -> Field:
    """A column of rounded numbers."""
    return Field(heading, lambda row: None if row[name] is None else round(row[name]))


def format_range(low: float | None, high: float | None) -> str:
    """An interval of a positive number in words; an end that is not known is 0 or unbounded."""
    low, high = (None if end is None or not math.isfinite(end) else end for end in (low, high))
    return (
        f"{'0' if low is None else format_number(low)} to "
        f"{'unbounded' if high is None else format_number(high)}"
    )


# The columns of tables, whose rows have the names of the columns of the CSV files.
SETUP = (
    Field("GPUs", "num_gpus"),
    Field("images/step", "images_per_step"),
    Field("per GPU", _device_batch),
    Field("micro-batches", _micro_batches),
)
FIGURE = (*SETUP, Field("step, s", "step_time_s"), Field("images/s", "images_per_second", digits=5))
LAW = (Field("law", "law", digits=5), Field("error", "error"))
PREDICTION = (
    Field(
        "95 % interval",
        lambda row: format_range(row["images_per_second_low"], row["images_per_second_high"]),
    ),
    Field("rate per GPU", lambda row: row["images_per_second"] / row["num_gpus"]),
    Field("speed-up", lambda row: Cell(f"{row['speed_up']:.2f}x", row["speed_up"])),
    Field(
        "efficiency",
        lambda row: Cell(f"{row['efficiency_percent']:.0f}%", row["efficiency_percent"]),
    ),
    Field("note", _note),
)
COST = (
    Field("GPUs", "num_gpus"),
    Field("days", "days_to_train"),
    range_field("95 % interval", "days_to_train"),
    whole_field("GPU-hours", "gpu_hours"),
    whole_field("cost, USD", "cost_usd"),
    range_field("95 % interval, USD", "cost_usd"),
    whole_field("energy of the boards, kWh", "energy_kwh"),
)
