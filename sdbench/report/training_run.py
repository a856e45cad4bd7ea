"""Reads the files of a training run, and draws its curves and grids of pictures."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.record.history import TRAIN_STEP_COLUMNS, read_history
from sdbench.record.store import STEPS_NAME
from sdbench.report.plots import SERIES_COLOURS, Plot, make_figure, render
from sdbench.report.runs import read_steps

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# A plot of a longer run has every n-th step.
MAX_STEPS_DRAWN = 1500
# Half-life of the smoothed loss, as a share of the steps, and the shortest one in steps.
SMOOTHING_SHARE = 0.01
MIN_HALF_LIFE = 5.0
MAX_GRIDS = 7
# A larger grid is shown smaller, and as JPEG.
MAX_GRID_BYTES = 1_000_000
MAX_GRID_PIXELS = 1400
DASHED = {"color": "#666666", "linestyle": "--", "linewidth": 1}


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """A training run, which may still be going on.

    The record is from the newest process, the events are from all processes. A row of `steps` has
    `TRAIN_STEP_COLUMNS` and ``smooth_loss``, the exponentially weighted mean of the losses.
    """

    folder: Path
    record: dict[str, Any]
    steps: pd.DataFrame
    events: Sequence[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        """The events of a name."""
        return [one for one in self.events if one["event"] == event]

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """The events with which later processes resumed the run."""
        return self.of("begin")[1:]

    @property
    def last_step(self) -> int:
        """The newest step, 0 before the first."""
        return 0 if self.steps.empty else int(self.steps["step"].iloc[-1])

    @property
    def half_life(self) -> float:
        """Half-life of the smoothed loss, in steps."""
        return max(MIN_HALF_LIFE, SMOOTHING_SHARE * len(self.steps))


def read_run(folder: Path, record: dict[str, Any]) -> TrainingRun:
    """Read a run of train.py with this record; it may still be training."""
    import pandas as pd

    path = folder / STEPS_NAME
    rows = read_steps(path, columns=TRAIN_STEP_COLUMNS, flag="RUNS") if path.exists() else []
    steps = pd.DataFrame(rows, columns=[*TRAIN_STEP_COLUMNS], dtype=float)
    run = TrainingRun(folder, record, steps, read_history(folder))
    steps["smooth_loss"] = steps["loss"].ewm(halflife=run.half_life).mean()
    return run


def draw_run(run: TrainingRun) -> list[Plot]:
    """Draw losses, learning rate, throughput and data wait by step, if there is a step."""
    if run.steps.empty:
        return []
    sources = (
        f"steps.csv and history.jsonl of {run.folder.name}; the line through the losses is their "
        f"exponentially weighted mean with a half-life of {run.half_life:.0f} steps"
    )
    heights_inches = [3.0, 1.0, 1.0, 1.0]
    figure, axes = make_figure(heights_inches, sources=sources, above=0.6, left=0.95, gap=0.3)
    stride = -(-len(run.steps) // MAX_STEPS_DRAWN)
    shown = run.steps[(len(run.steps) - 1) % stride :: stride]  # the last step is among them
    _draw_losses(axes[0], run, shown)
    panels = {"learning_rate": "learning rate", "images_per_second": "images/s"}
    panels["data_wait_percent"] = "data wait, %"
    for ax, (column, label) in zip(axes[1:], panels.items(), strict=True):
        # A figure holds for every step of its logging period.
        ax.plot(shown["step"], shown[column], color=SERIES_COLOURS[0], drawstyle="steps-pre")
        ax.set_ylim(0, 1.1 * max(shown[column].max(), 1e-9))
        ax.set_ylabel(label)
    for ax in axes:
        ax.set_xlim(0, run.last_step)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.tick_params(labelbottom=ax is axes[-1])
        for restart in run.restarts:
            ax.axvline(restart["step"], **DASHED)
    figure.align_ylabels(axes)
    axes[-1].set_xlabel("step")
    return [render(figure, chart="training", title="Training, step by step")]


def _draw_losses(ax: Axes, run: TrainingRun, shown: pd.DataFrame) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    training, *colours = SERIES_COLOURS
    dots = {"alpha": 0.35, "linestyle": "", "marker": ".", "markersize": 4, "markeredgewidth": 0}
    ax.plot(shown["step"], shown["loss"], color=training, **dots)
    ax.plot(shown["step"], shown["smooth_loss"], color=training, label="training, smoothed")
    for fact, label, marker, colour in (
        ("loss", "validation", "o", colours[0]),
        ("ema_loss", "validation, averaged weights", "s", colours[1]),
    ):
        points = [(one["step"], one[fact]) for one in run.of("validation") if fact in one]
        if points:
            places = zip(*points, strict=True)
            ax.plot(*places, color=colour, marker=marker, label=label, clip_on=False)
    at_the_foot = {"transform": ax.get_xaxis_transform(), "linestyle": "", "clip_on": False}
    for label, marker, colour, has_failed in (
        ("checkpoint", "^", "#000000", False),
        ("checkpoint that failed", "x", "#D55E00", True),
    ):
        saved = [one["step"] for one in run.of("save") if (one["error"] is not None) == has_failed]
        if saved:
            ax.plot(saved, [0.0] * len(saved), marker, color=colour, label=label, **at_the_foot)
    if run.restarts:
        ax.plot([], [], label="restart", **DASHED)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.set_ylabel("loss")
    # Above the axes, where it covers no line.
    ax.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=2)


def encode_grids(run: TrainingRun) -> list[tuple[int, str]]:
    """Steps and data URIs of grids: the newest first, then others spread over the run."""
    # A step that was trained twice has one file.
    files = {one["step"]: run.folder / one["file"] for one in run.of("samples") if one["file"]}
    steps = sorted((step for step, path in files.items() if path.exists()), reverse=True)
    last = len(steps) - 1
    places = {round(last * place / (MAX_GRIDS - 1)) for place in range(MAX_GRIDS) if steps}
    return [(steps[place], _as_data_uri(files[steps[place]])) for place in sorted(places)]


def _as_data_uri(path: Path) -> str:
    from PIL import Image

    content, kind = path.read_bytes(), "png"
    if len(content) > MAX_GRID_BYTES:
        with Image.open(io.BytesIO(content)) as picture:
            smaller = picture.convert("RGB")
        smaller.thumbnail((MAX_GRID_PIXELS, MAX_GRID_PIXELS))
        buffer, kind = io.BytesIO(), "jpeg"
        smaller.save(buffer, kind, quality=85)
        content = buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
