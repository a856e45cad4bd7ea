"""The command `predict`: images/s, memory and cost on other GPUs, with tested intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import EXIT_OK, ConfigError
from sdbench.base.output import fit
from sdbench.base.units import counted
from sdbench.forecast import law
from sdbench.forecast.cost import price_of
from sdbench.forecast.law import Card, Case, Law, Tested, Work, pool_of
from sdbench.record.configuration import group
from sdbench.record.row import format_csv
from sdbench.report.figures import write_out
from sdbench.report.tables import Field, tabulate, to_terminal
from sdbench.report.terminal import format_number
from sdbench.settings.config import SETTINGS, BenchmarkConfig
from sdbench.settings.kinds import PATH, POSITIVE, TEXT, list_of
from sdbench.settings.request import Request, parse
from sdbench.settings.setting import describe_flags, setting

DESCRIPTION = """\
Predict how fast this suite trains on GPUs that nobody has measured it on, with the memory and what
a million images cost. A law is fitted to published and measured figures (results/quoted and
results/throughput.csv), and every GPU, source and model was predicted without its own figures: the
interval of a prediction is as wide as those errors. Takes flags of benchmark.py.
"""
EPILOG = """\
examples:
  python -m sdbench predict --model_name sd2-base --latents precomputed
      one GPU of each kind
  python -m sdbench predict --model_name flux-schnell --image_size 256 --latents precomputed \\
      --sharding full --gpu B200 --num_gpus 16
      16 of one kind
  python -m sdbench predict --model_name sd2-base --preset seed --num_gpus 8 --out predicted.csv
      the reference's software, as CSV

