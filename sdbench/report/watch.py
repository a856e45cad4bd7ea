"""The command `python -m sdbench watch`: a page with the progress of a training run."""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import EXIT_OK
from sdbench.base.files import replace_file
from sdbench.base.units import BYTES_PER_GIB
from sdbench.record.history import cost_of_stops
from sdbench.record.store import OK, UNFINISHED_REASON, utc_now
from sdbench.report.page import Section, format_page
from sdbench.report.plots import plain_style
from sdbench.report.run_plots import describe_run
from sdbench.report.tables import Table, make_table
from sdbench.report.terminal import format_number
from sdbench.report.training_run import TrainingRun, draw_run, encode_grids, read_run
from sdbench.settings.kinds import PATH, SECONDS
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting

PAGE_NAME = "watch.html"
# A century: figures of others may give any time.
MAX_DURATION_S = 100 * 365.25 * 86_400
# Of each table the newest rows.
MAX_ROWS = 12
HELP = "Times are hours:minutes:seconds. Validating and drawing are no part of training."
EVENTS_THAT_LOOK = {
    "validation": "validating",
    "samples": "drawing pictures",
    "scores": "scoring pictures",
}
EVENTS_IN_WORDS = {
    "begin": "start",
    "save": "checkpoint",
    "end": "end",
    "bad_loss": "loss not finite",
}
EPILOG = """\
examples:
  python -m sdbench watch runs/first
      writes runs/first/watch.html
  python -m sdbench watch runs/first --every 30
      again and again, until the run has reached its end or Ctrl-C; the browser follows
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchFlags:
    """Flags of the command."""

    run: Path = setting(PATH, REQUIRED, "folder of a run of train.py", is_positional=True)
    every: float | None = setting(
        SECONDS, None, "seconds from one page to the next (default: one page)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page of a run."""
    flags = parse(
        WatchFlags,
        argv,
        prog="python -m sdbench watch",
        description="Make one HTML page of a training run: curves, pictures, restarts.",
        epilog=EPILOG,
    ).config
    run = write_page(flags.run, refresh_s=flags.every)
    print(flags.run / PAGE_NAME, flush=True)
    while flags.every is not None and run.record["status"] != OK:
        time.sleep(flags.every)
        run = write_page(flags.run, refresh_s=flags.every)
    return EXIT_OK


def write_page(folder: Path, *, refresh_s: float | None = None) -> TrainingRun:
    """Write the page into the folder of the run, and return the run.

    While the run goes on, the browser reloads the page every `refresh_s` seconds.
    """
    run = read_run(folder)
    is_over = run.record["status"] == OK
    with plain_style():
        plot = draw_run(run)
    tables = [
        table
        for table in (_make_validations(run), _make_scores(run), _make_events(run))
        if table.rows
    ]
    page = format_page(
        [Section("Where it is", HELP, [_make_state(run)], plots=[] if plot is None else [plot])],
        template="watch.html.j2",
        name=folder.resolve().name,
        step=_last_step(run),
        work=describe_run(run.record),
        made_utc=_without_zone(utc_now()),
        refresh_s=None if refresh_s is None or is_over else f"{refresh_s:g}",
        history=Section("History", "The newest rows of each table.", tables),
        grids=encode_grids(run),
        num_grids=len({one["step"] for one in run.of("samples") if one["file"]}),
    )
    replace_file(folder / PAGE_NAME, page)
    return run


def _last_step(run: TrainingRun) -> int:
    return 0 if run.steps.empty else int(run.steps["step"].iloc[-1])


