"""Find the number of GPUs and the micro-batch that train a recipe within a deadline or a budget.

Fits the step law for every resolution of the recipe and tries each number of GPUs with its fastest
micro-batch. The column fits has yes if the whole 95 % interval keeps the limits, and likely if only
the value does. The best is the cheapest that keeps the deadline; with only a budget, the fastest
within it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from sdbench.base.errors import ConfigError
from sdbench.base.units import counted
from sdbench.report.tables import Field, tabulate
from sdbench.report.terminal import format_number
from sdbench.scaling import cost, points
from sdbench.scaling.cost import RecipeFlags
from sdbench.scaling.points import IMAGE_SIZE, Row
from sdbench.scaling.predict import FitFlags, fit_to_predict
from sdbench.settings.kinds import POSITIVE, POSITIVE_NUMBER
from sdbench.settings.setting import setting
from sdbench.statistics.law import Prediction, StepLaw

EPILOG = """\
examples:
  python -m sdbench scaling plan results/quoted/mosaicml_diffusion_a100.csv --recipe mosaicml \\
      --micro_batch 16 --max_days 12
  python -m sdbench scaling plan results/quoted/mosaicml_diffusion_benchmark_a100.csv \\
      --recipe mosaicml-all-512 --max_cost 120000
  python -m sdbench scaling plan results/quoted/aws_p5_scaling.csv --recipe mosaicml-all-512 \\
      --max_days 30 --price 4.50
