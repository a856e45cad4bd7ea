"""Charts of throughput against micro-batch and against the number of GPUs.

Three charts are those of the AWS test case, under its names; a fourth has the micro-batches of
other work. Rows are quoted and measured. A panel has one model, one resolution and one
place of the encoders. A series of a single figure is drawn only beside its counterpart with or
without EMA.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sdbench.base.escape import for_plot
from sdbench.base.units import counted
from sdbench.record.configuration import WORK, group
from sdbench.report.figures import MEASURED, describe_origin, device_of
from sdbench.report.plots import (
    MARKERS,
    SERIES_COLOURS,
    Plot,
    make_figure,
    name_panel,
    render,
    set_title,
)
from sdbench.report.runs import describe_work, name_runs
from sdbench.report.terminal import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MICRO_BATCH = "sd_p4de_p5"
SPEED_UP = "p5-model-scaling-stable-diff"
SCALING = "p5-model-scaling-stable-diff-throughput"
OTHER_MICRO_BATCHES = "micro_batches"
NAMES = (MICRO_BATCH, SPEED_UP, SCALING, OTHER_MICRO_BATCHES)
# Work and number of GPUs of the seed's chart of micro-batches.
SEED_PANEL = ("sd2-base", 512, "online", 8)
# More panels, or more series in one, cannot be read.
MAX_PANELS = 6
MAX_SERIES = 8
MAX_TICKS = 12
# Characters of a line of the legend.
LEGEND_WIDTH = 74
PANEL_HEIGHT_INCHES = 2.9
LEGEND_LINE_INCHES = 0.17


class Point(NamedTuple):
    """The median images/s at one micro-batch or number of GPUs.

    `low` and `high` are the outermost ends of the intervals of the runs.
    """

    rate: float
    low: float
    high: float
    note: str


class Series(NamedTuple):
    """Figures that differ only in the micro-batch or the number of GPUs, in ascending order."""

    device: str
    settings: str
    kind: str
    source: str
    has_ema: bool | None
    points: dict[int, Point]

    @property
    def line(self) -> tuple[str, str, str]:
        """Key that it shares with its counterpart with or without EMA."""
        return self.device, self.settings, self.source

    @property
    def label(self) -> str:
        """Its settings in words."""
        ema = {True: "EMA", False: "no EMA", None: None}[self.has_ema]
        return ", ".join(filter(None, (self.device, ema, self.settings, self.kind)))


# Series on common axes, by the title of the axes.
Panels = dict[str, list[Series]]


def draw_micro_batch(rows: Iterable[dict[str, Any]]) -> list[Plot]:
    """Draw throughput against micro-batch: a chart of the seed's work and one of other work.

    Rows are those of results/throughput.csv; measured ones also have the ``command`` of their run.
    """
    seed_panels: Panels = {}
    other_panels: Panels = {}
    for work, series in _collect(
        rows,
        x_of=lambda row: row.get("micro_batch"),
        panel_of=lambda row: (*map(row.get, WORK), _num_devices(row)),
        settings_of=lambda row: [*_settings(row), _describe_batch(row)],
    ):
        title = f"{describe_work(*work[:-1])}, {_count_devices(work[-1])}"
        (seed_panels if work == SEED_PANEL else other_panels)[title] = series
    against = "Throughput against micro-batch"
    charts = (
        (MICRO_BATCH, f"{against} per GPU type, with and without EMA", seed_panels),
        (OTHER_MICRO_BATCHES, f"{against}, other work", other_panels),
    )
    return [plot for chart in charts for plot in _draw(*chart, "micro-batch {}".format)]


def draw_scaling(rows: Iterable[dict[str, Any]]) -> list[Plot]:
    """Draw speed-up, with the ideal line, and throughput against the number of GPUs."""
    found = _collect(
        _label_batches([row for row in rows if row.get("num_gpus")]),
        x_of=lambda row: row["num_gpus"],
        panel_of=lambda row: tuple(map(row.get, WORK)),
        settings_of=lambda row: [
            *_settings(row),
            f"micro-batch {row['micro_batch']}" if row.get("micro_batch") else None,
            row["batch"],
        ],
    )
    panels = {describe_work(*work): of for work, of in found}
    from_smallest = {}
    for title, series in panels.items():
        # Speed-ups are relative to the smallest number of GPUs in the panel.
        smallest = min(min(one.points) for one in series)
        lines = [one for one in series if smallest in one.points and len(one.points) > 1]
        if lines:
            from_smallest[title] = lines
    charts = (
        (SPEED_UP, "Speed-up against GPU count, with the ideal line", from_smallest),
        (SCALING, "Throughput against GPU count", panels),
    )
    return [plot for chart in charts for plot in _draw(*chart, _count_devices)]


def _collect(
    rows: Iterable[dict[str, Any]],
    *,
    x_of: Callable[[dict[str, Any]], int | None],
    panel_of: Callable[[dict[str, Any]], tuple[Any, ...]],
    settings_of: Callable[[dict[str, Any]], list[str | None]],
) -> list[tuple[tuple[Any, ...], list[Series]]]:
    """Sort rows into panels of series to draw: the seed's work first, then by number of points."""

    def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
        settings = ", ".join(filter(None, settings_of(row)))
        return _device(row), settings, row["kind"], describe_origin(row), row.get("ema")

    drawable = [row for row in rows if row.get("images_per_second") and isinstance(x_of(row), int)]
    panels = []
    for panel, of_panel in group(drawable, key_of=panel_of).items():
        series = []
        for key, of_series in group(of_panel, key_of=key_of).items():
            by_x = group(of_series, key_of=x_of)
            series.append(Series(*key, {x: _summarise(by_x[x]) for x in sorted(by_x)}))
        lines = {one.line for one in series if len(one.points) > 1}
        series = [one for one in series if one.line in lines]
        if series:
            panels.append((panel, series))
    panels.sort(
        key=lambda item: (item[0][:3] != SEED_PANEL[:3], -sum(len(s.points) for s in item[1]))
    )
    return panels