def _make_state(run: TrainingRun) -> Table:
    """The state of the run, with a row for each figure."""
    record, steps = run.record, run.steps
    num_steps = record["workload"]["num_steps"]
    images_per_step = record["config"]["batch_size"]
    state = record["status"]
    if record["reason"] is not None:
        state = f"{state}: {record['reason']}"
    if record["reason"] == UNFINISHED_REASON:
        state = "training, or killed"
    stops = cost_of_stops(run.events)
    kept_s = (images_per_step / steps["images_per_second"]).sum()
    figures = {"state": state, "steps": f"{_last_step(run):,} of {num_steps:,}"}
    if not steps.empty:
        last = steps.iloc[-1]
        num_left = max(0, num_steps - last["step"])
        figures |= {
            "training loss, smoothed": f"{last['smooth_loss']:.4f}",
            "learning rate": f"{last['learning_rate']:.3g}",
            "images/s": format_number(last["images_per_second"]),
            "data wait": f"{last['data_wait_percent']:.1f} %",
            "trained": _duration(kept_s + stops["lost_s"]),
            "left to train": _duration(num_left * images_per_step / last["images_per_second"]),
        }
    if validations := run.of("validation"):
        best = min(validations, key=lambda one: math.inf if one["loss"] is None else one["loss"])
        figures["validation loss, newest"] = _at_step(validations[-1])
        figures["validation loss, lowest"] = _at_step(best)
    for event, name in EVENTS_THAT_LOOK.items():
        if seconds := sum(one["seconds"] for one in run.of(event)):
            figures[name] = _duration(seconds)
    if saves := run.of("save"):
        figures["waiting for checkpoints"] = _duration(sum(one["stall_s"] for one in saves))
    figures["restarts"] = f"{stops['num_restarts']}"
    if run.restarts:
        figures["lost by them"] = _describe_loss(stops)
    rows = [{"what": name, "figure": figure} for name, figure in figures.items()]
    return make_table(rows, name="state", caption="Figures of now")


def _make_validations(run: TrainingRun) -> Table:
    rows = [
        {
            "step": one["step"],
            "loss": one["loss"],
            "averaged weights": one.get("ema_loss"),
            **{
                f"t = {timestep}": loss
                # That of a VAE has no time steps.
                for timestep, loss in zip(
                    one.get("timesteps", ()), one.get("by_timestep", ()), strict=False
                )
            },
        }
        for one in run.of("validation")[: -MAX_ROWS - 1 : -1]
    ]
    caption = "Validation loss, and where there is noise its parts by the time step t"
    return make_table(rows, name="validation", caption=caption).without_empty_columns()


def _make_scores(run: TrainingRun) -> Table:
    rows = [
        {
            "step": one["step"],
            "pictures": one["num_pictures"],
            "FID": one.get("fid"),
            "CLIP score": one.get("clip_score"),
            "standard error of it": one.get("clip_score_error"),
        }
        for one in run.of("scores")[: -MAX_ROWS - 1 : -1]
    ]
    caption = "Scores of pictures drawn for held-out captions"
    return make_table(rows, name="scores", caption=caption).without_empty_columns()


def _make_events(run: TrainingRun) -> Table:
    shown = [one for one in run.events if one["event"] in EVENTS_IN_WORDS]
    rows = [
        {
            "time, UTC": _without_zone(one["time_utc"]),
            "step": one["step"],
            "event": "restart" if one in run.restarts else EVENTS_IN_WORDS[one["event"]],
            "details": _describe_event(run, one),
        }
        for one in shown[: -MAX_ROWS - 1 : -1]
    ]
    return make_table(rows, name="events", caption="Starts, checkpoints and ends")


def _describe_event(run: TrainingRun, event: dict[str, Any]) -> str:
    if event["event"] == "save":
        return _describe_save(event)
    if event in run.restarts:
        passed_over = [f"passed over: {reason}" for reason in event["passed_over"]]
        return "; ".join([_describe_loss(event), *passed_over])
    return ""


def _describe_loss(facts: dict[str, Any]) -> str:
    """The cost of a restart, or of all of them."""
    return (
        f"{facts['num_lost_steps']:,} steps, {_duration(facts['lost_s'])} of training; "
        f"stood still for {_duration(facts['down_s'])}"
    )


def _describe_save(save: dict[str, Any]) -> str:
    if save["error"] is not None:
        return f"not saved: {save['error']}"
    gib = save["num_bytes"] / BYTES_PER_GIB
    return f"{gib:.3g} GiB in {save['seconds']:.3g} s; training waited {save['stall_s']:.3g} s"


def _at_step(validation: dict[str, Any]) -> str:
    loss = validation["loss"]
    return f"{'not finite' if loss is None else f'{loss:.4f}'} at step {validation['step']:,}"


def _duration(seconds: float) -> str:
    if seconds > MAX_DURATION_S:
        return f"more than {_duration(MAX_DURATION_S)}"
    return str(datetime.timedelta(seconds=round(seconds)))


def _without_zone(time_utc: str) -> str:
    return time_utc.removesuffix("+00:00")
