"""Laws, predictions, costs and plans as text and as rows of CSV files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sdbench.base.escape import for_terminal
from sdbench.report.figures import as_text
from sdbench.report.tables import Cell, make_cell, make_table, to_terminal
from sdbench.report.terminal import NOT_KNOWN, format_number
from sdbench.scaling.candidates import LIKELY, Candidate, Limits
from sdbench.scaling.cost import PRICES_FILE, Amount, Estimate, Recipe, Tariff
from sdbench.scaling.overhead import Forecast, efficiency
from sdbench.scaling.points import IMAGE_SIZE, Row, known_values
from sdbench.statistics.law import MAX_MEAN_ERROR, Prediction, Setup, StepLaw

AMOUNTS = ("days_to_train", "gpu_hours", "cost_usd", "energy_kwh")


def format_lines(lines: Sequence[str]) -> str:
    """Lines of plain text for a terminal."""
    return "\n".join(for_terminal(line) for line in lines)


def describe_figures(rows: Sequence[Row], law: StepLaw) -> list[str]:
    """Lines on the figures that a law was fitted to, and on terms that they do not determine."""
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
            **_setup(point.setup),
            "step, s": point.step_time_s,
            "images/s": make_cell(point.images_per_second, num_digits=5),
            "law": make_cell(
                point.setup.images_per_step / law.step_time_s(point.setup), num_digits=5
            ),
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
    return "\n\n".join(
        (to_terminal(make_table(constants)), to_terminal(make_table(points)), summary)
    )


def format_predictions(predictions: Sequence[Prediction], *, asked_images: int | None) -> str:
    """Make the table of predictions.

    Args:
        predictions: In ascending order of GPUs.
        asked_images: The global batch that was asked for; None for weak scaling.
    """
    rows = []
    for one in predictions:
        speed_up, efficiency = _gain(one, predictions[0])
        notes = ["extrapolated"] if one.is_extrapolated else []
        if asked_images not in (None, one.setup.images_per_step):
            notes.insert(0, f"{one.setup.images_per_step} of {asked_images} images in a step")
        rows.append(
            {
                **_setup(one.setup),
                "step, s": one.step_time_s,
                "images/s": make_cell(one.images_per_second, num_digits=5),
                "95 % interval": format_range(
                    one.images_per_second_low, one.images_per_second_high
                ),
                "rate per GPU": one.images_per_second / one.setup.num_gpus,
                "speed-up": Cell(f"{speed_up:.2f}x", speed_up),
                "efficiency": Cell(f"{efficiency:.0%}", efficiency),
                "note": "; ".join(notes),
            }
        )
    return to_terminal(make_table(rows))


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
        setup, (speed_up, efficiency) = one.setup, _gain(one, predictions[0])
        rows.append(
            {
                "source": common["source"],
                "kind": "modelled",
                "gpu": common["gpu"],
                "num_gpus": setup.num_gpus,
                "image_size": common["image_size"],
                "latents": common["latents"],
                "ema": common["ema"],
                "micro_batch": setup.micro_batch,
                "global_batch": asked_images or setup.images_per_step,
                "images_per_step": setup.images_per_step,
                "images_per_second": one.images_per_second,
                "images_per_second_low": one.images_per_second_low,
                "images_per_second_high": one.images_per_second_high,
                **{name: common[name] for name in ("precision", "engine", "model", "preset")},
                "num_micro_batches": setup.num_micro_batches,
                "last_micro_batch": setup.last_micro_batch,
                "step_time_s": one.step_time_s,
                "speed_up": speed_up,
                "efficiency_percent": 100 * efficiency,
                "extrapolated": one.is_extrapolated,
            }
        )
    return rows


def format_forecasts(forecasts: Sequence[Forecast]) -> str:
    """Make the table of changes of the overhead, each alone and with those above it."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for one in forecasts:
        share = efficiency(one, forecasts)
        cells = {
            "step, ms": 1000 * one.step_time_s,
            "efficiency": Cell(f"{share:.0%}", share),
        }
        row = rows.setdefault(
            (one.name, one.setup.num_gpus), {"change": one.name, **_setup(one.setup)}
        )
        prefix = "with those above: " if one.is_together else "alone: "
        row |= {f"{prefix}{heading}": value for heading, value in cells.items()}
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
    return to_terminal(make_table(map(_cost, estimates)))


def estimate_rows(
    estimates: Sequence[Estimate], *, common: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Make the rows of the CSV file of estimates.

    Args:
        estimates: One for each number of GPUs.
        common: Values of all rows: source, gpu, recipe and latents.
    """
    return [
        {
            "source": common["source"],
            "kind": "modelled",
            "gpu": common["gpu"],
            "num_gpus": one.num_gpus,
            "recipe": common["recipe"],
            "latents": common["latents"],
            **{
                f"{name}{end}": None if math.isnan(number) else float(number)
                for name in AMOUNTS
                for end, number in zip(("", "_low", "_high"), getattr(one, name), strict=True)
            },
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
    rows = [
        {
            **_cost(one.estimate),
            "micro-batch": ", ".join(str(stage.setup.micro_batch) for stage in one.predictions),
            "images/step": one.predictions[0].setup.images_per_step,
            "fits": one.fits,
            "note": " ".join(
                ["<- best"] * (one is best)
                + ["extrapolated"] * any(stage.is_extrapolated for stage in one.predictions)
            ),
        }
        for one in candidates
    ]
    return to_terminal(make_table(rows))


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


def _setup(setup: Setup) -> dict[str, Any]:
    """Columns of a step: GPUs, images, and micro-batches, e.g. ``2 of 4, the last of 1``."""
    micro_batches = f"{setup.num_micro_batches} of {min(setup.micro_batch, setup.device_batch)}"
    if setup.num_micro_batches > 1 and setup.last_micro_batch < setup.micro_batch:
        micro_batches += f", the last of {setup.last_micro_batch}"
    return {
        "GPUs": setup.num_gpus,
        "images/step": setup.images_per_step,
        "per GPU": setup.device_batch,
        "micro-batches": micro_batches,
    }


def _cost(one: Estimate) -> dict[str, Any]:
    return {
        "GPUs": one.num_gpus,
        "days": float(one.days_to_train[0]),
        "95 % interval": _interval(one.days_to_train),
        "GPU-hours": round(one.gpu_hours[0]),
        "cost, USD": _whole(one.cost_usd),
        "95 % interval, USD": _interval(one.cost_usd),
        "energy of the boards, kWh": _whole(one.energy_kwh),
    }


def _whole(amount: Amount) -> Cell:
    value = amount[0]
    return Cell(NOT_KNOWN, None) if math.isnan(value) else make_cell(round(value))


def _interval(amount: Amount) -> str:
    return "" if np.isnan(amount[1:]).all() else format_range(*amount[1:])


def format_range(low: float | None, high: float | None) -> str:
    """An interval of a positive number in words; an end that is not known is 0 or unbounded."""
    low, high = (None if end is None or not math.isfinite(end) else end for end in (low, high))
    return (
        f"{'0' if low is None else format_number(low)} to "
        f"{'unbounded' if high is None else format_number(high)}"
    )


def _gain(one: Prediction, first: Prediction) -> tuple[float, float]:
    """Speed-up over the first prediction, and that speed-up over the ideal one."""
    speed_up = one.images_per_second / first.images_per_second
    return speed_up, speed_up * first.setup.num_gpus / one.setup.num_gpus
