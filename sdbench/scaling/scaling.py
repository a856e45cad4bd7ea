"""The commands `python -m sdbench scaling fit | predict | overhead | cost | plan | machines`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.record.row import format_csv
from sdbench.report.figures import as_text, write_out
from sdbench.scaling import answers, machine_answers, overhead
from sdbench.scaling.candidates import Limits, choose_best, make_candidates
from sdbench.scaling.command_line import (
    DEFAULT_GPU_COUNTS,
    CostFlags,
    FitFlags,
    MachinesFlags,
    OverheadFlags,
    PlanFlags,
    PredictFlags,
    RecipeFlags,
    TableFlags,
    parse,
)
from sdbench.scaling.cost import (
    PRICES_FILE,
    Recipe,
    Tariff,
    estimate,
    load_machine,
    load_power,
    load_price,
    load_recipe,
)
from sdbench.scaling.machines import Fleet, latents_in_terabytes, plan_feeding, plan_jobs
from sdbench.scaling.points import (
    IMAGE_SIZE,
    KIND_OF_WORK,
    Rates,
    Row,
    check_one_kind,
    find_rates,
    known_values,
    make_points,
    make_setups,
    parse_counts,
    parse_rates,
    read_rows,
)
from sdbench.scaling.worker_rates import read_worker_rates
from sdbench.statistics.law import MAX_MEAN_ERROR, StepLaw, fit_law


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return its exit code."""
    command, arguments = parse(argv)
    commands = {
        "fit": run_fit,
        "predict": run_predict,
        "overhead": run_overhead,
        "cost": run_cost,
        "plan": run_plan,
        "machines": run_machines,
    }
    return commands[command](arguments)


def run_fit(arguments: FitFlags) -> int:
    """Fit the law, and print the constants and the error at each figure."""
    rows = _read(arguments)
    law = _fit(rows, arguments)
    print(answers.format_lines(answers.describe_figures(rows, law)))
    print(f"\n{answers.format_law(law)}")
    return 0


def run_predict(arguments: PredictFlags) -> int:
    """Print the predictions for other GPU counts, and write them to the file of --out."""
    rows = _read(arguments)
    law = _fit_to_predict(rows, arguments)
    micro_batch = _one_micro_batch(law, arguments)
    global_batch = _global_batch(rows, arguments)
    setups = make_setups(
        arguments.num_gpus,
        global_batch=global_batch,
        device_batch=arguments.device_batch,
        micro_batch=micro_batch,
    )
    predictions = [law.predict(setup) for setup in setups]
    kind = (
        f"weak scaling: {arguments.device_batch} images of each GPU in a step"
        if global_batch is None
        else f"strong scaling: a global batch of {global_batch}"
    )
    print(answers.format_lines([*answers.describe_figures(rows, law), kind]))
    print(f"\n{answers.format_predictions(predictions, asked_images=global_batch)}")
    if arguments.out is not None:
        common = {column: _only(rows, column) for column in (*KIND_OF_WORK, IMAGE_SIZE)}
        names = " and ".join(path.name for path in arguments.tables)
        common["source"] = f"step law fitted to {names} ({_source_of(rows)})"
        found = answers.prediction_rows(predictions, common=common, asked_images=global_batch)
        _write(arguments.out, found)
    return 0


def run_overhead(arguments: OverheadFlags) -> int:
    """Print what changes of the overhead give, and write it to the file of --out."""
    step = overhead.read_step(arguments)
    cluster = overhead.Cluster(
        arguments.gpus_per_node, arguments.node_gb_per_s * 1e9, arguments.network_gb_per_s * 1e9
    )
    setups = make_setups(
        arguments.num_gpus,
        global_batch=arguments.global_batch,
        device_batch=arguments.device_batch,
        micro_batch=step.micro_batch,
    )
    forecasts = overhead.forecast(step, cluster, setups, names=arguments.changes)
    print(answers.format_lines(overhead.describe(step, cluster, setups)))
    print(f"\n{answers.format_forecasts(forecasts)}")
    if arguments.out is not None:
        _write(arguments.out, overhead.forecast_rows(forecasts, source=step.source))
    return 0


def run_cost(arguments: CostFlags) -> int:
    """Print time, cost and energy of a recipe, and write them to the file of --out."""
    recipe = load_recipe(arguments.recipe, path=arguments.recipes)
    rows = [] if arguments.images_per_second else _read(arguments)
    check_one_kind(rows)
    gpu = arguments.gpu or _only(rows, "gpu")
    price, power = _tariffs(gpu, arguments)
    rates, left_out = _rates(rows, recipe, arguments)
    estimates = [
        estimate(recipe, rates[num_gpus], num_gpus=num_gpus, price=price, power=power)
        for num_gpus in sorted(rates)
    ]
    lines = [*answers.describe_recipe(recipe), *answers.describe_tariffs(gpu, price, power)]
    print(answers.format_lines([*lines, *left_out]))
    print(f"\n{answers.format_estimates(estimates)}")
    if arguments.out is not None:
        common = {
            "source": f"recipe {recipe.name} at {_source_of(rows) or 'a throughput given'}",
            "gpu": gpu,
            "recipe": recipe.name,
            "latents": _only(rows, "latents"),
        }
        found = answers.estimate_rows(estimates, common=common)
        _write(arguments.out, found)
    return 0


