"""Makes the page of one run, also while it runs: its state, its charts, and what happened."""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.analysis.feed_table import make_data_table
from sdbench.base.units import BYTES_PER_GIB
from sdbench.record.history import cost_of_stops
from sdbench.record.store import BENCHMARK, OK, TRAIN, UNFINISHED_REASON, kind_of, utc_now
from sdbench.report.page import Section, format_page
from sdbench.report.plots import plain_style
from sdbench.report.run_plots import draw_breakdown, draw_step_times
from sdbench.report.runs import describe_run, read_record
from sdbench.report.tables import Field, Table, make_table, tabulate
from sdbench.report.terminal import format_number, format_rates, list_figures
from sdbench.report.training_run import TrainingRun, draw_run, encode_grids, read_run

# A century: a file may hold any number.
MAX_DURATION_S = 100 * 365.25 * 86_400
# Each table has the newest rows.
MAX_ROWS = 12
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


def make_run_page(folder: Path) -> tuple[str, list[Path]]:
    """Make the page of a run of any kind.

    Returns:
        The page; and the tables of steps that it lacks as they cannot be read, which are named on
        stderr.
    """
    record = read_record(folder, flag="RUNS")
    kind, has_result = kind_of(record), record["status"] == OK
    figures = [("state", _describe_state(record))]
    help_text, plots, further, left_out = "", [], [], []
    with plain_style():
        if kind == TRAIN:
            run = read_run(folder, record)
            help_text = "Times are hours:minutes:seconds. Validating and drawing are not training."
            figures += _list_progress(run).items()
            plots = draw_run(run)
            further = [_make_pictures(run), _make_history(run)]
        elif kind == BENCHMARK and has_result:
            figures += list_figures(record)
            traces, left_out = draw_step_times([record], {record["run_id"]: folder})
            plots = [*draw_breakdown([record]), *traces]
        elif has_result:
            data = make_data_table([record])
            names = [column.name for column in data.columns]
            figures += zip(names, [cell.text for cell in data.rows[0]], strict=True)
    if kind in (BENCHMARK, TRAIN):
        figures.append(("work", describe_run(record)))
    figures.append(("command", shlex.join(record["command"])))
    rows = [{"what": name, "figure": figure} for name, figure in figures]
    caption = f"State at {utc_now().removesuffix('+00:00')} UTC"
    state = make_table(rows, name="state", caption=caption)
    sections = [Section("The run", help_text, [state], plots=plots), *further]
    page = format_page(
        [section for section in sections if section.has_content],
        name=folder.resolve().name,
        made_from="Made by python -m sdbench report.",
    )
    return page, left_out


def _describe_state(record: Mapping[str, Any]) -> str:
    if record["reason"] == UNFINISHED_REASON:
        return "running, or killed"
    return ": ".join(filter(None, (record["status"], record["reason"])))


def _list_progress(run: TrainingRun) -> dict[str, str]:
    """How far a training run is."""
    record = run.record
    num_steps = record["workload"]["num_steps"]
    stops = record["summary"] or cost_of_stops(run.events)
    figures = {"steps": f"{run.last_step:,} of {num_steps:,}"}
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
    elif record["status"] == OK:  # a published run, which has no table of steps
        figures = {
            "steps": f"{num_steps:,}",
            "images/s": format_rates([record["summary"]]),
            "trained": _duration(record["summary"]["total_train_s"]),
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
    if stops["num_restarts"]:
        figures["lost by them"] = _describe_loss(stops)
    return figures


def _make_pictures(run: TrainingRun) -> Section:
    grids = encode_grids(run)
    num_grids = len({one["step"] for one in run.of("samples") if one["file"]})
    some = f" {len(grids)} of {num_grids} grids." if num_grids > len(grids) else ""
    return Section(
        "Pictures",
        f"The same prompts and the same noise, the newest pictures first.{some}",
        pictures=[(f"Step {step}", uri) for step, uri in grids],
    )


def _make_history(run: TrainingRun) -> Section:
    scores = tabulate(
        SCORES,
        _newest(run.of("scores")),
        name="scores",
        caption="Scores of pictures drawn for held-out captions",
    )
    tables = [_make_validations(run), scores.without_empty_columns(), _make_events(run)]
    return Section(
        "History", "The newest rows of each table.", [table for table in tables if table.rows]
    )


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
