"""Charts of throughput against micro-batch and against the number of GPUs.

They are the three charts of seed 003 under its names, from quoted, measured and modelled rows, and
one of the micro-batches of other work. Axes show figures of one resolution and one place of the
encoders. A series of a single figure is not drawn.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sdbench.record.configuration import group
from sdbench.report.figures import MEASURED, describe_origin, device_of
from sdbench.report.plots import MARKERS, SERIES_COLOURS, Plot, make_figure, render, shorten
from sdbench.report.runs import describe_work, name_runs
from sdbench.report.terminal import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Gives the arguments of `Axes.plot` for the line of a series.
Style = Callable[["Series"], dict[str, Any]]

MICRO_BATCH = "sd_p4de_p5"
SPEED_UP = "p5-model-scaling-stable-diff"
SCALING = "p5-model-scaling-stable-diff-throughput"
OTHER_MICRO_BATCHES = "micro_batches"
NAMES = (MICRO_BATCH, SPEED_UP, SCALING, OTHER_MICRO_BATCHES)
# Resolution, place of the encoders and number of GPUs of the seed's chart of micro-batches.
SEED_PANEL = (512, "online", 8)
# More panels, or more series in one, cannot be read.
MAX_PANELS = 4
MAX_SERIES = 8
MAX_TICKS = 12
# A legend names the model only if it is another one.
USUAL_MODEL = "sd2-base"
PANEL_HEIGHT_INCHES = 2.9
LEGEND_LINE_INCHES = 0.17


@dataclasses.dataclass(frozen=True)
class Point:
    """Images/s at one micro-batch or number of GPUs.

    Attributes:
        rate: The median of the runs; `low` and `high` are the outermost ends of their intervals.
        note: The figure in words, and its runs with the command of the first, or its source.
    """

    rate: float
    low: float
    high: float
    note: str


@dataclasses.dataclass(frozen=True)
class Series:
    """Figures that differ only in the micro-batch or the number of GPUs, by which they are sorted.

    `has_ema` is None if it is unknown.
    """

    device: str
    settings: str
    kind: str
    source: str
    has_ema: bool | None
    points: dict[int, Point]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Series on common axes."""

    title: str
    series: Sequence[Series]


def draw_micro_batch(rows: Iterable[dict[str, Any]]) -> list[Plot]:
    """Draw throughput against micro-batch, from rows of results/throughput.csv.

    Measured rows also have the ``command`` of their run. There is a chart of the seed's work and
    one of other work, if a series has two micro-batches.
    """
    seed_panels, other_panels = [], []
    for work, series in _collect(
        rows,
        x_of=lambda row: row.get("micro_batch"),
        panel_of=lambda row: (row.get("image_size"), row.get("latents"), _num_devices(row)),
        settings_of=lambda row: [*_settings(row), _describe_batch(row)],
    ):
        image_size, latents, number = work
        title = f"{describe_work(image_size=image_size, latents=latents)}, {_count_devices(number)}"
        panels = seed_panels if work == SEED_PANEL else other_panels
        panels.append(Panel(title, series))
    seed_title = "Throughput against micro-batch per GPU type, with and without EMA"
    plots = [
        _draw(
            panels,
            name=name,
            title=title,
            draw_panel=_draw_micro_batch_panel,
            describe_x=lambda micro_batch: f"micro-batch {micro_batch}",
        )
        for panels, name, title in (
            (seed_panels, MICRO_BATCH, seed_title),
            (other_panels, OTHER_MICRO_BATCHES, "Throughput against micro-batch, other work"),
        )
    ]
    return [plot for plot in plots if plot is not None]


def draw_scaling(rows: Iterable[dict[str, Any]]) -> list[Plot]:
    """Draw speed-up, with the ideal line, and throughput against the number of GPUs.

    There is no chart if no series has two numbers of GPUs.
    """
    rows = [row for row in rows if row.get("num_gpus")]
    scaled_with = _describe_batches(rows)
    panels = [
        Panel(describe_work(image_size=image_size, latents=latents), series)
        for (image_size, latents), series in _collect(
            rows,
            x_of=lambda row: row["num_gpus"],
            panel_of=lambda row: (row.get("image_size"), row.get("latents")),
            settings_of=lambda row: [
                *_settings(row),
                f"micro-batch {row['micro_batch']}" if row.get("micro_batch") else None,
                scaled_with(row),
            ],
        )
    ]
    speed_up = _draw(
        [panel for panel in map(_with_speed_up, panels) if panel.series],
        name=SPEED_UP,
        title="Speed-up against GPU count, with the ideal line",
        draw_panel=_draw_speed_up_panel,
        describe_x=_count_devices,
    )
    throughput = _draw(
        panels,
        name=SCALING,
        title="Throughput against GPU count",
        draw_panel=_draw_scaling_panel,
        describe_x=_count_devices,
    )
    return [plot for plot in (speed_up, throughput) if plot is not None]