def run_plan(arguments: PlanFlags) -> int:
    """Print the candidates for a training, and which of them to take."""
    recipe = load_recipe(arguments.recipe, path=arguments.recipes)
    limits = _limits(arguments)
    rows = _read(arguments)
    check_one_kind(rows)
    gpu = _only(rows, "gpu")
    price, power = _tariffs(gpu, arguments)
    if limits.max_cost_usd is not None and price is None:
        raise ConfigError(
            "a maximum cost is set and the price of this GPU is unknown",
            value=gpu,
            allowed="a GPU with a row under prices, or a price",
            flag=f"--price, or a row for it in {(arguments.prices or PRICES_FILE).name}",
        )
    laws = _laws_of(rows, recipe, arguments)
    global_batch = arguments.global_batch or recipe.global_batch
    candidates = make_candidates(
        recipe,
        laws,
        gpu_counts=_gpu_counts_to_try(arguments, global_batch),
        global_batch=global_batch,
        micro_batches=[arguments.micro_batch] if arguments.micro_batch else [],
        limits=limits,
        price=price,
        power=power,
    )
    best = choose_best(candidates, limits=limits)
    lines = [
        *answers.describe_recipe(recipe),
        *answers.describe_tariffs(gpu, price, power),
        f"limits: {answers.describe_limits(limits)}",
        f"global batch: {global_batch}",
    ]
    print(answers.format_lines(lines))
    print(f"\n{answers.format_candidates(candidates, best=best)}")
    print(f"\n{answers.advise(candidates, best, limits)}")
    return 0


def run_machines(arguments: MachinesFlags) -> int:
    """Print the machines that a training takes, by where its pictures are encoded."""
    recipe = load_recipe(arguments.recipe, path=arguments.recipes)
    rates = read_worker_rates(arguments, {stage.image_size for stage in recipe.stages})
    names = ("trainer_machine", "encoder_machine", "decoder_machine")
    machines = {
        name: load_machine(chosen, flag=f"--{name}", path=arguments.prices) if chosen else None
        for name in names
        for chosen in [getattr(arguments, name)]
    }
    fleet = Fleet(
        num_trainers=arguments.num_trainers,
        scaling_efficiency=arguments.scaling_efficiency,
        margin=arguments.margin,
        **machines,
        num_encoders=arguments.num_encoders,
        num_decoders=arguments.num_decoders,
    )
    feedings = [plan_feeding(stage, rates, fleet) for stage in recipe.stages]
    num_dataset_images = arguments.num_dataset_images
    ways = plan_jobs(recipe, rates, fleet, feedings, num_dataset_images=num_dataset_images)
    terabytes = latents_in_terabytes(
        recipe,
        text_embedding_dim=arguments.text_embedding_dim,
        num_dataset_images=num_dataset_images,
    )
    lines = [*answers.describe_recipe(recipe), *machine_answers.describe_fleet(fleet)]
    print(answers.format_lines([*lines, *machine_answers.describe_rates(rates)]))
    print(f"\n{machine_answers.format_feedings(feedings)}")
    print(f"\n{machine_answers.format_jobs(ways)}")
    print(f"\n{machine_answers.format_ways(ways)}")
    print(f"\n{answers.format_lines(machine_answers.advise(ways, terabytes=terabytes))}")
    if arguments.out is not None:
        _write(arguments.out, machine_answers.job_rows(ways, recipe=recipe.name))
    return 0


def _tariffs(gpu: str | None, arguments: RecipeFlags) -> tuple[Tariff | None, Tariff | None]:
    """Price and power of a GPU."""
    price = load_price(gpu, chosen=arguments.price, path=arguments.prices)
    return price, load_power(gpu, path=arguments.prices)


def _read(arguments: TableFlags) -> list[Row]:
    if not arguments.tables:
        raise ConfigError(
            "no table is given",
            value="",
            allowed="at least one CSV file, or --images_per_second where a command has it",
            flag="TABLE",
        )
    return read_rows(
        arguments.tables, where=arguments.where, required=("num_gpus", "images_per_second")
    )


def _fit(rows: Sequence[Row], arguments: FitFlags) -> StepLaw:
    check_one_kind(rows, (*KIND_OF_WORK, IMAGE_SIZE))
    points = make_points(rows, micro_batch=arguments.micro_batch)
    return fit_law(points, gpus_per_node=arguments.num_gpus_per_node)


