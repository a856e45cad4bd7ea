"""What is one run as one row of a long table?

The columns are those of the tables of other people's published figures, and more, so that measured
and quoted rows stand side by side. Unknown is an empty cell.
"""

from __future__ import annotations

import csv
import fcntl
import io
from pathlib import Path
from typing import Any

COLUMNS = (
    "source",
    "kind",
    "gpu",
    "num_gpus",
    "image_size",
    "latents",
    "ema",
    "micro_batch",
    "num_workers",
    "global_batch",
    "images_per_step",
    "images_per_second",
    "images_per_second_low",
    "images_per_second_high",
    "precision",
    "engine",
    "status",
    "model",
    "preset",
    "data_format",
    "device",
    "num_devices",
    "step_time_p50_s",
    "step_time_p95_s",
    "data_wait_percent",
    "peak_memory_gib",
    "mfu_percent",
    "num_measured_steps",
    "loss_first",
    "loss_last",
    "started_utc",
    "git_commit",
    "reason",
)


def make_row(record: dict[str, Any]) -> dict[str, Any]:
    """Flatten a record.

    Args:
        record: A record of any status.

    Returns:
        A value for every column; None where the run gave none.
    """
    config, machine = record["config"], record["machine"]
    summary = record["summary"] or {}
    interval = summary.get("images_per_second_interval") or {}
    on_gpu = machine["device_type"] == "cuda"
    num_devices = record["ranks"]["world_size"]
    row = {
        "source": record["run_id"],
        "kind": "measured",
        "gpu": machine["device_name"] if on_gpu else None,
        "num_gpus": num_devices if on_gpu else 0,
        "ema": "true" if config["use_ema"] else "false",
        "micro_batch": config["device_train_microbatch_size"],
        "global_batch": config["batch_size"],
        "images_per_step": config["batch_size"],
        "images_per_second_low": interval.get("low"),
        "images_per_second_high": interval.get("high"),
        "model": record["workload"]["architecture"],
        "device": machine["device_name"],
        "num_devices": num_devices,
        "git_commit": record["git"]["commit"],
    }
    for name in ("image_size", "latents", "num_workers", "precision", "engine", "preset"):
        row[name] = config[name]
    row["data_format"] = config["data_format"]
    for name in ("status", "started_utc", "reason"):
        row[name] = record[name]
    return {column: row.get(column, summary.get(column)) for column in COLUMNS}


def append_row(path: Path, record: dict[str, Any]) -> None:
    """Add a record's row to a CSV file, which gets its header with its first row.

    A lock keeps the rows of runs that end at the same moment apart.

    Args:
        path: The CSV file.
        record: The record.
    """
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(make_row(record))
        file.write(buffer.getvalue())
