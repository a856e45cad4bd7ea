"""Tables of the command `memory`."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.progress import show_progress
from sdbench.base.units import counted
from sdbench.forecast.known_steps import use_known_steps, versions_of
from sdbench.measure.hardware import Machine
from sdbench.plan.batch import AUTO_MEMORY_FRACTION, find_largest_microbatch
from sdbench.plan.draft import Plan
from sdbench.plan.memory_limit import MICROBATCH, find_need, pull_levers, step_of
from sdbench.plan.resolve import plan_step
from sdbench.ranks.distributed import Ranks
from sdbench.report.tables import Field, make_table, tabulate, to_terminal
from sdbench.settings.fitting import MemorySettings
from sdbench.settings.request import Request
from sdbench.settings.setting import GPU

# Memory that torch finds, in GiB, by the number in a card's name. It is 1 % below what nvidia-smi
# tells (81,050 MiB of 81,920 on an A100): T4 15,360 MiB, L4 23,034, A100 40,960, L40S 46,068, H100
# 81,559. H200: measured here. B200: its driver tells 178.35 GiB. 288 GB: 288e9 bytes.
CARDS = {16: 14.8, 24: 22.2, 40: 39.6, 48: 44.5, 80: 78.8, 141: 139.8, 192: 178.3, 288: 268.2}
NUM_SHARDS = 8

# Settings of each recipe beside those of the command line.
RECIPES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, EMA": {"use_ema": True},
    "all weights in bf16, recomputed": {"precision": "bf16", "activation_checkpointing": "full"},
    "all weights in bf16, recomputed, 8-bit AdamW": {
        "precision": "bf16",
        "activation_checkpointing": "full",
        "optimizer": "adamw_8bit",
    },
    f"all weights, sharded over {NUM_SHARDS}": {"sharding": "full", "num_gpus": NUM_SHARDS},
    "LoRA": {"lora_rank": 16, "precision": "bf16"},
    "LoRA, recomputed": {
        "lora_rank": 16,
        "precision": "bf16",
        "activation_checkpointing": "full",
    },
    "LoRA on 4-bit weights, recomputed": {
        "lora_rank": 16,
        "precision": "bf16",
        "frozen_bits": "nf4",
        "activation_checkpointing": "full",
    },
    "DreamBooth by LoRA": {"lora_rank": 16, "precision": "bf16", "task": "dreambooth"},
}
# Of the only row, if flags make it a recipe of its own.
AS_GIVEN = "these flags"


def find_needs(request: Request[MemorySettings]) -> tuple[dict[str, Any], Plan[MemorySettings]]:
    """What fits and what the memory is made of, as --json prints it; and the plan of the first row.

    ``recipes`` have for each GPU the largest micro-batch that fits, None if none does, and the
    memory at `micro_batch`. `replayed_with` has the versions that `known_steps` were made with;
    None: the steps are replayed now.
    """
    use_known_steps()
    config = request.config
    sizes = {f"{name} GB": size for name, size in CARDS.items()}
    if config.gpu_memory_gib is not None:
        sizes = {f"{size:g} GiB": size for size in config.gpu_memory_gib}
    left_out: list[dict[str, str]] = []
    plans = dict(_plan_recipes(request, left_out))
    first = next(iter(plans.values()))
    recipes = _find_fitting(plans, sizes)
    needs = {
        "model": first.architecture.name,
        "image_size": first.config.image_size,
        "latents": first.config.latents,
        "encodes_in_step": first.config.step_has_encoders,
        "precision": first.config.precision,
        "num_gpus": first.ranks.world_size,
        "global_batch": first.config.batch_size,
        "micro_batch": getattr(first.config, MICROBATCH),
        "gpu_memory_gib": sizes,
        "replayed_with": versions_of(step_of(first)),
        "recipes": list(show_progress(recipes, total=len(plans), unit="recipe")),
        "left_out": left_out,
    }
    return needs, first


def print_needs(needs: dict[str, Any]) -> None:
    """Print what `find_needs` has found."""
    recipes = needs["recipes"]
    for one in needs["left_out"]:
        print(f"Without {one['recipe']}: {one['reason']}.")
    print(_describe(needs))
    print("\nLargest micro-batch, by memory of the GPU\n")
    columns = [
        Field(card, lambda row, card=card: row["largest_micro_batch"][card], unknown="-")
        for card in needs["gpu_memory_gib"]
    ]
    print(to_terminal(tabulate([Field("recipe", "recipe"), *columns], recipes)))
    print(f"\nPeak of a GPU at micro-batch {needs['micro_batch']}, in GiB\n")
    print(to_terminal(make_table(map(_in_gib, recipes))))


def _plan_recipes(
    request: Request[MemorySettings], left_out: list[dict[str, str]]
) -> Iterator[tuple[str, Plan[MemorySettings]]]:
    """Plan all recipes; or what is given alone, if a setting of a recipe is.

    Recipes that the model cannot have are added to `left_out`.
    """
    names = {name for values in RECIPES.values() for name in values} - {"num_gpus"}
    if any(map(request.is_users, names)):
        yield AS_GIVEN, plan_on_gpus(request)
        return
    for name, values in RECIPES.items():
        if any(map(request.is_users, values)):  # --num_gpus
            continue
        try:
            plan = plan_on_gpus(request.changed(values))
            find_need(plan)  # only a replay finds layers that a format does not suit
        except ConfigError as error:
            if not values:
                raise
            left_out.append({"recipe": name, "reason": error.what})
            continue
        if all(getattr(plan.config, key) == value for key, value in values.items()):
            yield name, plan
        else:
            reason = f"{plan.architecture.name} cannot have all of its settings"
            left_out.append({"recipe": name, "reason": reason})


def plan_on_gpus(request: Request[MemorySettings]) -> Plan[MemorySettings]:
    """Plan a run on GPUs; where no micro-batch is given, it has 1."""
    num_gpus = request.config.num_gpus
    machine = Machine(
        device_type=GPU,
        device_name="GPU",
        num_devices=num_gpus,
        device_memory_gib=0.0,
        free_memory_gib=0.0,
        held_memory_gib=0.0,
        num_cpu_cores=num_gpus,
        cpu_name="CPU",
        memory_gib=0.0,
        cpu_flags=(),
        platform=platform.platform(),
    )
    ranks = Ranks(rank=0, world_size=num_gpus, local_rank=0, local_world_size=min(num_gpus, 8))
    return plan_step(request, machine=machine, ranks=ranks)


def _describe(needs: dict[str, Any]) -> str:
    place = "encoded in the step" if needs["encodes_in_step"] else "encoded beforehand"
    beforehand, versions = "", needs["replayed_with"]
    if versions is not None:
        packages = ", ".join(f"{name} {version}" for name, version in versions.items())
        beforehand = f" Its steps were replayed beforehand, with {packages}."
    return (
        f"{needs['model']} at {needs['image_size']} px, pictures {place}, {needs['global_batch']} "
        f"in a step of {counted(needs['num_gpus'], 'GPU')}, in {needs['precision']} unless a "
        f"recipe says otherwise.{beforehand}"
    )


def _find_fitting(
    plans: dict[str, Plan[MemorySettings]], sizes: dict[str, float]
) -> Iterator[dict[str, Any]]:
    for name, plan in plans.items():
        num_own = plan.config.batch_size // plan.ranks.world_size
        estimate = find_need(plan).estimate
        yield {
            "recipe": name,
            "num_gpus": plan.ranks.world_size,
            "largest_micro_batch": {
                card: find_largest_microbatch(plan, num_own, budget_gib=AUTO_MEMORY_FRACTION * gib)
                for card, gib in sizes.items()
            },
            "micro_batch": getattr(plan.config, MICROBATCH),
            "memory_gib": estimate.total_gib,
            "memory_parts_gib": estimate.parts(),
            "phase": estimate.phase,
        }


def _in_gib(row: dict[str, Any]) -> dict[str, Any]:
    parts = row["memory_parts_gib"].items()
    rounded = {part.replace("_", " "): round(gib, 2) for part, gib in parts}
    peak = round(row["memory_gib"], 2)
    return {"recipe": row["recipe"], "peak": peak, **rounded, "at": row["phase"]}


def list_levers(plan: Plan[MemorySettings]) -> Iterator[dict[str, Any]]:
    """Each flag that lowers the memory of a run, with what it leaves, and what it costs."""
    before_gib = find_need(plan).total_gib
    for pulled in pull_levers(plan):
        yield {
            "flags": pulled.flags,
            "memory_gib": pulled.need.total_gib,
            "saved_gib": before_gib - pulled.need.total_gib,
            "cost": pulled.cost,
        }


def print_levers(needs: dict[str, Any], levers: Iterable[dict[str, Any]]) -> None:
    """Print what `list_levers` has found."""
    before_gib = needs["recipes"][0]["memory_gib"]
    print(f"\nFlags that lower the {before_gib:.1f} GiB of the first row\n")
    print(to_terminal(make_table(map(_as_saving, levers))))


def _as_saving(row: dict[str, Any]) -> dict[str, Any]:
    gib = {"GiB": round(row["memory_gib"], 2), "saved": round(row["saved_gib"], 2)}
    return {"flags": row["flags"], **gib, "cost": row["cost"]}