def _summarise(rows: Sequence[dict[str, Any]]) -> Point:
    """The median of the runs, with the lowest and the highest end of their intervals."""
    rate = statistics.median(row["images_per_second"] for row in rows)
    low, high = (
        choose(row.get(f"images_per_second_{end}") or row["images_per_second"] for row in rows)
        for choose, end in ((min, "low"), (max, "high"))
    )
    text = f"{format_number(rate, num_digits=6)} images/s"
    if low < high:
        text += f" ({format_number(low)} to {format_number(high)})"
    origin = describe_origin(rows[0])
    if rows[0]["kind"] == MEASURED:
        count = "run" if len(rows) == 1 else f"median of {len(rows)} runs"
        origin = f"{count}: {name_runs([row['source'] for row in rows])}\n{rows[0]['command']}"
    return Point(rate, low, high, f"{text}\n{origin}")


def _settings(row: dict[str, Any]) -> list[Any]:
    """Settings that distinguish two series of one device."""
    shared_by = row.get("tensor_parallel")
    parts = f"{shared_by} GPUs to a model" if shared_by else None
    return [*(row.get(name) for name in ("preset", "precision", "other_settings")), parts]


def _describe_batch(row: dict[str, Any]) -> str | None:
    """The global batch of a row, unless it is one micro-batch on each device."""
    if not row.get("global_batch"):
        return None
    if row["global_batch"] == (row.get("micro_batch") or 0) * (_num_devices(row) or 0):
        return "one micro-batch per step"
    return f"global batch {row['global_batch']}"


