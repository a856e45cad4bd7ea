"""A plan as text for the terminal, as YAML for `--config` and as fields of a record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.base.secrets import redact_values
from sdbench.base.units import counted
from sdbench.measure import hardware
from sdbench.models.architecture import DRAWING
from sdbench.plan.draft import Plan
from sdbench.ranks.distributed import Ranks
from sdbench.ranks.launcher import launcher_name
from sdbench.record.configuration import count_devices
from sdbench.settings.file import as_literal
from sdbench.settings.ray import RAY
from sdbench.settings.recipe import EngineConfig
from sdbench.settings.request import ConfigT, Request

# Facts of the field ``workload`` that the run finds out.
FACTS_OF_WORK = (
    *("num_parameters", "num_trainable_parameters", "flops_per_image", "num_images"),
    *("num_bad_samples", "num_dropped_samples", "num_failed_blocks"),
)


def for_person(plan: Plan[EngineConfig]) -> str:
    """A few lines that say what will run, and every value that the program chose."""
    lines = list(plan.notes)
    if plan.chosen:
        where = "No GPU here. " if plan.machine.device_type == "cpu" else ""
        values = ", ".join(f"{name}={getattr(plan.config, name)}" for name in plan.chosen)
        lines.append(f"{where}Chosen for this machine, each by a flag of its name: {values}")
    config = plan.config
    devices = count_devices(hardware.as_dict(plan.machine), plan.ranks.for_record())
    microbatch = config.device_train_microbatch_size
    num_images = config.batch_size // plan.ranks.world_size
    in_buckets = "" if plan.mixture is None else f" in {counted(len(plan.mixture.shapes), 'shape')}"
    parts = counted(-(-num_images // microbatch), "micro-batch", "micro-batches")
    lines.append(
        f"Training {plan.architecture.name} at {config.image_size} px{in_buckets}, "
        f"preset {config.preset}: {devices}, global batch {config.batch_size}, "
        f"{counted(num_images, 'image')} per rank in {parts} of {microbatch}, "
        f"{counted(plan.num_steps, 'step')}; estimated peak memory "
        f"{plan.memory.total_gib:.1f} GiB per rank"
    )
    return "\n".join(lines)


def as_yaml(
    request: Request[ConfigT], config: ConfigT, *, chosen: Mapping[str, str], notes: Sequence[str]
) -> str:
    """All settings as YAML that --config accepts, each with a comment that says who chose it.

    `config` has the settings of the request and those that the program chose, `chosen` its reasons.
    The `notes` come first, as comments.
    """
    import yaml

    lines = [f"# {line}" for note in notes for line in note.splitlines()]
    for name, value in redact_values(dataclasses.asdict(config)).items():
        text = yaml.safe_dump({name: as_literal(value)}, default_flow_style=False).strip()
        if name in chosen:
            comment = f"chosen: {chosen[name]}"
        else:
            comment = request.origin[name]
            if comment == "file" and name in request.translation.keys:
                comment += f": {request.translation.keys[name]}"
        lines.append(f"{text}  # {comment}")
    return "\n".join(lines)


def for_record(plan: Plan[EngineConfig], *, num_restarts: int) -> dict[str, Any]:
    """The fields of a record before the run; what the run will find out is None."""
    memory = {**dataclasses.asdict(plan.memory), "total_gib": plan.memory.total_gib}
    return {
        "config": dataclasses.asdict(plan.config),
        "origin": dict(plan.request.origin),
        "chosen": plan.chosen,
        "workload": {
            "architecture": plan.architecture.name,
            "weights": "random" if plan.architecture.weights_folder is None else "loaded",
            "revision": plan.architecture.revision,
            "num_steps": plan.num_steps,
            "drawing": DRAWING if plan.architecture.random_parts else None,
            "buckets": None if plan.mixture is None else plan.mixture.for_record(),
            **dict.fromkeys(FACTS_OF_WORK),
        },
        "machine": hardware.as_dict(plan.machine),
        "ranks": describe_ranks(plan.ranks, num_restarts=num_restarts, engine=plan.config.engine),
        "memory_estimate_gib": memory,
        "notes": list(plan.notes),
        "data": None,
    }


def describe_ranks(ranks: Ranks, *, num_restarts: int, engine: str) -> dict[str, Any]:
    """The field ``ranks`` of a record, without the network, which only some runs learn."""
    launcher = RAY if engine == RAY else launcher_name()
    facts = {"restarts": num_restarts, "launcher": launcher, "network": None}
    return ranks.for_record() | facts