def _collect(
    rows: Iterable[dict[str, Any]],
    *,
    x_of: Callable[[dict[str, Any]], int | None],
    panel_of: Callable[[dict[str, Any]], tuple[Any, ...]],
    settings_of: Callable[[dict[str, Any]], list[str | None]],
) -> list[tuple[tuple[Any, ...], list[Series]]]:
    """Sort rows into panels and series.

    Series without a line are left out. Panels are in descending order of their number of points,
    after that of the seed's work.
    """

    def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
        settings = ", ".join(part for part in settings_of(row) if part)
        return _device(row), settings, row["kind"], describe_origin(row), row.get("ema")

    drawable = [row for row in rows if row.get("images_per_second") and isinstance(x_of(row), int)]
    panels = []
    for panel, of_panel in group(drawable, key_of=panel_of).items():
        series = []
        for key, of_series in group(of_panel, key_of=key_of).items():
            by_x = group(of_series, key_of=x_of)
            series.append(Series(*key, {x: _summarise(by_x[x]) for x in sorted(by_x)}))
        lines = {_line_of(one) for one in series if len(one.points) > 1}
        series = [one for one in series if _line_of(one) in lines]
        if series:
            panels.append((panel, series))
    panels.sort(key=lambda item: (item[0][:2] != SEED_PANEL[:2], -_num_points(item[1])))
    return panels


def _line_of(series: Series) -> tuple[str, str, str]:
    """Key that series with and without EMA share: a single figure is drawn beside such a line."""
    return series.device, series.settings, series.source


def _with_speed_up(panel: Panel) -> Panel:
    """The panel with only the lines that begin at its smallest number of GPUs."""
    smallest = min(min(series.points) for series in panel.series)
    series = [one for one in panel.series if smallest in one.points and len(one.points) > 1]
    return dataclasses.replace(panel, series=series)


def _num_points(series: Sequence[Series]) -> int:
    return sum(len(one.points) for one in series)


def _summarise(rows: Sequence[dict[str, Any]]) -> Point:
    """The median of the runs, with the lowest and the highest end of their intervals."""
    rate = statistics.median(row["images_per_second"] for row in rows)
    lows = [row.get("images_per_second_low") or row["images_per_second"] for row in rows]
    highs = [row.get("images_per_second_high") or row["images_per_second"] for row in rows]
    low, high = min(lows), max(highs)
    text = f"{format_number(rate, num_digits=6)} images/s"
    if low < high:
        text += f" ({format_number(low)} to {format_number(high)})"
    return Point(rate, low, high, f"{text}\n{_describe_origin(rows)}")


def _describe_origin(rows: Sequence[dict[str, Any]]) -> str:
    """The runs and the command of the first, or where the figure was read."""
    first = rows[0]
    if first["kind"] != MEASURED:
        return describe_origin(first)
    names = name_runs([row["source"] for row in rows])
    count = "run" if len(rows) == 1 else f"median of {len(rows)} runs"
    return f"{count}: {names}\n{first['command']}"


def _settings(row: dict[str, Any]) -> list[Any]:
    """Settings that distinguish two series of one device."""
    model = row.get("model")
    return [
        None if model == USUAL_MODEL else model,
        *(row.get(name) for name in ("preset", "precision", "other_settings")),
    ]


def _describe_batch(row: dict[str, Any]) -> str | None:
    """The global batch of a row, unless it is one micro-batch on each device."""
    if not row.get("global_batch"):
        return None
    if row["global_batch"] == (row.get("micro_batch") or 0) * (_num_devices(row) or 0):
        return "one micro-batch per step"
    return f"global batch {row['global_batch']}"


def _describe_batches(rows: Sequence[dict[str, Any]]) -> Callable[[dict[str, Any]], str | None]:
    """A function from a row to its global batch (strong scaling) or images per GPU (weak)."""

    def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
        names = ("image_size", "latents", "ema", "micro_batch")
        values = [*_settings(row), *(row.get(name) for name in names)]
        return (_device(row), describe_origin(row), row["kind"], *values)

    batches: dict[tuple[Any, ...], set[tuple[int, int]]] = defaultdict(set)
    for row in rows:
        if row.get("global_batch"):
            batches[key_of(row)].add((row["global_batch"], row["num_gpus"]))

    def describe(row: dict[str, Any]) -> str | None:
        if not row.get("global_batch"):
            return None
        per_gpu = {batch / number for batch, number in batches[key_of(row)]}
        numbers = {number for _, number in batches[key_of(row)]}
        if len(per_gpu) == 1 and len(numbers) > 1:
            return f"{row['global_batch'] / row['num_gpus']:g} images per GPU and step"
        return f"global batch {row['global_batch']}"

    return describe