"""

DEFAULT_GPU_COUNTS = "8,16,...,1024"
YES, LIKELY, NO = "yes", "likely", "no"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFlags(RecipeFlags, FitFlags):
    """Flags of plan."""

    num_gpus: tuple[int, ...] | None = setting(
        points.COUNTS, None, f"numbers to try (default: {DEFAULT_GPU_COUNTS}, up to the batch)"
    )
    global_batch: int | None = setting(POSITIVE, None, "(default: that of the recipe)")
    max_days: float | None = setting(POSITIVE_NUMBER, None, "deadline in days")
    max_cost: float | None = setting(POSITIVE_NUMBER, None, "budget in USD")


def run(arguments: PlanFlags) -> None:
    """Print the candidates for a training, and which of them to take."""
    if (arguments.max_days, arguments.max_cost) == (None, None):
        raise ConfigError(
            "the plan has no limit",
            value="none",
            allowed="a deadline in days or a budget in USD",
            flag="--max_days or --max_cost",
        )
    recipe = cost.load_recipe(arguments)
    limits = {"days_to_train": arguments.max_days, "cost_usd": arguments.max_cost}
    rows = points.read_rows(arguments)
    points.check_one_kind(rows)
    gpu = points.first_known(rows, "gpu")
    price, power = cost.load_price(gpu, arguments), cost.load_power(gpu, arguments)
    if arguments.max_cost is not None and price is None:
        raise ConfigError(
            "a maximum cost is set and the price of this GPU is unknown",
            value=gpu,
            allowed="a GPU with a row under prices, or a price",
            flag=f"--price, or a row for it in {(arguments.prices or cost.PRICES_FILE).name}",
        )
    laws = _fit_stages(rows, recipe, arguments)
    global_batch = arguments.global_batch or recipe["global_batch"]
    candidates = []
    for num_gpus in _gpu_counts(arguments, global_batch):
        fastest = {
            size: _predict_fastest(law, num_gpus, global_batch, arguments.micro_batch)
            for size, law in laws.items()
        }
        rates = {size: one.images_per_second for size, one in fastest.items()}
        found = cost.estimate(recipe, rates, num_gpus=num_gpus, price=price, power=power)
        predictions = list(fastest.values())
        candidates.append(
            {
                **found,
                "micro_batches": [str(one.setup.micro_batch) for one in predictions],
                "images_per_step": predictions[0].setup.images_per_step,
                "fits": _fits(found, limits),
                "extrapolated": any(one.is_extrapolated for one in predictions),
            }
        )
    kept = [row for row in candidates if row["fits"] != NO]
    goal = "gpu_hours" if limits["days_to_train"] is not None else "days_to_train"
    best = min(kept, key=lambda row: (row["fits"] == LIKELY, row[goal][0]), default=None)

    def note(row: Row) -> str:
        return "<- best " * (row is best) + "extrapolated" * row["extrapolated"]

    fields = (
        *cost.COST,
        Field("micro-batch", lambda row: ", ".join(row["micro_batches"])),
        Field("images/step", "images_per_step"),
        Field("fits", "fits"),
        Field("note", note),
    )
    described = _describe_limits(limits)
    lines = [*cost.describe_recipe(recipe), *cost.describe_tariffs(gpu, price, power)]
    lines += [f"limits: {described}", f"global batch: {global_batch}"]
    points.show(lines, tabulate(fields, candidates))
    print(f"\n{_advise(candidates, best, limits=described)}")


def _fit_stages(rows: Sequence[Row], recipe: Row, arguments: PlanFlags) -> dict[int, StepLaw]:
    laws = {}
    for stage in recipe["stages"]:
        size = stage["image_size"]
        chosen = [row for row in rows if row.get(IMAGE_SIZE) == size]
        if not chosen:
            raise ConfigError(
                f"the recipe {recipe['name']} has a stage at {size} px, and the tables have no "
                "figure there",
                value=points.known_values(rows, IMAGE_SIZE),
                allowed="figures at every resolution of the recipe",
                flag="TABLE, --where or --recipe",
            )
        laws[size] = fit_to_predict(chosen, arguments)
    return laws


def _gpu_counts(arguments: PlanFlags, global_batch: int) -> Sequence[int]:
    default = points.parse_counts(DEFAULT_GPU_COUNTS)
    counts = arguments.num_gpus or [count for count in default if count <= global_batch]
    return counts or default  # `split_batch` refuses a batch smaller than all of them


def _predict_fastest(
    law: StepLaw, num_gpus: int, global_batch: int, micro_batch: int | None
) -> Prediction:
    """The prediction with this micro-batch, or with the fastest of the figures."""
    sizes = law.micro_batches if micro_batch is None else [micro_batch]
    setups = [
        points.split_batch(global_batch=global_batch, num_gpus=num_gpus, micro_batch=size)
        for size in sizes
    ]
    return max(map(law.predict, setups), key=lambda one: one.images_per_second[0])


def _fits(found: Row, limits: Mapping[str, float | None]) -> str:
    """`YES` if the whole interval keeps the limits, `LIKELY` if the value does, or `NO`."""
    amounts = [(found[name], limit) for name, limit in limits.items() if limit is not None]
    if any(value > limit for (value, _, _), limit in amounts):
        return NO
    # NaN, an unknown end, is not within.
    return YES if all(high <= limit for (_, _, high), limit in amounts) else LIKELY


def _describe_limits(limits: Mapping[str, float | None]) -> str:
    days, usd = limits["days_to_train"], limits["cost_usd"]
    parts = [] if days is None else [f"{format_number(days)} days"]
    return " and ".join(parts if usd is None else [*parts, f"{usd:,.0f} USD"])


def _advise(candidates: Sequence[Row], best: Row | None, *, limits: str) -> str:
    if best is None:
        fastest = min(candidates, key=lambda row: row["days_to_train"][0])
        cheapest = min(candidates, key=lambda row: row["gpu_hours"][0])
        return (
            f"Nothing here keeps {limits}. The fastest is {_describe(fastest)}; the cheapest is "
            f"{_describe(cheapest)}."
        )
    sentence = f"Take {_describe(best)}."
    if best["fits"] == LIKELY:
        sentence += " It may miss the limits: its 95 % interval reaches beyond them."
    if best["extrapolated"]:
        sentence += " It lies beyond the figures: measure there before relying on it."
    return sentence


def _describe(row: Row) -> str:
    sizes = " and ".join(dict.fromkeys(row["micro_batches"]))
    text = counted(row["num_gpus"], "GPU")
    text += f" with micro-batch {sizes}: {format_number(row['days_to_train'][0])} days"
    if interval := points.in_words(row["days_to_train"], unknown=""):
        text += f" ({interval})"
    if math.isnan(row["cost_usd"][0]):
        return f"{text}, {row['gpu_hours'][0]:,.0f} GPU-hours"
    return f"{text}, {row['cost_usd'][0]:,.0f} USD"
