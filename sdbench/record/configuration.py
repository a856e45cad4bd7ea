"""The settings that make a configuration: runs that share them are its replicates.

Every setting counts that may change what a step does, also one that this version of the suite does
not know, so that nothing is pooled, or compared across, unseen.
"""

from __future__ import annotations

import json
from typing import Any

# Settings of benchmark.py that say how to measure, how long and where to write.
HOW_MEASURED = frozenset(
    {
        "warmup_batches",
        "max_warmup_batches",
        "measure_batches",
        "max_measure_batches",
        "target_precision",
        "max_duration",
        "profile_batches",
        "profile_trace",
        "measure_peak",
        "seed",
        "weights_seed",
        "results_dir",
        "check_memory",
        "data_timeout_s",
        "dist_timeout",
        "allow_uneven_batch",
        "wandb_name",
        "wandb_project",
    }
)
# Settings that a row has under a name of its own, or that another one says in full.
IN_COLUMNS = frozenset(
    {
        "model_name",
        "image_size",
        "preset",
        "engine",
        "precision",
        "latents",
        "use_ema",
        "batch_size",
        "device_train_microbatch_size",
        "num_workers",
        "data_format",
        "use_synth_data",
    }
)


def settings_of(record: dict[str, Any]) -> dict[str, str | int | float]:
    """Every setting of a training run, and the size of what it ran on.

    Args:
        record: A record of a training run.

    Returns:
        Values by name; one that is switched off is ``none``, for None means that nobody told.
    """
    config = record["config"]
    has_copies = config.get("remote") is not None or config.get("streams") is not None
    settings = {
        name: _as_setting(value)
        for name, value in config.items()
        # Where the copies of a data set were kept is not another data set.
        if name not in HOW_MEASURED and not (name == "local" and has_copies)
    }
    machine, ranks = record["machine"], record["ranks"]
    return {
        **settings,
        "model_name": record["workload"]["architecture"],
        "device": machine["device_name"],
        "num_cpu_cores": machine["num_cpu_cores"],
        "num_devices": ranks["world_size"],
        "num_nodes": ranks["num_nodes"],
    }


def describe_other_settings(record: dict[str, Any]) -> str | None:
    """What the user chose beyond the columns of a row, e.g. ``attention eager, lr 0.0002``."""
    config = record["config"]
    chosen = [
        f"{name} {config[name]}"
        for name, origin in record["origin"].items()
        if origin in ("flag", "file") and name not in HOW_MEASURED | IN_COLUMNS
    ]
    return ", ".join(chosen) or None


def _as_setting(value: Any) -> str | int | float:
    if isinstance(value, str | int | float):
        return value
    return "none" if value is None else json.dumps(value, sort_keys=True)