def _draw(
    panels: Sequence[Panel],
    *,
    name: str,
    title: str,
    draw_panel: Callable[[Axes, Panel, Style], None],
    describe_x: Callable[[int], str],
) -> Plot | None:
    if not panels:
        return None
    shown = [
        dataclasses.replace(panel, series=panel.series[:MAX_SERIES])
        for panel in panels[:MAX_PANELS]
    ]
    every_series = [series for panel in shown for series in panel.series]
    colours = _number(series.device for series in every_series)
    sources = _number(series.source for series in every_series)
    notes: dict[str, list[str]] = {}

    def style_of(series: Series) -> dict[str, Any]:
        gid = f"{name}-{len(notes) + 1}"
        notes[gid] = [
            f"{_describe_series(series)}\n{describe_x(x)}: {point.note}"
            for x, point in series.points.items()
        ]
        colour = SERIES_COLOURS[(colours[series.device] - 1) % len(SERIES_COLOURS)]
        return {
            "color": colour,
            "marker": MARKERS[series.kind],
            "markerfacecolor": "white" if series.has_ema is False else colour,
            "markersize": 8 if series.has_ema is False else 5,
            "linestyle": "--" if series.has_ema is False else "-",
            # A hollow marker goes behind a full one at the same place.
            "zorder": 2 if series.has_ema is False else 3,
            "label": shorten(_describe_series(series), length=80) + f" [{sources[series.source]}]",
            "gid": gid,
        }

    footnotes = [f"[{number}] {source}" for source, number in sources.items()]
    left_out = sum(len(panel.series) for panel in panels) - len(every_series)
    if left_out:
        footnotes.insert(0, f"{left_out} more series are not drawn")
    legend_inches = LEGEND_LINE_INCHES * (1 + max(len(panel.series) for panel in shown))
    figure, axes = make_figure(
        [PANEL_HEIGHT_INCHES] * len(shown),
        sources="; ".join(footnotes),
        gap=0.9 + legend_inches,
        below=0.55 + legend_inches,
    )
    for ax, panel in zip(axes, shown, strict=True):
        ax.set_title(shorten(panel.title, length=90))
        draw_panel(ax, panel, style_of)
        # Below the axes, where it covers no line.
        ax.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.48 / PANEL_HEIGHT_INCHES))
    return render(figure, name=name, title=title, notes=notes)


def _draw_micro_batch_panel(ax: Axes, panel: Panel, style_of: Style) -> None:
    _draw_lines(ax, panel, style_of)
    micro_batches = sorted({x for series in panel.series for x in series.points})
    if len(micro_batches) <= MAX_TICKS:
        ax.set_xticks(micro_batches)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("micro-batch per device, images")
    ax.set_ylabel("images/s")


def _draw_speed_up_panel(ax: Axes, panel: Panel, style_of: Style) -> None:
    smallest = min(min(series.points) for series in panel.series)
    largest = max(max(series.points) for series in panel.series)
    ax.plot(
        [smallest, largest],
        [1, largest / smallest],
        color="#666666",
        linestyle=":",
        label="ideal",
    )
    _draw_lines(ax, panel, style_of, relative_to=smallest)
    _label_gpu_counts(ax, panel)
    ax.set_ylabel(f"speed-up over {smallest} GPUs")


def _draw_scaling_panel(ax: Axes, panel: Panel, style_of: Style) -> None:
    _draw_lines(ax, panel, style_of)
    _label_gpu_counts(ax, panel)
    ax.set_ylabel("images/s")


def _label_gpu_counts(ax: Axes, panel: Panel) -> None:
    """Make both axes logarithmic, so that 8 and 512 GPUs can both be read."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

    counts = {x for series in panel.series for x in series.points}
    powers = [2**exponent for exponent in range(max(counts).bit_length())]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(FixedLocator([power for power in powers if power >= min(counts)]))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.set_xlabel("GPUs")


def _draw_lines(ax: Axes, panel: Panel, style_of: Style, *, relative_to: int | None = None) -> None:
    """Draw each series with its intervals, or both over its figure at `relative_to`."""
    for series in panel.series:
        style, points = style_of(series), series.points.values()
        scale = 1.0 if relative_to is None else 1 / series.points[relative_to].rate
        ax.plot(list(series.points), [point.rate * scale for point in points], **style)
        ax.vlines(
            list(series.points),
            [point.low * scale for point in points],
            [point.high * scale for point in points],
            color=style["color"],
            linewidth=1,
        )


def _describe_series(series: Series) -> str:
    ema = {True: "EMA", False: "no EMA", None: None}[series.has_ema]
    parts = [series.device, ema, series.settings, series.kind]
    return ", ".join(part for part in parts if part)


def _number(names: Iterable[str]) -> dict[str, int]:
    """Number the distinct names from 1, in order."""
    return {name: number for number, name in enumerate(dict.fromkeys(names), start=1)}


def _device(row: dict[str, Any]) -> str:
    return device_of(row) or "device not told"


def _count_devices(number: int | None) -> str:
    if number is None:
        return "number of devices not told"
    return "1 device" if number == 1 else f"{number} devices"


def _num_devices(row: dict[str, Any]) -> int | None:
    return row.get("num_gpus") or row.get("num_devices")
