"""Tables of training throughput: the best of each machine, all measured, and published figures.

Each model, resolution and place of the encoders has a table of its own: at 512 px a step of Stable
Diffusion 2 with the encoders in it is about 1.5 times the work of a step on latents, an image takes
four times the work of one of 256 px, and one of Flux.1 many times that.
"""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sdbench.record.configuration import (
    WORK,
    as_key,
    describe_other_settings,
    group,
    settings_of,
    work_of,
)
from sdbench.record.row import make_row
from sdbench.report.figures import describe_source, device_of
from sdbench.report.runs import (
    describe_configuration,
    describe_device,
    describe_work,
    group_runs,
    name_runs,
    notes_cell,
    peak_memory_cell,
    rates_cell,
    summary_cell,
    tell_apart,
)
from sdbench.report.tables import ORIGIN, Cell, Field, Table, median_cell, tabulate
from sdbench.report.terminal import format_number, mfu_of_matmul
from sdbench.statistics.intervals import between_runs_interval

# Columns. Their keys are the columns of results/throughput.csv, and some more.
WHO = (Field("kind", "kind"), Field("device", "device"), Field("devices", "num_devices"))
SUBMITTER = Field("submitted by", "submitter", unknown="")
CONFIGURATION = Field("configuration", "configuration")
RATE = Field("images/s (95 % interval)", "rates")
RATES = (RATE, Field("images/s per device", "images_per_second_per_device"))
NUM_RUNS = Field("runs", "num_runs")
MODEL = (Field("model", "model"), Field("px", "image_size"))
PRESET = Field("preset", "preset")
RECIPE = (
    Field("engine", "engine"),
    Field("precision", "precision"),
    Field("EMA", "ema"),
    Field("global batch", "global_batch"),
    Field("micro-batch", "micro_batch"),
)
OTHER_SETTINGS = Field("other settings", "other_settings", unknown="")
STEP = (
    Field("scaling", "scaling", unknown=""),
    Field("step p50, s", "step_time_p50_s"),
    Field("peak memory, GiB", "peak_memory_gib"),
)
USE = (
    Field("MFU, %", "mfu_percent"),
    Field("MFU of measured matmul, %", "mfu_of_matmul_percent"),
    Field("power, W", "power_w"),
)
NOTES, SOURCE = Field("notes", "notes", unknown=""), Field("source", "source")
# An interval says something if it begins at this share of the median or higher.
TELLING = 0.5
# Only on an HTML page: the names of the runs, and the command of the first.
RUNS = tuple(Field(name, name, is_extra=True) for name in ORIGIN)
# The settings of a measured row: its configuration names those that differ.
SETTINGS = tuple(
    field._replace(is_extra=True) for field in (*MODEL, PRESET, *RECIPE, OTHER_SETTINGS)
)
MEASURED = (
    *WHO,
    SUBMITTER,
    CONFIGURATION,
    *RATES,
    NUM_RUNS,
    *SETTINGS,
    *STEP,
    *USE,
    NOTES,
    SOURCE,
    *RUNS,
)
QUOTED = (*WHO, PRESET, OTHER_SETTINGS, *RATES, *MODEL, *RECIPE, *STEP, *USE, NOTES, SOURCE)
HEADLINE = (
    Field("machine", "machine"),
    SUBMITTER,
    Field("work", "work"),
    RATE,
    NUM_RUNS,
    *USE,
    CONFIGURATION,
    Field("best of", "num_configurations"),
    NOTES._replace(is_left=True),
    SOURCE,
    *RUNS,
)


def make_tables(records: Iterable[dict[str, Any]]) -> list[Table]:
    """A table for each model and kind of work, with a row for each configuration."""
    groups = group_runs(records)
    scalings = _describe_scalings([runs[0] for runs in groups])
    works = group(zip(groups, scalings, strict=True), key_of=lambda item: work_of(item[0][0]))
    rows = {}
    for work, items in works.items():
        first = [runs[0] for runs, _ in items]
        if len(first) == 1:
            names = [describe_configuration(first[0])]
        else:
            names = tell_apart(first, without=["device"])[1]
        rows[work] = [
            _measured_row(runs) | {"configuration": name, "scaling": scaling}
            for (runs, scaling), name in zip(items, names, strict=True)
        ]
    return _make_work_tables(rows, MEASURED)


def make_figure_tables(figures: Iterable[dict[str, Any]], *, name: str) -> list[Table]:
    """Make tables of quoted throughput, one for each kind of work."""
    groups = group(figures, key_of=lambda row: tuple(map(row.get, WORK)))
    rows = {work: list(map(_figure_row, of_work)) for work, of_work in groups.items()}
    return _make_work_tables(rows, QUOTED, name=f"{name}-")


def _make_work_tables(
    rows: Mapping[tuple[Any, ...], Sequence[dict[str, Any]]],
    fields: Sequence[Field],
    *,
    name: str = "",
) -> list[Table]:
    return [
        tabulate(
            fields,
            of_work,
            name=f"{name}{_anchor(work)}",
            caption=describe_work(*work),
        ).without_empty_columns()
        for work, of_work in rows.items()
    ]


def _anchor(work: tuple[Any, ...]) -> str:
    """Part of a link, e.g. ``sd2-base-LoRA-4-512px-online``."""
    model, image_size, latents = work
    return "-".join(re.findall(r"[\w.-]+", f"{model} {image_size}px {latents}"))


