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
from sdbench.record.columns import COLUMNS, value_at
from sdbench.record.record_kinds import FEED, kind_of

# The columns of a run of benchmark.py.
RUN_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.place is not None)
# Those of a run that loads or encodes data.
PHASES = ("read", "decode", "transform", "tokenize", "collate")
FEED_COLUMNS = (
    *("source", "kind", "job", "device", "num_cpu_cores", "data_format", "data", "latents"),
    *("image_size", "batch_size", "num_workers", "images_per_second", "images_per_second_low"),
    *("images_per_second_high", "images_per_second_per_core", "megabytes_per_second"),
    *(f"{phase}_ms_per_image" for phase in PHASES),
    *("emulate_step_seconds", "data_wait_percent", "num_measured_steps", "num_images"),
    *("num_bad_samples", "num_dropped_samples", "status", "started_utc", "git_commit", "reason"),
)


def make_row(record: dict[str, Any]) -> dict[str, Any]:
    """Flatten a record of benchmark.py, of any status, with `RUN_COLUMNS`; None is unknown.

    That of a submitted result has another kind and source, and a submitter.
    """
    places = {name: COLUMNS[name].place for name in RUN_COLUMNS}
    row = {
        name: value_at(record, place) if isinstance(place, str) else place(record)
        for name, place in places.items()
    }
    return row | record.get("submission", {})


def make_training_row(record: dict[str, Any]) -> dict[str, Any]:
    """Flatten a record of train.py, of any status, with columns of whole trainings."""
    return make_row(record) | {
        "what": record["config"]["task"],
        "num_images": value_at(record, "workload.num_images"),
        "run_time_s": record["duration_s"],
    }


def make_feed_row(record: dict[str, Any]) -> dict[str, Any]:
    """Flatten a record of kind feed or precompute, of any status, with `FEED_COLUMNS`."""
    config, machine = record["config"], record["machine"]
    summary = record["summary"] or {}
    interval = summary.get("images_per_second_interval") or {}
    split_ms = summary.get("ms_per_image") or {}
    row = {
        **{f"{phase}_ms_per_image": split_ms.get(phase) for phase in PHASES},
        "source": record["run_id"],
        "kind": "measured",
        "job": kind_of(record),
        # data.py loads on the CPU.
        "device": machine["cpu_name" if kind_of(record) == FEED else "device_name"],
        "num_cpu_cores": machine["num_cpu_cores"],
        "data": config.get("streams") or config.get("remote") or config.get("local"),
        "images_per_second_low": interval.get("low"),
        "images_per_second_high": interval.get("high"),
        "git_commit": record["git"]["commit"],
    }
    known = {**record, **config, **summary, **row}
    return {column: known.get(column) for column in FEED_COLUMNS}


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
            if header is not None and tuple(header) != RUN_COLUMNS:
                aside = _set_aside(path)
                print(
                    f"{path} has other columns than this version of the suite writes: it is now "
                    f"{aside.name}, and {path.name} begins anew",
                    file=sys.stderr,
                )
                continue
            text = format_csv([make_row(record)], columns=RUN_COLUMNS)
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
