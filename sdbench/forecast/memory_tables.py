"""Tables of the command `memory`."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.progress import show_progress
from sdbench.base.units import counted
from sdbench.measure.hardware import Machine
from sdbench.plan.batch import AUTO_MEMORY_FRACTION, find_largest_microbatch
from sdbench.plan.draft import Plan
from sdbench.plan.memory_limit import MICROBATCH, find_need, pull_levers
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


def print_tables(request: Request[MemorySettings]) -> None:
    """Print what fits, what the memory is made of, and what lowers it."""
    config = request.config
    sizes = {f"{name} GB": size for name, size in CARDS.items()}
    if config.gpu_memory_gib is not None:
        sizes = {f"{size:g} GiB": size for size in config.gpu_memory_gib}
    plans = dict(_plan_recipes(request))
    first = next(iter(plans.values()))
    size = getattr(first.config, MICROBATCH)
    print(_describe(first))
    print("\nLargest micro-batch, by memory of the GPU\n")
    fitting = show_progress(_find_fitting(plans, sizes), total=len(plans), unit="recipe")
    columns = [Field("recipe", "recipe"), *(Field(card, card, unknown="-") for card in sizes)]
    print(to_terminal(tabulate(columns, fitting)))
    print(f"\nPeak of a GPU at micro-batch {size}, in GiB\n")
    print(to_terminal(make_table(_list_parts(plans))))
    print(f"\nFlags that lower the {find_need(first).total_gib:.1f} GiB of the first row\n")
    print(to_terminal(make_table(_list_levers(first))))


def _plan_recipes(request: Request[MemorySettings]) -> Iterator[tuple[str, Plan[MemorySettings]]]:
    """Plan all recipes; or what is given alone, if a setting of a recipe is."""
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
            print(f"Without {name}: {error.what}.")
            continue
        if all(getattr(plan.config, key) == value for key, value in values.items()):
            yield name, plan
        else:
            print(f"Without {name}: {plan.architecture.name} cannot have all of its settings.")


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


def _describe(plan: Plan[MemorySettings]) -> str:
    config = plan.config
    place = "encoded in the step" if config.step_has_encoders else "encoded beforehand"
    return (
        f"{plan.architecture.name} at {config.image_size} px, pictures {place}, "
        f"{config.batch_size} in a step of {counted(plan.ranks.world_size, 'GPU')}, in "
        f"{config.precision} unless a recipe says otherwise."
    )


def _find_fitting(
    plans: dict[str, Plan[MemorySettings]], sizes: dict[str, float]
) -> Iterator[dict[str, Any]]:
    for name, plan in plans.items():
        num_own = plan.config.batch_size // plan.ranks.world_size
        yield {
            "recipe": name,
            **{
                card: find_largest_microbatch(plan, num_own, budget_gib=AUTO_MEMORY_FRACTION * gib)
                for card, gib in sizes.items()
            },
        }


def _list_parts(plans: dict[str, Plan[MemorySettings]]) -> Iterator[dict[str, Any]]:
    for name, plan in plans.items():
        estimate = find_need(plan).estimate
        parts = {part.replace("_", " "): round(gib, 2) for part, gib in estimate.parts().items()}
        yield {"recipe": name, "peak": round(estimate.total_gib, 2), **parts, "at": estimate.phase}


def _list_levers(plan: Plan[MemorySettings]) -> Iterator[dict[str, Any]]:
    before_gib = find_need(plan).total_gib
    for pulled in pull_levers(plan):
        yield {
            "flags": pulled.flags,
            "GiB": round(pulled.need.total_gib, 2),
            "saved": round(before_gib - pulled.need.total_gib, 2),
            "cost": pulled.cost,
        }