def make_headline_table(records: Iterable[dict[str, Any]]) -> Table:
    """Make the table of the best configuration of each machine, model and kind of work.

    The best is the one whose 95 % interval begins highest, so that a poorly known figure does not
    stand for a machine. Preferred are configurations without a flag, then those whose interval
    says something, then those with an interval between runs, which vary more than the steps within
    a run. Rows are sorted by GPUs first, then by machine, then by the number
    of trained parameters, largest first.
    """
    tracks = group(group_runs(records), key_of=lambda runs: _track_of(runs[0]))
    machines = list(dict.fromkeys(track.machine for track in tracks))

    def place(track: _Track) -> tuple[bool, int, int]:
        trained = tracks[track][0][0]["workload"]["num_trainable_parameters"]
        return not track.on_gpu, machines.index(track.machine), -trained

    rows = []
    for track in sorted(tracks, key=place):
        best = max(tracks[track], key=_preference)
        rows.append(
            _measured_row(best)
            | {
                "machine": track.machine,
                "work": f"{track.model}, {track.image_size} px, {track.latents}",
                "configuration": describe_configuration(best[0]),
                "num_configurations": len(tracks[track]),
            }
        )
    caption = "The best configuration of each machine, model and kind of work"
    return tabulate(HEADLINE, rows, name="headlines", caption=caption).without_empty_columns()


class _Track(NamedTuple):
    """A machine (GPUs, or CPU nodes with any number of ranks), a model and a kind of work.

    What others measured on such a machine is apart from what was measured here.
    """

    on_gpu: bool
    machine: str
    submitter: str | None
    model: str
    image_size: int
    latents: str


def _track_of(record: dict[str, Any]) -> _Track:
    on_gpu = record["machine"]["device_type"] != "cpu"
    number = record["ranks"]["world_size" if on_gpu else "num_nodes"]
    machine = f"{number} x {describe_device(record)}"
    submitter = record.get("submission", {}).get("submitter")
    return _Track(on_gpu, machine, submitter, *work_of(record))


def _preference(runs: Sequence[dict[str, Any]]) -> tuple[bool, bool, bool, float, float]:
    """Sort key of a configuration, the better the larger.

    Whether no run is flagged, whether the interval says something, whether it is one between runs,
    its low end, and the median rate. Without an interval between runs, the low end is the lowest
    of those within the runs; 0 if a run has none.
    """
    rates = [run["summary"]["images_per_second"] for run in runs]
    between = between_runs_interval(rates)
    if between is not None:
        low = between.low
    else:
        within = [run["summary"]["images_per_second_interval"] for run in runs]
        low = min(0.0 if interval is None else interval["low"] for interval in within)
    median = statistics.median(rates)
    is_unflagged = not any(run["summary"]["flags"] for run in runs)
    return is_unflagged, low >= TELLING * median, between is not None, low, median


def _describe_scalings(records: Sequence[dict[str, Any]]) -> list[str | None]:
    """Whether each configuration shows scaling together with others.

    Strong: the same global batch on another number of devices. Weak: the same batch per device.
    """
    sized = ("num_devices", "num_nodes", "batch_size")
    series: dict[tuple[Any, ...], set[int]] = {}
    keys = []
    for record in records:
        settings = settings_of(record)
        alike = as_key({name: settings[name] for name in settings.keys() - set(sized)})
        num_devices, global_batch = settings["num_devices"], settings["batch_size"]
        strong = ("strong", global_batch, *alike)
        weak = ("weak", global_batch / num_devices, *alike)
        keys.append((strong, weak))
        for key in (strong, weak):
            series.setdefault(key, set()).add(num_devices)
    return [", ".join(key[0] for key in pair if len(series[key]) > 1) or None for pair in keys]


def _other_settings(record: dict[str, Any]) -> str | None:
    config = record["config"]
    shown = [describe_other_settings(record), f"num_workers {config['num_workers']}"]
    if config["data_format"] != "synthetic":
        shown.append(f"data_format {config['data_format']}")
    if record["ranks"]["num_nodes"] > 1:
        shown.append(f"num_nodes {record['ranks']['num_nodes']}")
    return ", ".join(filter(None, shown))


def _measured_row(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The runs of one configuration as a row: its settings, and figures over the runs."""
    first = records[0]
    dates = sorted({record["started_utc"][:10] for record in records})
    commits = sorted({(record["git"]["commit"] or "unknown")[:7] for record in records})
    return {
        **make_row(first),
        "device": describe_device(first),
        "other_settings": _other_settings(first),
        "rates": rates_cell(records),
        "images_per_second_per_device": summary_cell(records, "images_per_second_per_device"),
        "num_runs": len(records),
        "step_time_p50_s": summary_cell(records, "step_time_p50_s"),
        "peak_memory_gib": peak_memory_cell(records),
        "mfu_percent": summary_cell(records, "mfu_percent", num_digits=3),
        "mfu_of_matmul_percent": median_cell(
            (mfu_of_matmul(record["summary"]) for record in records), num_digits=3
        ),
        "power_w": median_cell(
            (record["summary"]["gpu"] or {}).get("power_w") for record in records
        ),
        "notes": notes_cell(records),
        "source": f"{' and '.join(dates)}, code {' and '.join(commits)}",
        "run ids": name_runs([record["run_id"] for record in records]),
        "command": shlex.join(first["command"]),
    }


def _figure_row(figure: dict[str, Any]) -> dict[str, Any]:
    rate, num_devices = figure["images_per_second"], figure.get("num_gpus")
    text = format_number(rate, num_digits=6)
    low, high = figure.get("images_per_second_low"), figure.get("images_per_second_high")
    if low is not None and high is not None:
        text += f" ({format_number(low)} to {format_number(high)})"
    num_workers = figure.get("num_workers")
    return {
        **figure,
        "device": device_of(figure),
        "num_devices": num_devices,
        "other_settings": None if num_workers is None else f"num_workers {num_workers}",
        "rates": Cell(text, rate),
        "images_per_second_per_device": rate / num_devices if num_devices else None,
        "notes": figure.get("reason"),
        "source": describe_source(figure),
    }