def _label_batches(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their ``batch`` in words: global (strong scaling) or images per GPU (weak)."""

    def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
        names = (*WORK, "ema", "micro_batch")
        values = [*_settings(row), *(row.get(name) for name in names)]
        return (_device(row), describe_origin(row), row["kind"], *values)

    labelled = [{**row, "batch": None} for row in rows]
    known = [row for row in labelled if row.get("global_batch")]
    for alike in group(known, key_of=key_of).values():
        per_gpu = {row["global_batch"] / row["num_gpus"] for row in alike}
        is_weak = len(per_gpu) == 1 and len({row["num_gpus"] for row in alike}) > 1
        for row in alike:
            row["batch"] = (
                f"{min(per_gpu):g} images per GPU and step"
                if is_weak
                else f"global batch {row['global_batch']}"
            )
    return labelled


def _draw(
    chart: str, title: str, panels: Panels, describe_x: Callable[[int], str]
) -> Iterator[Plot]:
    """Draw the first few panels; a device has the same colour in all of them."""
    shown = list(panels.items())[:MAX_PANELS]
    colours = _number(one.device for _, panel in shown for one in panel[:MAX_SERIES])
    for index, (work, panel) in enumerate(shown):
        figure, notes = _draw_panel(name_panel(chart, index), chart, panel, colours, describe_x)
        set_title(figure.axes[0], work)
        yield render(figure, chart=chart, index=index, title=f"{title}: {work}", notes=notes)


def _draw_panel(
    name: str,
    chart: str,
    panel: Sequence[Series],
    colours: Mapping[str, int],
    describe_x: Callable[[int], str],
) -> tuple[Figure, dict[str, list[str]]]:
    shown = panel[:MAX_SERIES]
    sources = _number(one.source for one in shown)
    footnotes = [f"[{number}] {source}" for source, number in sources.items()]
    if len(panel) > len(shown):
        footnotes.insert(0, f"{len(panel) - len(shown)} more series are not drawn")
    labels = [
        textwrap.fill(
            for_plot(f"{series.label} [{sources[series.source]}]"), LEGEND_WIDTH, max_lines=2
        )
        for series in shown
    ]
    num_lines = 1 + sum(1 + label.count("\n") for label in labels)
    figure, (ax,) = make_figure(
        [PANEL_HEIGHT_INCHES],
        sources="; ".join(footnotes),
        below=0.55 + LEGEND_LINE_INCHES * num_lines,
    )
    smallest = min(min(series.points) for series in shown)
    if chart == SPEED_UP:
        largest = max(max(series.points) for series in shown)
        ends = [smallest, largest], [1, largest / smallest]
        ax.plot(*ends, color="#666666", linestyle=":", label="ideal")
    notes: dict[str, list[str]] = {}
    for series, label in zip(shown, labels, strict=True):
        gid = f"{name}-{len(notes) + 1}"
        notes[gid] = [
            f"{series.label}\n{describe_x(x)}: {point.note}" for x, point in series.points.items()
        ]
        colour = SERIES_COLOURS[(colours[series.device] - 1) % len(SERIES_COLOURS)]
        scale = 1 / series.points[smallest].rate if chart == SPEED_UP else 1.0
        _draw_line(ax, series, scale=scale, color=colour, label=label, gid=gid)
    if chart in (SPEED_UP, SCALING):
        _label_gpu_counts(ax, shown)
    else:
        _label_micro_batches(ax, shown)
    ax.set_ylabel(f"speed-up over {smallest} GPUs" if chart == SPEED_UP else "images/s")
    # Below the axes, where it covers no line.
    ax.legend(loc="upper left", bbox_to_anchor=(-0.2, -0.48 / PANEL_HEIGHT_INCHES))
    return figure, notes


def _draw_line(ax: Axes, series: Series, *, scale: float, color: str, **style: Any) -> None:
    """Draw a series with its intervals, times a scale."""
    places, points = list(series.points), series.points.values()
    is_hollow = series.has_ema is False
    ax.plot(
        places,
        [point.rate * scale for point in points],
        color=color,
        marker=MARKERS[series.kind],
        markerfacecolor="white" if is_hollow else color,
        markersize=8 if is_hollow else 5,
        linestyle="--" if is_hollow else "-",
        # A hollow marker goes behind a full one at the same place.
        zorder=2 if is_hollow else 3,
        **style,
    )
    lows, highs = ([getattr(point, end) * scale for point in points] for end in ("low", "high"))
    ax.vlines(places, lows, highs, color=color, linewidth=1)


def _label_micro_batches(ax: Axes, panel: Sequence[Series]) -> None:
    micro_batches = sorted({x for series in panel for x in series.points})
    if len(micro_batches) <= MAX_TICKS:
        ax.set_xticks(micro_batches)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("micro-batch per device, images")


def _label_gpu_counts(ax: Axes, panel: Sequence[Series]) -> None:
    """Make both axes logarithmic, so that 8 and 512 GPUs can both be read."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

    counts = {x for series in panel for x in series.points}
    powers = [2**exponent for exponent in range(max(counts).bit_length())]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(FixedLocator([power for power in powers if power >= min(counts)]))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.set_xlabel("GPUs")


def _number(names: Iterable[str]) -> dict[str, int]:
    """Number the distinct names from 1, in order."""
    return {name: number for number, name in enumerate(dict.fromkeys(names), start=1)}


def _device(row: dict[str, Any]) -> str:
    return device_of(row) or "device not told"


def _count_devices(number: int | None) -> str:
    if number is None:
        return "number of devices not told"
    return counted(number, "device")


def _num_devices(row: dict[str, Any]) -> int | None:
    return row.get("num_gpus") or row.get("num_devices")
