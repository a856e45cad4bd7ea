"""The command `python -m sdbench watch`: a page with the progress of a training run."""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import EXIT_OK
from sdbench.base.files import replace_file
from sdbench.base.units import BYTES_PER_GIB
from sdbench.record.history import cost_of_stops
from sdbench.record.store import OK, UNFINISHED_REASON, utc_now
from sdbench.report.page import Section, format_page
from sdbench.report.plots import plain_style
from sdbench.report.runs import describe_run
from sdbench.report.tables import Field, Table, make_table, tabulate
from sdbench.report.terminal import format_number
from sdbench.report.training_run import TrainingRun, draw_run, encode_grids, read_run
from sdbench.settings.kinds import PATH, SECONDS
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting

PAGE_NAME = "watch.html"
# A century: a file may hold any number.
MAX_DURATION_S = 100 * 365.25 * 86_400
# Each table has the newest rows.
MAX_ROWS = 12
HELP = "Times are hours:minutes:seconds. Validating and drawing do not count as training."
# Events that pause training.
PAUSES = {"validation": "validating", "samples": "drawing pictures", "scores": "scoring pictures"}
EVENTS = {"begin": "start", "save": "checkpoint", "end": "end", "bad_loss": "loss not finite"}
SCORES = (
    Field("step", "step"),
    Field("pictures", "num_pictures"),
    Field("FID", "fid"),
    Field("CLIP score", "clip_score"),
    Field("standard error of it", "clip_score_error"),
)
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
        SECONDS, None, "write the page again after so many seconds (default: once)"
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
    """Write the page of a run into its folder; the browser reloads it while the run goes on."""
    run = read_run(folder)
    is_over = run.record["status"] == OK
    with plain_style():
        plot = draw_run(run)
    scores = tabulate(
        SCORES,
        _newest(run.of("scores")),
        name="scores",
        caption="Scores of pictures drawn for held-out captions",
    )
    tables = [_make_validations(run), scores.without_empty_columns(), _make_events(run)]
    page = format_page(
        [Section("Where it is", HELP, [_make_state(run)], plots=[] if plot is None else [plot])],
        template="watch.html.j2",
        name=folder.resolve().name,
        step=run.last_step,
        work=describe_run(run.record),
        made_utc=utc_now().removesuffix("+00:00"),
        refresh_s=None if refresh_s is None or is_over else f"{refresh_s:g}",
        history=Section(
            "History", "The newest rows of each table.", [table for table in tables if table.rows]
        ),
        grids=encode_grids(run),
        num_grids=len({one["step"] for one in run.of("samples") if one["file"]}),
    )
    replace_file(folder / PAGE_NAME, page)
    return run


def _make_state(run: TrainingRun) -> Table:
    """The state of the run, with a row for each figure."""
    record = run.record
    num_steps = record["workload"]["num_steps"]
    state = record["status"]
    if record["reason"] == UNFINISHED_REASON:
        state = "training, or killed"
    elif record["reason"] is not None:
        state = f"{state}: {record['reason']}"
    stops = cost_of_stops(run.events)
    figures = {"state": state, "steps": f"{run.last_step:,} of {num_steps:,}"}
    if not run.steps.empty:
        last = run.steps.iloc[-1]
        step_times_s = record["config"]["batch_size"] / run.steps["images_per_second"]
        num_left = max(0, num_steps - last["step"])
        figures |= {
            "training loss, smoothed": f"{last['smooth_loss']:.4f}",
            "learning rate": f"{last['learning_rate']:.3g}",
            "images/s": format_number(last["images_per_second"]),
            "data wait": f"{last['data_wait_percent']:.1f} %",
            "trained": _duration(step_times_s.sum() + stops["lost_s"]),
            "left to train": _duration(num_left * step_times_s.iloc[-1]),
        }
    if validations := run.of("validation"):
        best = min(validations, key=lambda one: math.inf if one["loss"] is None else one["loss"])
        figures["validation loss, newest"] = _at_step(validations[-1])
        figures["validation loss, lowest"] = _at_step(best)
    for event, name in PAUSES.items():
        if seconds := sum(one["seconds"] for one in run.of(event)):
            figures[name] = _duration(seconds)
    if saves := run.of("save"):
        figures["waiting for checkpoints"] = _duration(sum(one["stall_s"] for one in saves))
    figures["restarts"] = f"{stops['num_restarts']}"
    if run.restarts:
        figures["lost by them"] = _describe_loss(stops)
    rows = [{"what": name, "figure": figure} for name, figure in figures.items()]
    return make_table(rows, name="state", caption="Figures of now")


def _newest(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(reversed(events[-MAX_ROWS:]))


def _make_validations(run: TrainingRun) -> Table:
    rows = []
    for one in _newest(run.of("validation")):
        row = {"step": one["step"], "loss": one["loss"], "averaged weights": one.get("ema_loss")}
        # The loss of a VAE has no time steps.
        parts = zip(one.get("timesteps", ()), one.get("by_timestep", ()), strict=False)
        rows.append(row | {f"t = {timestep}": loss for timestep, loss in parts})
    caption = "Validation loss, and where there is noise its parts by the time step t"
    return make_table(rows, name="validation", caption=caption).without_empty_columns()


def _make_events(run: TrainingRun) -> Table:
    rows = [
        {
            "time, UTC": one["time_utc"].removesuffix("+00:00"),
            "step": one["step"],
            "event": "restart" if one in run.restarts else EVENTS[one["event"]],
            "details": _describe_event(one, is_restart=one in run.restarts),
        }
        for one in _newest([one for one in run.events if one["event"] in EVENTS])
    ]
    return make_table(rows, name="events", caption="Starts, checkpoints and ends")


def _describe_event(event: Mapping[str, Any], *, is_restart: bool) -> str:
    if is_restart:
        passed_over = [f"passed over: {reason}" for reason in event["passed_over"]]
        return "; ".join([_describe_loss(event), *passed_over])
    if event["event"] != "save":
        return ""
    if event["error"] is not None:
        return f"not saved: {event['error']}"
    gib = event["num_bytes"] / BYTES_PER_GIB
    return f"{gib:.3g} GiB in {event['seconds']:.3g} s; training waited {event['stall_s']:.3g} s"


def _describe_loss(facts: Mapping[str, Any]) -> str:
    """The cost of a restart, or of all of them."""
    return (
        f"{facts['num_lost_steps']:,} steps, {_duration(facts['lost_s'])} of training; "
        f"stood still for {_duration(facts['down_s'])}"
    )


def _at_step(validation: Mapping[str, Any]) -> str:
    loss = validation["loss"]
    return f"{'not finite' if loss is None else f'{loss:.4f}'} at step {validation['step']:,}"


def _duration(seconds: float) -> str:
    if seconds > MAX_DURATION_S:
        return f"more than {_duration(MAX_DURATION_S)}"
    return str(datetime.timedelta(seconds=round(seconds)))
