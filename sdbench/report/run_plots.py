"""Charts of the phases of a step and of step times, from the latest run of each configuration."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.record.configuration import group, work_of
from sdbench.record.store import STEPS_NAME
from sdbench.report.plots import (
    PART_COLOURS,
    SERIES_COLOURS,
    Plot,
    make_figure,
    name_panel,
    render,
    set_title,
    shorten,
)
from sdbench.report.runs import describe_devices, group_runs, read_steps, tell_apart, use_each

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BREAKDOWN = "time_breakdown"
STEP_TIMES = "step_times"
NAMES = (BREAKDOWN, STEP_TIMES)
PARTS = {
    "data_wait": "data wait",
    "host_to_device": "host to device",
    "vae_encode": "VAE encode",
    "text_encode": "text encode",
    "unet_forward": "U-Net forward",
    "backward": "backward",
    "gradient_communication": "gradient communication",
    "rank_wait": "waiting for other ranks",
    "optimizer": "optimizer",
    "ema": "EMA",
    "other": "other",
}
SHADED_PHASES = {"warmup": ("warm-up", "#BBBBBB"), "profiled": ("profiled", "#DDCC77")}
# A narrower part has no label.
MIN_LABELLED_PERCENT = 4
MAX_BARS = 12
MAX_TRACES = 4
# Longer traces are drawn as the mean and range of this many groups of steps.
MAX_STEPS_DRAWN = 300


def draw_breakdown(records: Sequence[dict[str, Any]]) -> list[Plot]:
    """Draw the share of each phase in a step of the runs that were profiled.

    Each device and kind of work has a panel.
    """
    profiled = _latest([record for record in records if record["summary"]["breakdown"]])
    panels = group(profiled[:MAX_BARS], key_of=_work_of).values()
    plots = []
    for index, bars in enumerate(panels):
        sources = _describe_sources(bars, num_found=len(profiled), most=MAX_BARS)
        height = [0.62 * len(bars)]
        figure, (ax,) = make_figure(height, sources=sources, left=0.25, below=1.4)
        common, labels = tell_apart(bars)
        name = name_panel(BREAKDOWN, index)
        notes: dict[str, list[str]] = {}
        for position, (record, label) in enumerate(zip(bars, labels, strict=True)):
            _draw_bar(ax, record, y=-position, label=label, name=name, notes=notes)
        set_title(ax, common, weight="bold")
        ax.set_ylim(-len(bars) + 0.6, 0.75)
        ax.set_xlim(0, 100)
        ax.set_xticks(range(0, 101, 20))
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.grid(False)
        ax.set_xlabel("share of a step, %")
        handles, names = ax.get_legend_handles_labels()
        parts = dict(zip(names, handles, strict=True))
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.5 / figure.get_figheight())}
        spaces = {"ncols": 3, "columnspacing": 1.2, "handlelength": 1.2}
        figure.legend(parts.values(), parts.keys(), **place, **spaces)
        devices, model, image_size, latents = _work_of(bars[0])
        work = f"{devices}, {model}, {image_size} px, {latents}"
        title = f"Where the time of a step goes: {work}"
        plots.append(render(figure, chart=BREAKDOWN, index=index, title=title, notes=notes))
    return plots


def _work_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return describe_devices(record), *work_of(record)


def draw_step_times(
    records: Sequence[dict[str, Any]], folders: Mapping[str, Path]
) -> tuple[list[Plot], list[Path]]:
    """Draw the time of every step of the newest runs, a panel each, with warm-up shaded.

    Tables of steps that cannot be read are named on stderr and returned.
    """
    traced = {folders[record["run_id"]] / STEPS_NAME: record for record in _latest(records)}
    traced = {path: record for path, record in traced.items() if path.exists()}

    def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        columns = ("index", "phase", "step_time_s")
        return traced[path], read_steps(path, columns=columns, flag="--folder", least=1)

    shown, left_out = use_each(list(traced)[:MAX_TRACES], read)
    if not shown:
        return [], left_out
    plots = []
    _, labels = tell_apart([record for record, _ in shown])
    for index, ((record, steps), label) in enumerate(zip(shown, labels, strict=True)):
        sources = _describe_sources([record], num_found=len(traced), most=MAX_TRACES)
        figure, (ax,) = make_figure([1.5], sources=sources)
        _draw_trace(ax, record, steps, label=label)
        title = f"Step times, with warm-up shaded: {label}"
        plots.append(render(figure, chart=STEP_TIMES, index=index, title=title))
    return plots, left_out


def _latest(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest run of each configuration, newest first."""

    def began(run: dict[str, Any]) -> tuple[str, str]:
        return run["started_utc"], run["run_id"]

    latest = [max(runs, key=began) for runs in group_runs(records)]
    return sorted(latest, key=began, reverse=True)


