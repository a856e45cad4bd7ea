"""Table of the times of whole training runs against the number of workers.

Rows are runs of train.py that ended well without a restart, and quoted figures with a `run_time_s`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from sdbench.record.configuration import as_key, describe_other_settings, group, settings_of
from sdbench.record.store import OK
from sdbench.report.figures import MEASURED, TIME, describe_origin
from sdbench.report.runs import describe_device
from sdbench.report.tables import Cell, Field, Table, tabulate
from sdbench.report.terminal import describe_median, format_number
from sdbench.settings.recipe import LengthSettings
from sdbench.settings.setting import declarations

CAPTION = "Time of a training run against the number of workers"
# Settings that change with the number of workers, and settings of the length and folder of a run.
SCALED = {"num_devices", "num_nodes", "batch_size", "device_train_microbatch_size"}
KEPT = declarations(LengthSettings).keys() - {"init_from"}


def collect(
    records: Iterable[dict[str, Any]], figures: Iterable[dict[str, Any]], *, folder: str
) -> list[dict[str, Any]]:
    """Make a row for each number of workers of runs and quoted figures that are alike in the rest.

    Speed-ups are over the fewest workers of the same work. Resumed runs are left out: their
    records have the time of the last process only. `folder` names the folder with the runs.
    """
    quoted = [row for row in figures if row.get(TIME) and row.get("num_gpus")]
    whole = [record for record in records if record["status"] == OK and not is_resumed(record)]
    measured = [_make_row(record) | {"folder": folder} for record in whole]
    made = []
    for rows in group([*quoted, *measured], key_of=_key_of).values():
        points: list[dict[str, Any]] = []
        for number, alike in sorted(group(rows, key_of=lambda row: row["num_gpus"]).items()):
            times_s = [row[TIME] for row in alike]
            median_s = float(statistics.median(times_s))
            first = points[0] if points else {"workers": number, "median_s": median_s}
            speed_up = first["median_s"] / median_s
            rates = [row["images_per_second"] for row in alike if row.get("images_per_second")]
            points.append(
                {
                    **rows[0],
                    "workers": number,
                    "num_runs": sum(row.get("num_runs") or 1 for row in alike),
                    "times_s": times_s,
                    "median_s": median_s,
                    "speed_up": speed_up,
                    "efficiency_percent": 100 * speed_up * first["workers"] / number,
                    "images_per_second": float(statistics.median(rates)) if rates else None,
                }
            )
        made += points
    return made


def make_time_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """The table of what `collect` makes; None without any."""
    if not rows:
        return None
    table = tabulate(FIELDS, rows, name="training-times", caption=CAPTION)
    return table.without_empty_columns()


def is_resumed(record: dict[str, Any]) -> bool:
    """Whether a run of train.py that ended well had been stopped before, and went on."""
    return bool(record["summary"]["num_restarts"] or record["summary"]["first_step"])


def _make_row(record: dict[str, Any]) -> dict[str, Any]:
    """A run as a row of quoted figures, with the settings that identify its series."""
    settings = {
        name: value for name, value in settings_of(record).items() if name not in SCALED | KEPT
    }
    return {
        "kind": MEASURED,
        "source": record["run_id"],
        "what": record["config"]["task"],
        "gpu": describe_device(record),
        "num_gpus": record["ranks"]["world_size"],
        "model": record["workload"]["architecture"],
        "image_size": record["config"]["image_size"],
        "num_images": record["workload"]["num_images"],
        "other_settings": describe_other_settings(record),
        "images_per_second": record["summary"]["images_per_second"],
        TIME: record["duration_s"],
        "settings": as_key(settings),
    }


def _key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("kind", "what", "gpu", "model", "image_size", "num_images", "settings")
    source = None if row["kind"] == MEASURED else row["source"]
    return (source, *(row.get(name) for name in names))


def _time_cell(point: dict[str, Any]) -> Cell:
    """The median time, with the interval between runs where there are enough."""
    text = describe_median(point["times_s"], num_digits=5)
    return Cell(text or format_number(point["median_s"], num_digits=5), point["median_s"])


FIELDS = (
    Field("kind", "kind"),
    Field("what", "what", unknown=""),
    Field("device", "gpu"),
    Field("workers", "workers"),
    Field("runs", "num_runs"),
    Field("model", "model"),
    Field("px", "image_size"),
    Field("pictures seen", "num_images"),
    Field("time of the run, s", _time_cell),
    Field("speed-up", "speed_up", digits=3),
    Field("efficiency, %", "efficiency_percent", digits=3),
    Field("images/s while it trains", "images_per_second"),
    Field("other settings", "other_settings", unknown=""),
    Field("source", describe_origin),
)
