"""What do the commands of `python -m sdbench scaling` say in words?"""

from __future__ import annotations

from collections.abc import Sequence

from sdbench.report.figures import as_text
from sdbench.report.terminal import format_number
from sdbench.scaling.cost import PRICES_FILE, Estimate, Recipe, Tariff
from sdbench.scaling.plan import LIKELY, Candidate, Limits
from sdbench.scaling.printout import describe_value
from sdbench.scaling.table import IMAGE_SIZE, Row, known_values
from sdbench.statistics.law import Prediction, StepLaw


def describe_figures(rows: Sequence[Row], law: StepLaw) -> list[str]:
    """The figures that a law was fitted to, and what it cannot tell."""
    kinds = [
        f"{column} {as_text(known_values(rows, column)[0])}"
        for column in ("gpu", IMAGE_SIZE, "latents", "precision", "ema", "model", "preset")
        if known_values(rows, column)
    ]
    lines = [f"figures: {len(law.points)}, {', '.join(kinds)}"]
    if len(rows) > len(law.points):
        lines.append(f"left out: {len(rows) - len(law.points)} modelled, which are no evidence")
    return [*lines, *law.notes]


def describe_recipe(recipe: Recipe) -> list[str]:
    """A recipe with its stages and source."""
    stages = ", then ".join(
        f"{stage.num_images:,} images at {stage.image_size} px" for stage in recipe.stages
    )
    return [f"recipe {recipe.name}: {recipe.about}", f"  {stages} ({recipe.source})"]


def describe_tariffs(gpu: str | None, price: Tariff | None, power: Tariff | None) -> list[str]:
    """Price and power with their sources, or the rows to add."""
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


def describe_limits(limits: Limits) -> str:
    """The limits of a plan."""
    parts = []
    if limits.max_days is not None:
        parts.append(f"{format_number(limits.max_days)} days")
    if limits.max_cost_usd is not None:
        parts.append(f"{limits.max_cost_usd:,.0f} USD")
    return " and ".join(parts)


def advise(candidates: Sequence[Candidate], best: Candidate | None, limits: Limits) -> str:
    """What to do, in a sentence, also where there is nothing to do."""
    if best is None:
        fastest = min((one.estimate for one in candidates), key=lambda one: one.days.value)
        cheapest = min((one.estimate for one in candidates), key=lambda one: one.gpu_hours.value)
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
    text += f": {describe_value(one.days, 'days')}"
    if one.cost_usd is None:
        return f"{text}, {one.gpu_hours.value:,.0f} GPU-hours"
    return f"{text}, {one.cost_usd.value:,.0f} USD"
