"""Turns records into rows of a table, and writes such tables as CSV.

The columns include those of the tables of published figures, so that measured and quoted rows can
be compared. An unknown value is an empty cell. A text that a spreadsheet would take for a formula
gets a leading apostrophe.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from sdbench.base.escape import for_csv
from sdbench.base.files import append_bytes
from sdbench.record.configuration import describe_model, describe_other_settings, place_of_encoders

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
    "num_cpu_cores",
    "num_nodes",
    "other_settings",
    "step_time_p50_s",
    "step_time_p95_s",
    "data_wait_percent",
    "peak_memory_gib",
    "mfu_percent",
    "num_measured_steps",
    "num_warmup_steps",
    "stability",
    "flags",
    "step_time_cv_percent",
    "num_outliers",
    "matmul_tflops",
    "mfu_of_matmul_percent",
    "power_w",
    "energy_j_per_image",
    "loss_first",
    "loss_last",
    "started_utc",
    "git_commit",
    "reason",
)


def make_row(record: dict[str, Any]) -> dict[str, Any]:
    """Flatten a record of any status: a value for every column, None where it is unknown."""
    config, machine = record["config"], record["machine"]
    summary = record["summary"] or {}
    interval = summary.get("images_per_second_interval") or {}
    gpu = summary.get("gpu") or {}
    energy_j, num_steps = gpu.get("energy_j"), summary.get("num_measured_steps")
    on_gpu = machine["device_type"] == "cuda"
    num_devices = record["ranks"]["world_size"]
    row = {
        "source": record["run_id"],
        "kind": "measured",
        "gpu": machine["device_name"] if on_gpu else None,
        "num_gpus": num_devices if on_gpu else 0,
        "ema": config["use_ema"],
        "micro_batch": config["device_train_microbatch_size"],
        "global_batch": config["batch_size"],
        "images_per_step": config["batch_size"],
        "images_per_second_low": interval.get("low"),
        "images_per_second_high": interval.get("high"),
        "model": describe_model(record),
        "device": machine["device_name"],
        "num_devices": num_devices,
        "num_cpu_cores": machine["num_cpu_cores"],
        "num_nodes": record["ranks"]["num_nodes"],
        "other_settings": describe_other_settings(record),
        # Records made before flags existed have none.
        "flags": ";".join(summary.get("flags", ())) or None,
        "power_w": gpu.get("power_w"),
        "energy_j_per_image": energy_j and energy_j / (num_steps * config["batch_size"]),
        "git_commit": record["git"]["commit"],
        "latents": place_of_encoders(config),
    }
    of_config = ("image_size", "num_workers", "precision", "engine", "preset", "data_format")
    row |= {name: config[name] for name in of_config}
    row |= {name: record[name] for name in ("status", "started_utc", "reason")}
    return {column: row.get(column, summary.get(column)) for column in COLUMNS}


def format_csv(rows: Iterable[dict[str, Any]], *, columns: Sequence[str]) -> str:
    """Rows, by column, as CSV with a header, unrounded; a missing value is an empty cell.

    Booleans are written as in the tables of published figures.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([for_csv(column) for column in columns])
    words = {True: "true", False: "false"}
    for row in rows:
        values = [row.get(column) for column in columns]
        writer.writerow([words[v] if isinstance(v, bool) else for_csv(v) for v in values])
    return buffer.getvalue()


def append_row(path: Path, record: dict[str, Any]) -> None:
    """Append a record's row to a CSV file; a new file gets a header.

    The file is locked while it is written. A file with the columns of another version of the suite
    is renamed, so that no cell lands in a wrong column. On a full disk OSError is raised, and the
    file is unchanged.
    """
    while True:
        with path.open("a+", encoding="utf-8", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_still(path, file):
                continue  # another run has set it aside while this one waited for the lock
            file.seek(0)
            header = next(csv.reader(file), None)
            if header is not None and tuple(header) != COLUMNS:
                aside = _set_aside(path)
                print(
                    f"{path} has other columns than this version of the suite writes: it is now "
                    f"{aside.name}, and {path.name} begins anew",
                    file=sys.stderr,
                )
                continue
            text = format_csv([make_row(record)], columns=COLUMNS)
            text = text if header is None else text.partition("\n")[2]
            append_bytes(file.fileno(), text.encode())
            return


def _is_still(path: Path, file: TextIO) -> bool:
    """Return False if the open file has been renamed since."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _set_aside(path: Path) -> Path:
    """Rename a locked file to the first free name of the form ``runs.old-1.csv``."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.old-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)