def _fit_to_predict(rows: Sequence[Row], arguments: FitFlags) -> StepLaw:
    """Fit the law, and refuse one that its own figures do not follow."""
    law = _fit(rows, arguments)
    if law.mean_error > MAX_MEAN_ERROR:
        raise ConfigError(
            "the figures do not follow the step law, so that it predicts nothing",
            value=f"a mean error of {law.mean_error:.0%}",
            allowed=f"at most {MAX_MEAN_ERROR:.0%}; python -m sdbench scaling fit shows the error "
            "of each figure",
            flag="TABLE and --where",
        )
    return law


def _laws_of(rows: Sequence[Row], recipe: Recipe, arguments: PlanFlags) -> dict[int, StepLaw]:
    laws = {}
    for stage in recipe.stages:
        chosen = [row for row in rows if row.get(IMAGE_SIZE) == stage.image_size]
        if not chosen:
            raise ConfigError(
                f"the recipe {recipe.name} has a stage at {stage.image_size} px, and the tables "
                "have no figure there",
                value=known_values(rows, IMAGE_SIZE),
                allowed="figures at every resolution of the recipe",
                flag="TABLE, --where or --recipe",
            )
        laws[stage.image_size] = _fit_to_predict(chosen, arguments)
    return laws


def _one_micro_batch(law: StepLaw, arguments: FitFlags) -> int:
    if arguments.micro_batch is not None:
        return arguments.micro_batch
    if len(law.micro_batches) > 1:
        raise ConfigError(
            "the figures have several micro-batches, and a prediction is for one",
            value="no --micro_batch",
            allowed=" | ".join(map(str, law.micro_batches)) + ", or another",
            flag="--micro_batch",
        )
    return law.micro_batches[0]


def _global_batch(rows: Sequence[Row], arguments: PredictFlags) -> int | None:
    """Return the global batch of strong scaling; None for weak scaling."""
    if arguments.device_batch is not None or arguments.global_batch is not None:
        return arguments.global_batch
    values = known_values(rows, "global_batch")
    if len(values) != 1:
        raise ConfigError(
            "the figures have no common global batch",
            value=", ".join(map(as_text, values)) or "none",
            allowed="a global batch (strong scaling) or images of each GPU (weak scaling)",
            flag="--global_batch or --device_batch",
        )
    return values[0]


def _only(rows: Sequence[Row], column: str) -> Any:
    """Return the first value of a column; None if the column is empty."""
    return next(iter(known_values(rows, column)), None)


def _rates(rows: Sequence[Row], recipe: Recipe, arguments: CostFlags) -> tuple[Rates, list[str]]:
    """Return images/s by number of GPUs and resolution, and a line about each omitted number."""
    counts = parse_counts(arguments.num_gpus, flag="--num_gpus") if arguments.num_gpus else []
    if not arguments.images_per_second:
        return find_rates(rows, {one.image_size for one in recipe.stages}, gpu_counts=counts)
    if arguments.tables:
        raise ConfigError(
            "both a throughput and a table are given",
            value=" ".join(map(str, arguments.tables)),
            allowed="one of the two",
            flag="TABLE or --images_per_second",
        )
    return parse_rates(arguments.images_per_second, gpu_counts=counts), []


def _gpu_counts_to_try(arguments: PlanFlags, global_batch: int) -> list[int]:
    if arguments.num_gpus is not None:
        return parse_counts(arguments.num_gpus, flag="--num_gpus")
    default = parse_counts(DEFAULT_GPU_COUNTS, flag="--num_gpus")
    counts = [count for count in default if count <= global_batch]
    if not counts:
        raise ConfigError(
            "the global batch has fewer images than there are GPUs to try",
            value=global_batch,
            allowed=f"a global batch of at least {min(default)}, or other numbers of GPUs",
            flag="--global_batch or --num_gpus",
        )
    return counts


def _write(path: Path, rows: Sequence[Row]) -> None:
    print()
    write_out(path, format_csv(rows, columns=tuple(rows[0])))


def _source_of(rows: Sequence[Row]) -> str:
    sources = known_values(rows, "source")
    return f"{len(sources)} sources" if len(sources) > 3 else " and ".join(map(as_text, sources))


def _limits(arguments: PlanFlags) -> Limits:
    if (arguments.max_days, arguments.by, arguments.max_cost) == (None, None, None):
        raise ConfigError(
            "the plan has no limit",
            value="none",
            allowed="a number of days, a date or a sum",
            flag="--max_days, --by or --max_cost",
        )
    max_days = arguments.max_days
    if arguments.by is not None:
        start = arguments.start or datetime.date.today()
        max_days = float((arguments.by - start).days)
        if max_days <= 0:
            raise ConfigError(
                "the date is not after the start",
                value=f"{arguments.by} after {start}",
                allowed="a later date",
                flag="--by or --start",
            )
    return Limits(max_days, arguments.max_cost)