exit codes: 0 ok, 2 bad input
"""

# Settings of benchmark.py whose effect the figures show, or which have little on speed: sources
# that shard follow the same law as others, and AWS's average costs 0.2 and 0.7 %.
PREDICTED = frozenset(
    (
        *("model_name", "image_size", "latents", "preset", "batch_size", "use_ema"),
        *("device_train_microbatch_size", "lora_rank", "sharding", "precision", "use_synth_data"),
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictSettings(BenchmarkConfig):
    """Settings of predict: its own, and those of the run that is predicted."""

    gpu: tuple[str, ...] | None = setting(
        list_of(TEXT), None, "GPUs, such as B200 (default: all that are known)", is_everyday=True
    )
    num_gpus: int = setting(
        POSITIVE, 1, f"GPUs that share the global batch, up to {law.MAX_GPUS}", is_everyday=True
    )
    out: Path | None = setting(
        PATH, None, "write the rows, of the kind predicted, as CSV", is_everyday=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print predictions; return the exit code."""
    request = parse(
        PredictSettings,
        argv,
        prog="python -m sdbench predict",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    _check(request)
    cases = law.load_cases()
    tested = law.leave_out(cases)
    rows = list(predict_rows(request, cases, tested))
    given = {name: getattr(request.config, name) for name in SETTINGS if request.is_users(name)}
    for line in describe(rows, tested, describe_flags(given)):
        print(fit(line, hanging=2))
    if request.config.out:
        print()
        shown = [{key: value for key, value in row.items() if key != "why"} for row in rows]
        write_out(request.config.out, format_csv(shown, columns=tuple(shown[0])))
    return EXIT_OK


def _check(request: Request[PredictSettings]) -> None:
    given = [name for name in SETTINGS if request.is_users(name) and name not in PREDICTED]
    if given:
        raise ConfigError(
            "no figure tells what this setting does to the speed of other GPUs",
            value=describe_flags({name: getattr(request.config, name) for name in given}),
            allowed=", ".join(f"--{name}" for name in sorted(PREDICTED)),
            flag=f"--{given[0]}",
        )
    if request.config.precision in ("fp32", "tf32"):
        raise ConfigError(
            "no figure is known to be of training in this precision",
            value=request.config.precision,
            allowed="bf16, amp_bf16, amp_fp16",
            flag="--precision",
        )
    if request.config.num_gpus > law.MAX_GPUS:
        raise ConfigError(
            "so many GPUs cannot be predicted: their network decides, which no source describes",
            value=request.config.num_gpus,
            allowed=f"at most {law.MAX_GPUS}",
            flag="--num_gpus",
        )


def choose_cards(names: Sequence[str] | None, cases: Sequence[Case]) -> list[Card]:
    """The GPUs of these names; None: all of which a figure was predicted."""
    known = sorted({case.card for case in cases}, key=lambda card: (card.tflops, card.name))
    if names is None:
        return known
    found = []
    for name in names:
        card = law.find_card(name)
        if card not in known:
            raise ConfigError(
                "the speed of this GPU cannot be predicted: no figure of it was",
                value=name,
                allowed=", ".join(card.name for card in known),
                flag="--gpu",
            )
        found.append(card)
    return list(dict.fromkeys(found))


def predict_rows(
    request: Request[PredictSettings], cases: Sequence[Case], tested: Sequence[Tested]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each GPU; the rate is None where no micro-batch fits."""
    from sdbench.forecast.memory_tables import CARDS, plan_on_gpus
    from sdbench.models.replay import Step
    from sdbench.plan.batch import AUTO_MEMORY_FRACTION, find_largest_microbatch
    from sdbench.plan.memory_limit import MICROBATCH, estimate_memory
    from sdbench.profile.work import count_image

    cards = choose_cards(request.config.gpu, cases)
    plan = plan_on_gpus(request)
    config, num_gpus = plan.config, request.config.num_gpus
    name = plan.architecture.name
    work = law.load_work().get((name, config.image_size, config.latents))
    if work is None or config.lora_rank is not None:
        work = Work(**count_image(Step.of(config, plan.architecture, on_cuda=True)))
    fitted = Law(cases)
    source, kernels = law.PRESETS[config.preset]
    num_own = config.batch_size // num_gpus
    asked = (name, config.image_size, config.latents, config.lora_rank, pool_of(num_gpus))
    like = [
        case
        for case in cases
        if (case.model, case.image_size, case.latents, None, pool_of(case.num_gpus)) == asked
    ]
    pool = pool_of(num_gpus, is_new=not like)
    factor = law.find_factor(tested, pool)
    alike = {"model": name, "num_gpus": num_gpus}
    alike |= {"image_size": config.image_size, "latents": config.latents}
    for card in cards:
        size_gib = CARDS[card.memory_gb]
        micro_batch = getattr(config, MICROBATCH)
        if getattr(request.config, MICROBATCH) == "auto":
            budget_gib = AUTO_MEMORY_FRACTION * size_gib
            micro_batch = find_largest_microbatch(plan, num_own, budget_gib=budget_gib)
        row = {
            "kind": "predicted",
            "gpu": card.name,
            **alike,
            **{key: getattr(config, key) for key in SHOWN},
            "global_batch": config.batch_size,
            "micro_batch": micro_batch,
            **dict.fromkeys(RATES),
            "memory_gib": None,
            "known": describe_known(like, card),
            "pool": pool,
            "price_source": None,
            "why": f"more than its {size_gib:g} GiB",
        }
        memory_gib = micro_batch and estimate_memory(plan, micro_batch).total_gib
        if memory_gib and memory_gib <= size_gib:
            case = Case(
                card=card,
                work=work,
                source=source,
                kernels=kernels,
                micro_batch=micro_batch,
                num_own=num_own,
                **alike,
            )
            row |= {"memory_gib": memory_gib, **_predict(fitted, case, factor)}
        yield row


# Columns of settings, and of a prediction.
SHOWN = ("lora_rank", "preset", "sharding", "precision")
RATES = (
    *("images_per_second", "images_per_second_low", "images_per_second_high", "step_time_s"),
    *("device_percent", "start_percent", "exchange_percent", "mfu_percent"),
    *("usd_per_million", "usd_per_million_low", "usd_per_million_high"),
)


def _predict(fitted: Law, case: Case, factor: float) -> dict[str, Any]:
    parts_s = fitted.parts_s(case)
    rate = case.num_gpus / sum(parts_s)
    price = price_of(case.card.name)
    row = {
        "images_per_second": rate,
        "images_per_second_low": rate / factor,
        "images_per_second_high": rate * factor,
        "step_time_s": sum(parts_s) * case.num_own,
        "mfu_percent": 100 * case.work.tera_operations / sum(parts_s) / case.card.tflops,
    }
    names = ("device_percent", "start_percent", "exchange_percent")
    row |= {name: 100 * one / sum(parts_s) for name, one in zip(names, parts_s, strict=True)}
    if price is not None:
        usd = 1e6 / rate * case.num_gpus / 3600 * price.value
        costs = zip(("", "_low", "_high"), (usd, usd / factor, usd * factor), strict=True)
        row |= {f"usd_per_million{end}": cost for end, cost in costs}
        row["price_source"] = price.source
    return row


def describe_known(like: Sequence[Case], card: Card) -> str | None:
    """Images/s of one GPU that were published or measured, with their source."""
    by_source = group((case for case in like if case.card == card), key_of=lambda case: case.source)
    texts = []
    for source, some in by_source.items():
        low, high = min(1 / case.seconds for case in some), max(1 / case.seconds for case in some)
        texts.append(f"{low:.3g}{'' if low == high else f' to {high:.3g}'} ({source})")
    return "; ".join(texts) or None


def describe(rows: Sequence[dict[str, Any]], tested: Sequence[Tested], flags: str) -> Iterator[str]:
    """The table of predictions, and what is to be known of them; `flags` are the user's."""
    first = rows[0]
    place = "latents" if first["latents"] == "precomputed" else "encoded in the step"
    lora = f", LoRA of rank {first['lora_rank']}" if first["lora_rank"] else ""
    yield (
        f"PREDICTED, not measured: {first['model']}{lora} at {first['image_size']} px, {place}, "
        f"preset {first['preset']}, {first['global_batch']} images in a step of "
        f"{counted(first['num_gpus'], 'GPU')}"
    )
    yield ""
    yield from to_terminal(tabulate(TABLE, rows)).splitlines()
    yield ""
    pool = first["pool"]
    members = [one for one in tested if one.pool == pool]
    errors = sorted(abs(one.predicted / one.case.images_per_second - 1) for one in members)
    yield (
        f"Error: in {len(members)} tests figures of {pool} were predicted without all of their "
        f"GPU, source or model, half to {100 * errors[len(errors) // 2]:.0f} %. The interval, also "
        f"of step and MFU, is a factor of {law.find_factor(tested, pool):.2f} both ways; the "
        "memory is what `python -m sdbench memory` estimates."
    )
    if pool != law.PROVEN:
        yield (
            f"Caution: that intervals of {pool} are right was not shown by the tests "
            "(results/predictions.md), and LoRA was not tested: take them for ranges."
        )
    for source in dict.fromkeys(row["price_source"] for row in rows if row["price_source"]):
        names = [row["gpu"] for row in rows if row["price_source"] == source]
        yield f"Price of {', '.join(names)}: {source}"
    yield "To measure one, on a machine that has it:"
    of_each = " (on each machine)" if first["num_gpus"] > law.GPUS_OF_A_MACHINE else ""
    yield (
        f"  composer -n {min(first['num_gpus'], law.GPUS_OF_A_MACHINE)} benchmark.py "
        f"--use_synth_data {flags}{of_each}"
    )


def _range(name: str) -> Any:
    def text(row: dict[str, Any]) -> str | None:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return None if low is None else f"{format_number(low)} to {format_number(high)}"

    return text


def _bottleneck(row: dict[str, Any]) -> str:
    if row["images_per_second"] is None:
        return row["why"]
    parts = {"starting operators": row["start_percent"], "exchange": row["exchange_percent"]}
    named = [f"{name} {percent:.0f} %" for name, percent in parts.items() if percent >= 10]
    return ", ".join(named) or "the GPU itself"


TABLE = (
    Field("GPU", "gpu"),
    Field("images/s", "images_per_second", digits=3),
    Field("interval", _range("images_per_second")),
    Field("step, s", "step_time_s", digits=3),
    Field("MFU, %", "mfu_percent", digits=2),
    Field("micro-batch", "micro_batch"),
    Field("memory, GiB", "memory_gib", digits=3),
    Field("limit", _bottleneck),
    Field("USD per million", "usd_per_million", digits=3),
    Field("interval, USD", _range("usd_per_million")),
    Field("known, images/s of a GPU", "known"),
)
