"""Groups runs into configurations: runs with the same settings are replicates.

All settings that may change a step are compared, and a run that does not know one of them is not
like a run that does: runs with an unknown difference must not be averaged.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from sdbench.settings.config import SETTINGS
from sdbench.settings.recipe import TrainConfig
from sdbench.settings.setting import declarations
from sdbench.settings.subject import DREAMBOOTH

Item = TypeVar("Item")

# Encoders that run in other processes while a step is trained.
BESIDE = "beside"
# Latents of a subject, made when its run begins and never loaded.
SUBJECT = "subject"

# The settings of all runs that train.
DECLARED = {**declarations(TrainConfig), **SETTINGS}
# The columns of a row that say what is computed.
WORK = ("model", "image_size", "latents")
# Settings of how and how long to measure, and of where to write.
HOW_MEASURED = frozenset(name for name, declared in SETTINGS.items() if declared.only_measures)
# Settings that have a column of their own in a row, or that such a column implies.
IN_COLUMNS = frozenset(
    (
        *("model_name", "image_size", "preset", "engine", "precision", "latents", "task"),
        *("online_preprocessing", "use_ema", "batch_size", "device_train_microbatch_size"),
        *("num_workers", "data_format", "use_synth_data"),
    )
)


def place_of_encoders(config: Mapping[str, Any]) -> str:
    """Where the latents of a step come from: the setting ``latents``, `BESIDE` or `SUBJECT`."""
    if config["task"] == DREAMBOOTH:
        return SUBJECT
    return BESIDE if config["online_preprocessing"] else config["latents"]


def describe_place(config: Mapping[str, Any]) -> str:
    """`place_of_encoders`, with the buckets: pictures of other shapes are other work."""
    place, buckets = place_of_encoders(config), config["buckets"]
    if buckets is None:
        return place
    longest = config["max_aspect_ratio"]
    return f"{place}, in buckets {buckets}" + ("" if longest == 2 else f" to {longest:g} : 1")


def describe_model(record: Mapping[str, Any]) -> str:
    """The model of a run of benchmark.py or train.py, with the rank of its LoRA, if any.

    LoRA takes less work and memory than training all weights, so it counts as another model.
    """
    name, rank = record["workload"]["architecture"], record["config"]["lora_rank"]
    return name if rank is None else f"{name}, LoRA {rank}"


def work_of(record: Mapping[str, Any]) -> tuple[str, int, str]:
    """What a run computes, by the columns `WORK`: figures of other work share no table and axes."""
    config = record["config"]
    return describe_model(record), config["image_size"], describe_place(config)


def count_devices(machine: Mapping[str, Any], ranks: Mapping[str, Any]) -> str:
    """The devices of a record, e.g. ``8 x NVIDIA H200``; several ranks share the CPU of a node."""
    num_ranks, num_nodes, name = ranks["world_size"], ranks["num_nodes"], machine["device_name"]
    if machine["device_type"] != "cpu" or num_ranks == num_nodes:
        return f"{num_ranks} x {name}"
    return f"{num_ranks} ranks on {'' if num_nodes == 1 else f'{num_nodes} x '}{name}"


def settings_of(record: dict[str, Any]) -> dict[str, str | int | float]:
    """Every known setting of a training run, and the size of its machines, by name.

    A setting that is switched off is ``none``.
    """
    config = record["config"]
    has_copies = config["remote"] is not None or config["streams"] is not None
    settings = {
        name: _as_setting(value)
        for name, value in config.items()
        # Another folder for copies is not another data set.
        if not (name in HOW_MEASURED or _is_unknown(name, value))
        and not (name == "local" and has_copies)
    }
    machine, ranks = record["machine"], record["ranks"]
    return {
        **settings,
        **hash_of_data(record),
        "model_name": record["workload"]["architecture"],
        "device": machine["device_name"],
        "num_cpu_cores": machine["num_cpu_cores"],
        "num_devices": ranks["world_size"],
        "num_nodes": ranks["num_nodes"],
        # Runs of others are no replicates of those measured here.
        **record.get("submission", {}),
    }


def hash_of_data(record: Mapping[str, Any]) -> dict[str, str]:
    """The hash of a run's data set, by name; empty if unknown.

    It tells data sets apart in published records, whose paths are placeholders.
    """
    described = record.get("data")  # precompute keeps it beside what it has encoded
    return {"data_sha256": described["sha256"][:12]} if described else {}


def describe_other_settings(record: dict[str, Any]) -> str | None:
    """The settings of `other_settings`, e.g. ``attention eager, lr 0.0002``; None if none."""
    chosen = [f"{name} {value}" for name, value in other_settings(record).items()]
    return ", ".join(chosen) or None


def other_settings(record: dict[str, Any]) -> dict[str, Any]:
    """The user's settings that have no column in a row, by name."""
    config = record["config"]
    return {
        name: config[name]
        for name, origin in record["origin"].items()
        if origin in ("flag", "file") and name in config and name not in HOW_MEASURED | IN_COLUMNS
    }


def _is_unknown(name: str, value: Any) -> bool:
    """Whether a record does not know a setting: it is None, and a run always has a value."""
    declared = DECLARED.get(name)
    has_value = declared is not None and (declared.presets or declared.default is not None)
    return value is None and bool(has_value)


def _as_setting(value: Any) -> str | int | float:
    if isinstance(value, str | int | float):
        return value
    return "none" if value is None else json.dumps(value, sort_keys=True)


def group(items: Iterable[Item], *, key_of: Callable[[Item], Hashable]) -> dict[Any, list[Item]]:
    """Group items by a key, in the order of its first occurrence."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key_of(item), []).append(item)
    return groups


def as_key(settings: Mapping[str, Any]) -> tuple[tuple[str, Hashable], ...]:
    """Settings as a dictionary's key, whatever their order; 1 and 1.0 are the same value."""
    return tuple(
        (name, value if isinstance(value, Hashable) else json.dumps(value, sort_keys=True))
        for name, value in sorted(settings.items(), key=operator.itemgetter(0))
    )
