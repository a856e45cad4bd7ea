"""Table and chart of the times of whole training runs against the number of workers.

Rows are runs of train.py that ended well without a restart, and quoted figures with a `run_time_s`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sdbench.base.units import counted
from sdbench.record.configuration import as_key, describe_other_settings, group, settings_of
from sdbench.record.store import OK
from sdbench.report.figures import MEASURED, TIME, describe_origin
from sdbench.report.plots import MARKERS, SERIES_COLOURS, Plot, make_figure, render, set_title
from sdbench.report.runs import describe_device
from sdbench.report.tables import Cell, Field, Table, tabulate
from sdbench.report.terminal import describe_median, format_number
from sdbench.settings.recipe import LengthSettings
from sdbench.settings.setting import declarations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "training_times"
NAMES = (NAME,)
TITLE = "Time of a training run against the number of workers"
MAX_PANELS = 4
# Settings that change with the number of workers, and settings of the length and folder of a run.
SCALED = {"num_devices", "num_nodes", "batch_size", "device_train_microbatch_size"}
KEPT = declarations(LengthSettings).keys() - {"init_from"}


def collect(
    records: Iterable[dict[str, Any]], figures: Iterable[dict[str, Any]], *, folder: str
) -> list[list[dict[str, Any]]]:
    """Sort runs and quoted figures into series that differ only in the number of workers.

    Each has a row for each number of workers, in ascending order. Resumed runs are left out: their
    records have the time of the last process only. `folder` names the folder with the runs.
    """
    quoted = [row for row in figures if row.get(TIME) and row.get("num_gpus")]
    whole = [record for record in records if record["status"] == OK and not is_resumed(record)]
    measured = [_make_row(record) | {"folder": folder} for record in whole]
    series = []
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
        series.append(points)
    return series


def make_time_table(series: Sequence[Sequence[dict[str, Any]]]) -> Table | None:
    """A row for each series and number of workers; None without any."""
    rows = [point for points in series for point in points]
    if not rows:
        return None
    table = tabulate(FIELDS, rows, name="training-times", caption=TITLE)
    return table.without_empty_columns()


def draw(series: Sequence[Sequence[dict[str, Any]]]) -> list[Plot]:
    """Draw the time of a run against the number of workers, with the ideal line.

    Each of the first few series with two numbers of workers has a panel.
    """
    lines = [points for points in series if len(points) > 1]
    plots = []
    for index, points in enumerate(lines[:MAX_PANELS]):
        sources = f"{points[0]['kind']}: {describe_origin(points[0])}"
        if len(lines) > MAX_PANELS:
            sources = f"{len(lines) - MAX_PANELS} more series are not drawn; {sources}"
        figure, (ax,) = make_figure([2.2], sources=sources)
        gid = f"{NAME}-{index + 1}-line"
        work = _draw_panel(ax, points, gid=gid)
        notes = [
            f"{counted(point['workers'], 'worker')}: {_time_cell(point).text} s\n"
            f"{describe_origin(point)}"
            for point in points
        ]
        title = f"{TITLE}: {work}"
        plots.append(render(figure, chart=NAME, index=index, title=title, notes={gid: notes}))
    return plots


def _draw_panel(ax: Axes, points: Sequence[dict[str, Any]], *, gid: str) -> str:
    """Draw a series, and return what ran in words."""
    first = points[0]
    numbers = [point["workers"] for point in points]
    medians_s = [point["median_s"] for point in points]
    ideal_s = [medians_s[0] * numbers[0] / number for number in numbers]
    ax.plot(numbers, ideal_s, color="#666666", linestyle=":", label="ideal")
    kind, colour = first["kind"], SERIES_COLOURS[0]
    ax.plot(numbers, medians_s, color=colour, marker=MARKERS[kind], label=kind, gid=gid)
    for number, point in zip(numbers, points, strict=True):
        ax.vlines(number, min(point["times_s"]), max(point["times_s"]), color=colour, linewidth=1)
        text, place = format_number(point["median_s"], num_digits=5), (number, point["median_s"])
        ax.annotate(text, place, (4, 5), textcoords="offset points", fontsize=8)
    ax.set_xticks(numbers)
    ax.set_ylim(0, 1.15 * max(medians_s))
    ax.set_xlabel("workers, one device each")
    ax.set_ylabel("time of the run, s")
    parts = [first.get(name) for name in ("what", "gpu", "model")]
    units = {"image_size": "px", "num_images": "pictures"}
    parts += [f"{first[name]} {unit}" for name, unit in units.items() if first.get(name)]
    title = ", ".join(str(part) for part in parts if part)
    set_title(ax, title)
    ax.legend(loc="upper right")
    return title


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
        "what": record["config"].get("task", "pretrain"),
        "gpu": describe_device(record),
        "num_gpus": record["ranks"]["world_size"],
        "model": record["workload"]["architecture"],
        "image_size": record["config"]["image_size"],
        "num_images": record["workload"].get("num_images"),
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
