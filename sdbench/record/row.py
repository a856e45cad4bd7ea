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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from sdbench.base.escape import for_csv
from sdbench.base.files import append_bytes
from sdbench.record.configuration import describe_model, describe_other_settings, describe_place


def _value_at(record: dict[str, Any], path: str) -> Any:
    """The value at a path such as ``summary.gpu.power_w``; None if a part of it is missing."""
    value: Any = record
    for name in path.split("."):
        value = None if value is None else value.get(name)
    return value


def _is_on_gpu(record: dict[str, Any]) -> bool:
    return record["machine"]["device_type"] == "cuda"


def _energy_j_per_image(record: dict[str, Any]) -> float | None:
    energy_j = _value_at(record, "summary.gpu.energy_j")
    if not energy_j:
        return energy_j
    return energy_j / (record["summary"]["num_measured_steps"] * record["config"]["batch_size"])


# Where the value of each column is in a record, or what makes it of the record.
VALUES: dict[str, str | Callable[[dict[str, Any]], Any]] = {
    "source": "run_id",
    "kind": lambda record: "measured",
    "gpu": lambda record: record["machine"]["device_name"] if _is_on_gpu(record) else None,
    "num_gpus": lambda record: record["ranks"]["world_size"] if _is_on_gpu(record) else 0,
    "image_size": "config.image_size",
    "latents": lambda record: describe_place(record["config"]),
    "ema": "config.use_ema",
    "micro_batch": "config.device_train_microbatch_size",
    "num_workers": "config.num_workers",
    "global_batch": "config.batch_size",
    "images_per_step": "config.batch_size",
    "images_per_second": "summary.images_per_second",
    "images_per_second_low": "summary.images_per_second_interval.low",
    "images_per_second_high": "summary.images_per_second_interval.high",
    "precision": "config.precision",
    "engine": "config.engine",
    "status": "status",
    "model": describe_model,
    "preset": "config.preset",
    "data_format": "config.data_format",
    "device": "machine.device_name",
    "num_devices": "ranks.world_size",
    "num_cpu_cores": "machine.num_cpu_cores",
    "num_nodes": "ranks.num_nodes",
    "other_settings": describe_other_settings,
    "step_time_p50_s": "summary.step_time_p50_s",
    "step_time_p95_s": "summary.step_time_p95_s",
    "data_wait_percent": "summary.data_wait_percent",
    "peak_memory_gib": "summary.peak_memory_gib",
    "mfu_percent": "summary.mfu_percent",
    "num_measured_steps": "summary.num_measured_steps",
    "num_warmup_steps": "summary.num_warmup_steps",
    "stability": "summary.stability",
    "flags": lambda record: ";".join(_value_at(record, "summary.flags") or ()) or None,
    "step_time_cv_percent": "summary.step_time_cv_percent",
    "num_outliers": "summary.num_outliers",
    "matmul_tflops": "summary.matmul_tflops",
    "mfu_of_matmul_percent": "summary.mfu_of_matmul_percent",
    "power_w": "summary.gpu.power_w",
    "energy_j_per_image": _energy_j_per_image,
    "loss_first": "summary.loss_first",
    "loss_last": "summary.loss_last",
    "started_utc": "started_utc",
    "git_commit": "git.commit",
    "reason": "reason",
}
COLUMNS = tuple(VALUES)


def make_row(record: dict[str, Any]) -> dict[str, Any]:
    """Flatten a record of any status: a value for every column, None where it is unknown.

    That of a submitted result has another kind and source, and a submitter.
    """
    row = {
        column: _value_at(record, value) if isinstance(value, str) else value(record)
        for column, value in VALUES.items()
    }
    return row | record.get("submission", {})


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
