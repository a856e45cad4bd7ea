"""Table and chart of the times of whole training runs against the number of workers.

Rows are runs of train.py that ended well without a restart, and quoted figures with a `run_time_s`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sdbench.record.configuration import as_key, describe_other_settings, group, settings_of
from sdbench.record.store import OK
from sdbench.report.figures import MEASURED, TIME, describe_origin
from sdbench.report.plots import MARKERS, SERIES_COLOURS, Plot, make_figure, render, shorten
from sdbench.report.runs import describe_device
from sdbench.report.tables import Cell, Table, make_cell, make_table, optional_cell
from sdbench.report.terminal import format_number
from sdbench.settings.recipe import LengthSettings
from sdbench.settings.setting import declarations
from sdbench.statistics.intervals import between_runs_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "training_times"
NAMES = (NAME,)
MAX_PANELS = 4
# Settings that change with the number of workers, and those of the folder of a run.
SCALED = {"num_devices", "num_nodes", "batch_size", "device_train_microbatch_size"}
KEPT = declarations(LengthSettings).keys() - {"init_from"}


@dataclasses.dataclass(frozen=True)
class Series:
    """Runs that differ only in the number of workers, by which their figures are sorted.

    Attributes:
        first: One of the rows.
        images_per_second: Median rate while training; None if unknown.
    """

    first: dict[str, Any]
    times_s: dict[int, list[float]]
    images_per_second: dict[int, float | None]
    num_runs: dict[int, int]

    def speed_up(self, num_workers: int) -> float:
        """The time on the fewest workers over that on these."""
        medians_s = {number: statistics.median(times) for number, times in self.times_s.items()}
        return medians_s[min(medians_s)] / medians_s[num_workers]

    def efficiency(self, num_workers: int) -> float:
        """The speed-up over that of an ideal machine."""
        return self.speed_up(num_workers) * min(self.times_s) / num_workers


def collect(records: Iterable[dict[str, Any]], figures: Iterable[dict[str, Any]]) -> list[Series]:
    """Sort runs and quoted figures into series, quoted ones first.

    Resumed runs are left out: their records have the time of the last process only. So are figures
    without a `run_time_s` or a number of workers.
    """
    quoted = [row for row in figures if row.get(TIME) and row.get("num_gpus")]
    measured = [_make_row(record) for record in records if _is_whole(record)]
    series = []
    for rows in group([*quoted, *measured], key_of=_key_of).values():
        by_number = group(rows, key_of=lambda row: row["num_gpus"])
        numbers = sorted(by_number)
        series.append(
            Series(
                first=rows[0],
                times_s={n: [row[TIME] for row in by_number[n]] for n in numbers},
                images_per_second={n: _median_rate(by_number[n]) for n in numbers},
                num_runs={
                    n: sum(row.get("num_runs") or 1 for row in by_number[n]) for n in numbers
                },
            )
        )
    return series


def make_time_table(series: Sequence[Series]) -> Table | None:
    """A row for each series and number of workers; None without any."""
    rows = [
        {
            "kind": one.first["kind"],
            "what": optional_cell(one.first.get("what")),
            "device": one.first.get("gpu"),
            "workers": number,
            "runs": one.num_runs[number],
            "model": one.first.get("model"),
            "px": one.first.get("image_size"),
            "pictures seen": one.first.get("num_images"),
            "time of the run, s": _time_cell(one.times_s[number]),
            "speed-up": make_cell(one.speed_up(number), num_digits=3),
            "efficiency, %": make_cell(100 * one.efficiency(number), num_digits=3),
            "images/s while it trains": make_cell(one.images_per_second[number]),
            "other settings": optional_cell(one.first.get("other_settings")),
            "source": describe_origin(one.first),
        }
        for one in series
        for number in one.times_s
    ]
    if not rows:
        return None
    caption = "Time of a training run against the number of workers"
    return make_table(rows, name="training-times", caption=caption).without_empty_columns()


def draw(series: Sequence[Series]) -> Plot | None:
    """Draw the time of a run against the number of workers, with the ideal line.

    None if no series has two numbers of workers.
    """
    lines = [one for one in series if len(one.times_s) > 1]
    if not lines:
        return None
    shown = lines[:MAX_PANELS]
    sources = "; ".join(
        dict.fromkeys(f"{one.first['kind']}: {describe_origin(one.first)}" for one in shown)
    )
    if len(lines) > len(shown):
        sources = f"{len(lines) - len(shown)} more series are not drawn; {sources}"
    figure, axes = make_figure([2.2] * len(shown), sources=sources)
    notes = {}
    for number, (ax, one) in enumerate(zip(axes, shown, strict=True), 1):
        gid = f"{NAME}-{number}"
        _draw_panel(ax, one, gid=gid)
        notes[gid] = [
            f"{workers} workers: {_time_cell(times_s).text} s\n{describe_origin(one.first)}"
            for workers, times_s in one.times_s.items()
        ]
    title = "Time of a training run against the number of workers"
    return render(figure, name=NAME, title=title, notes=notes)


def _draw_panel(ax: Axes, series: Series, *, gid: str) -> None:
    numbers = list(series.times_s)
    medians_s = [statistics.median(series.times_s[number]) for number in numbers]
    ideal_s = [medians_s[0] * numbers[0] / number for number in numbers]
    ax.plot(numbers, ideal_s, color="#666666", linestyle=":", label="ideal")
    kind, colour = series.first["kind"], SERIES_COLOURS[0]
    ax.plot(numbers, medians_s, color=colour, marker=MARKERS[kind], label=kind, gid=gid)
    for number, times_s in series.times_s.items():
        ax.vlines(number, min(times_s), max(times_s), color=colour, linewidth=1)
    for number, median_s in zip(numbers, medians_s, strict=True):
        text = format_number(median_s, num_digits=5)
        ax.annotate(text, (number, median_s), (4, 5), textcoords="offset points", fontsize=8)
    ax.set_xticks(numbers)
    ax.set_ylim(0, 1.15 * max(medians_s))
    ax.set_xlabel("workers, one device each")
    ax.set_ylabel("time of the run, s")
    first = series.first
    parts = [first.get(name) for name in ("what", "gpu", "model")]
    units = {"image_size": "px", "num_images": "pictures"}
    parts += [f"{first[name]} {unit}" for name, unit in units.items() if first.get(name)]
    title = ", ".join(str(part) for part in parts if part)
    ax.set_title(shorten(title, length=90))
    ax.legend(loc="upper right")


def _is_whole(record: dict[str, Any]) -> bool:
    summary = record["summary"]
    return record["status"] == OK and not (summary["num_restarts"] or summary["first_step"])


def _make_row(record: dict[str, Any]) -> dict[str, Any]:
    """A run in the columns of quoted figures, and what tells its series."""
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


def _median_rate(rows: Sequence[dict[str, Any]]) -> float | None:
    rates = [row["images_per_second"] for row in rows if row.get("images_per_second")]
    return float(statistics.median(rates)) if rates else None


def _time_cell(times_s: Sequence[float]) -> Cell:
    """Their median, with the interval between runs where there are enough."""
    median_s = float(statistics.median(times_s))
    interval = between_runs_interval(times_s)
    text = format_number(median_s, num_digits=5)
    if interval is not None:
        low, high = format_number(interval.low), format_number(interval.high)
        text = f"median {text} ({low} to {high}, {interval.kind})"
    return Cell(text, median_s)
