"""Charts of the phases of a step and of step times, from the latest run of each configuration."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError
from sdbench.base.outside import is_bounded, open_table
from sdbench.record.configuration import place_of_encoders
from sdbench.record.devices import count_devices
from sdbench.record.store import STEPS_NAME
from sdbench.report.plots import PART_COLOURS, SERIES_COLOURS, Plot, make_figure, render, shorten
from sdbench.report.runs import group_runs, use_each

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


def draw_breakdown(records: Sequence[dict[str, Any]]) -> Plot | None:
    """Draw the share of each phase in a step.

    Args:
        records: Records of training runs with the status ok.

    Returns:
        The chart, or None if no run was profiled.
    """
    profiled = _latest([record for record in records if record["summary"].get("breakdown")])
    if not profiled:
        return None
    shown = profiled[:MAX_BARS]
    sources = _describe_sources(shown, num_found=len(profiled))
    heights = [0.62 * len(shown) + 0.1]
    figure, (ax,) = make_figure(heights, sources=sources, left=0.25, below=1.25)
    for position, record in enumerate(shown):
        _draw_bar(ax, record, y=-position)
    ax.set_ylim(-len(shown) + 0.45, 0.75)
    ax.set_xlim(0, 100)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.grid(False)
    ax.set_xlabel("share of a step, %")
    handles, labels = ax.get_legend_handles_labels()
    parts = dict(zip(labels, handles, strict=True))
    figure.legend(
        parts.values(),
        parts.keys(),
        loc="lower center",
        ncols=4,
        bbox_to_anchor=(0.5, 0.5 / figure.get_figheight()),
        columnspacing=1.2,
        handlelength=1.2,
    )
    return render(figure, name=BREAKDOWN, title="Where the time of a step goes")


def draw_step_times(
    records: Sequence[dict[str, Any]], runs: Path
) -> tuple[Plot | None, list[Path]]:
    """Draw the time of every step, with warm-up shaded.

    Args:
        records: Records of training runs with the status ok.
        runs: The folder that holds the folders of the runs.

    Returns:
        The chart, or None if no run's folder has a table of steps; and the tables of the newest
        runs that cannot be read, which are named.
    """
    traced = {runs / record["run_id"] / STEPS_NAME: record for record in _latest(records)}
    traced = {path: record for path, record in traced.items() if path.exists()}
    shown, left_out = use_each(
        list(traced)[:MAX_TRACES], lambda path: (traced[path], _read_steps(path))
    )
    if not shown:
        return None, left_out
    sources = _describe_sources([record for record, _ in shown], num_found=len(traced))
    figure, axes = make_figure([1.5] * len(shown), sources=sources, gap=0.75)
    for ax, (record, steps) in zip(axes, shown, strict=True):
        _draw_trace(ax, record, steps)
    axes[-1].set_xlabel("step")
    plot = render(figure, name=STEP_TIMES, title="Step times, with warm-up shaded")
    return plot, left_out


def describe_run(record: dict[str, Any]) -> str:
    """A run in a few words, e.g. ``1 x CPU, sd2-base, 256 px, online, seed, micro-batch 2``."""
    config = record["config"]
    parts = [
        count_devices(record["machine"], record["ranks"]),
        record["workload"]["architecture"],
        f"{config['image_size']} px",
        place_of_encoders(config),
        config["preset"],
        f"micro-batch {config['device_train_microbatch_size']}",
        "EMA" if config["use_ema"] else "no EMA",
    ]
    return ", ".join(str(part) for part in parts)


def _latest(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest run of each configuration, newest first."""
    latest = [
        max(runs, key=lambda run: (run["started_utc"], run["run_id"]))
        for runs in group_runs(records)
    ]
    return sorted(latest, key=lambda run: (run["started_utc"], run["run_id"]), reverse=True)


def _describe_sources(shown: Sequence[dict[str, Any]], *, num_found: int) -> str:
    text = f"measured: results/runs/{', '.join(record['run_id'] for record in shown)}"
    if num_found == len(shown):
        return text
    return f"The newest {len(shown)} of {num_found} configurations; {text}"


def _draw_bar(ax: Axes, record: dict[str, Any], *, y: float) -> None:
    breakdown = record["summary"]["breakdown"]
    left = 0.0
    for (name, meaning), colour in zip(PARTS.items(), PART_COLOURS, strict=True):
        percent = 100 * breakdown["seconds"].get(name, 0) / breakdown["step_time_s"]
        ax.barh(y, percent, left=left, height=0.5, color=colour, edgecolor="white", label=meaning)
        if percent >= MIN_LABELLED_PERCENT:
            ax.text(
                left + percent / 2,
                y,
                f"{percent:.0f}",
                ha="center",
                va="center",
                fontsize=8.5,
                color="white" if _is_dark(colour) else "black",
            )
        left += percent
    heading = f"{describe_run(record)}: {breakdown['step_time_s']:.3g} s"
    ax.text(0, y + 0.3, shorten(heading, length=105), fontsize=8.5, va="bottom")


def _is_dark(colour: str) -> bool:
    """Whether white text is easier to read on a colour than black (luma of ITU-R BT.601)."""
    red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 130


def _read_steps(path: Path) -> list[tuple[int, str, float]]:
    """Index, phase and time in seconds of every step.

    Raises:
        ConfigError: It cannot be read, or has no step.
    """
    try:
        steps = [
            (int(step["index"]), step["phase"], float(step["step_time_s"]))
            for step in csv.DictReader(open_table(path))
        ]
        if not steps or not all(index >= 0 and is_bounded(time) for index, _, time in steps):
            raise ValueError("it has no step, or one that no run can have")
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"a table of steps cannot be read ({error})",
            value=str(path),
            allowed="the table as the run wrote it",
            flag="--folder",
        ) from None
    return steps


def _draw_trace(ax: Axes, record: dict[str, Any], steps: Sequence[tuple[int, str, float]]) -> None:
    num_together = -(-len(steps) // MAX_STEPS_DRAWN)
    groups = [steps[start : start + num_together] for start in range(0, len(steps), num_together)]
    positions = [group[0][0] for group in groups]
    times_s = [[time_s for _, _, time_s in group] for group in groups]
    means_s = [sum(group) / len(group) for group in times_s]
    colour = SERIES_COLOURS[0]
    if num_together > 1:
        lows, highs = [min(group) for group in times_s], [max(group) for group in times_s]
        ax.fill_between(positions, lows, highs, color=colour, alpha=0.25, linewidth=0)
    ax.plot(
        positions,
        means_s,
        color=colour,
        linewidth=1.2,
        marker="o" if len(steps) <= 60 else None,
        markersize=3.5,
    )
    for phase, (meaning, shade) in SHADED_PHASES.items():
        inside = [index for index, of_phase, _ in steps if of_phase == phase]
        if inside:
            ax.axvspan(inside[0] - 0.5, inside[-1] + 0.5, color=shade, alpha=0.5, linewidth=0)
            place = {"transform": ax.get_xaxis_transform(), "fontsize": 8, "color": "#333333"}
            ax.text(inside[0] - 0.4, 0.04, meaning, **place)
    ax.set_xlim(-0.5, steps[-1][0] + 0.5)
    ax.set_ylim(0, 1.08 * max(max(group) for group in times_s))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_ylabel("step time, s")
    notes = ", ".join(record["summary"].get("flags", ()))
    title = describe_run(record) + (f" ({notes})" if notes else "")
    ax.set_title(shorten(title, length=95), fontsize=9.5)