def _describe_sources(shown: Sequence[dict[str, Any]], *, num_found: int, most: int) -> str:
    text = f"measured: {', '.join(record['run_id'] for record in shown)}"
    return f"The newest {most} of {num_found} configurations; {text}" if num_found > most else text


def _draw_bar(
    ax: Axes,
    record: dict[str, Any],
    *,
    y: float,
    label: str,
    name: str,
    notes: dict[str, list[str]],
) -> None:
    """Draw the phases of a step, and add the text that the page shows at each to `notes`."""
    breakdown = record["summary"]["breakdown"]
    origin = f"run: {record['run_id']}\n{shlex.join(record['command'])}"
    left = 0.0
    for (part, meaning), colour in zip(PARTS.items(), PART_COLOURS, strict=True):
        seconds = breakdown["seconds"][part] or 0.0
        percent = 100 * seconds / breakdown["step_time_s"]
        gid = f"{name}-{len(notes) + 1}"
        notes[gid] = [f"{label}\n{meaning}: {percent:.1f} %, {seconds:.3g} s\n{origin}"]
        style = {"height": 0.5, "color": colour, "edgecolor": "white"}
        ax.barh(y, percent, left=left, label=meaning, gid=gid, **style)
        if percent >= MIN_LABELLED_PERCENT:
            # Dark by the luma of ITU-R BT.601, where white text is easier to read.
            red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 130
            place = {"ha": "center", "va": "center", "fontsize": 8.5}
            text_colour = "white" if is_dark else "black"
            ax.text(left + percent / 2, y, f"{percent:.0f}", color=text_colour, **place)
        left += percent
    heading = f"{label}: {breakdown['step_time_s']:.3g} s"
    ax.text(0, y + 0.3, shorten(heading, length=72), fontsize=8.5, va="bottom")


def _draw_trace(
    ax: Axes, record: dict[str, Any], steps: Sequence[dict[str, Any]], *, label: str
) -> None:
    num_together = -(-len(steps) // MAX_STEPS_DRAWN)
    groups = [steps[start : start + num_together] for start in range(0, len(steps), num_together)]
    positions = [group[0]["index"] for group in groups]
    times_s = [[step["step_time_s"] for step in group] for group in groups]
    means_s = [sum(group) / len(group) for group in times_s]
    colour = SERIES_COLOURS[0]
    if num_together > 1:
        lows, highs = [min(group) for group in times_s], [max(group) for group in times_s]
        ax.fill_between(positions, lows, highs, color=colour, alpha=0.25, linewidth=0)
    marker = "o" if len(steps) <= 60 else None
    ax.plot(positions, means_s, color=colour, linewidth=1.2, marker=marker, markersize=3.5)
    for phase, (meaning, shade) in SHADED_PHASES.items():
        inside = [step["index"] for step in steps if step["phase"] == phase]
        if inside:
            ax.axvspan(inside[0] - 0.5, inside[-1] + 0.5, color=shade, alpha=0.5, linewidth=0)
            place = {"transform": ax.get_xaxis_transform(), "fontsize": 8, "color": "#333333"}
            ax.text(inside[0] - 0.4, 0.04, meaning, **place)
    ax.set_xlim(-0.5, steps[-1]["index"] + 0.5)
    ax.set_ylim(0, 1.08 * max(max(group) for group in times_s))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("step")
    ax.set_ylabel("step time, s")
    notes = ", ".join(record["summary"]["flags"] or ())
    set_title(ax, f"{label} ({notes})" if notes else label)
