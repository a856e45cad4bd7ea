"""Tables of training throughput: the best of each machine, all measured, and those of others.

Each resolution and place of the encoders has a table of its own: a step with the encoders in it is
about 1.5 times the work of a step on latents, and an image of 512 px four times that of one of 256.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sdbench.record.configuration import (
    as_key,
    describe_model,
    describe_other_settings,
    group,
    place_of_encoders,
    settings_of,
)
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
from sdbench.report.tables import (
    EMPTY,
    ORIGIN,
    Cell,
    Table,
    make_table,
    median_cell,
    optional_cell,
)
from sdbench.report.terminal import format_number
from sdbench.statistics.intervals import between_runs_interval

# Settings of a row, which its name tells where they differ.
SETTINGS = (
    *("model", "px", "preset", "engine", "precision", "EMA", "global batch", "micro-batch"),
    "other settings",
)


def make_tables(records: Iterable[dict[str, Any]]) -> list[Table]:
    """Make the tables of measured throughput.

    The runs of one configuration are one row, with a between-runs interval of three or more runs,
    or the within-run interval of each of fewer.

    Args:
        records: Records of training runs with the status ok.

    Returns:
        One table for each resolution and place of the encoders.
    """
    groups = group_runs(records)
    scalings = describe_scalings([runs[0] for runs in groups])
    works = group(zip(groups, scalings, strict=True), key_of=lambda item: _work_of(item[0][0]))
    rows = {}
    for work, items in works.items():
        names = _name_apart([runs[0] for runs, _ in items])
        rows[work] = [
            _measured_row(runs, name=name, scaling=scaling)
            for (runs, scaling), name in zip(items, names, strict=True)
        ]
    return _make_work_tables(rows, extra=(*SETTINGS, *ORIGIN))


def _name_apart(records: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each configuration of a table; the only one is named in full."""
    if len(records) == 1:
        return [f"{describe_model(records[0])}, {describe_configuration(records[0])}"]
    return tell_apart(records, without=["device"])[1]


def _work_of(record: dict[str, Any]) -> tuple[int, str]:
    return record["config"]["image_size"], place_of_encoders(record["config"])


def make_figure_tables(figures: Iterable[dict[str, Any]], *, name: str) -> list[Table]:
    """Make tables of quoted and modelled throughput, one for each kind of work.

    Args:
        figures: Rows with images/s and their kind.
        name: Beginning of the tables' names.
    """
    groups = group(figures, key_of=lambda row: (row.get("image_size"), row.get("latents")))
    return _make_work_tables(
        {work: list(map(_figure_row, rows)) for work, rows in groups.items()}, name=f"{name}-"
    )


def _make_work_tables(
    rows: Mapping[tuple[Any, Any], Sequence[dict[str, Any]]],
    *,
    name: str = "",
    extra: Sequence[str] = (),
) -> list[Table]:
    return [
        make_table(
            of_work,
            name=f"{name}{image_size}px-{latents}",
            caption=describe_work(image_size=image_size, latents=latents),
            extra=extra,
        ).without_empty_columns()
        for (image_size, latents), of_work in rows.items()
    ]


def make_headline_table(records: Iterable[dict[str, Any]]) -> Table:
    """Make the table of the best configuration of each machine, model and kind of work.

    The best is the one whose 95 % interval begins highest, so that a figure that is hardly known
    does not stand for a machine. GPUs come first, and of a machine the model with the most trained
    parameters.

    Args:
        records: Records of training runs with the status ok.
    """
    tracks = group(group_runs(records), key_of=lambda runs: _track_of(runs[0]))
    machines = list(dict.fromkeys(track.machine for track in tracks))

    def place(track: _Track) -> tuple[bool, int, int]:
        trained = tracks[track][0][0]["workload"]["num_trainable_parameters"]
        return not track.on_gpu, machines.index(track.machine), -trained

    rows = [
        _headline_row(max(tracks[track], key=_lowest_rate), num_configurations=len(tracks[track]))
        for track in sorted(tracks, key=place)
    ]
    caption = "The best published configuration of each machine, model and kind of work"
    return make_table(
        rows, name="headlines", caption=caption, left=["notes"], extra=ORIGIN
    ).without_empty_columns()


class _Track(NamedTuple):
    """What a machine did: so many GPUs, or the CPUs of so many nodes, with any number of ranks."""

    on_gpu: bool
    machine: str
    model: str
    image_size: int
    latents: str


def _track_of(record: dict[str, Any]) -> _Track:
    on_gpu = record["machine"]["device_type"] != "cpu"
    number = record["ranks"]["world_size" if on_gpu else "num_nodes"]
    return _Track(
        on_gpu,
        f"{number} x {describe_device(record)}",
        describe_model(record),
        record["config"]["image_size"],
        place_of_encoders(record["config"]),
    )


def _lowest_rate(runs: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Where the interval of a configuration begins, 0 without one, and its median rate."""
    rates = [run["summary"]["images_per_second"] for run in runs]
    between = between_runs_interval(rates)
    if between is not None:
        return between.low, statistics.median(rates)
    within = [run["summary"]["images_per_second_interval"] for run in runs]
    lows = [0.0 if interval is None else interval["low"] for interval in within]
    return min(lows), statistics.median(rates)


def _headline_row(runs: Sequence[dict[str, Any]], *, num_configurations: int) -> dict[str, Any]:
    track, figures = _track_of(runs[0]), _figures_of(runs)
    return {
        "machine": track.machine,
        "work": f"{track.model}, {track.image_size} px, {track.latents}",
        "images/s (95 % interval)": rates_cell(runs),
        "runs": len(runs),
        **{name: cell for name, cell in figures.items() if name.startswith(("MFU", "power"))},
        "configuration": describe_configuration(runs[0]),
        "best of": num_configurations,
        "notes": notes_cell(runs),
        "source": _source_of(runs),
        **_extra_cells(runs),
    }


def describe_scalings(records: Sequence[dict[str, Any]]) -> list[str | None]:
    """Find the configurations that together show strong or weak scaling.

    Args:
        records: One record of each configuration.

    Returns:
        For each: ``strong`` if others have the same global batch on another number of devices,
        ``weak`` if others have the same batch per device, both joined by a comma, or None.
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


def _measured_row(
    records: Sequence[dict[str, Any]], *, name: str, scaling: str | None
) -> dict[str, Any]:
    first, config = records[0], records[0]["config"]
    settings = (
        describe_model(first),
        config["image_size"],
        config["preset"],
        config["engine"],
        config["precision"],
        config["use_ema"],
        config["batch_size"],
        config["device_train_microbatch_size"],
        _other_settings(first),
    )
    return {
        "kind": "measured",
        "device": describe_device(first),
        "devices": first["ranks"]["world_size"],
        "configuration": name,
        "images/s (95 % interval)": rates_cell(records),
        "images/s per device": summary_cell(records, "images_per_second_per_device"),
        "runs": len(records),
        **dict(zip(SETTINGS, map(optional_cell, settings), strict=True)),
        "scaling": optional_cell(scaling),
        **_figures_of(records),
        "notes": notes_cell(records),
        "source": _source_of(records),
        **_extra_cells(records),
    }


def _figures_of(records: Sequence[dict[str, Any]]) -> dict[str, Cell]:
    """What was measured beside the rate."""
    return {
        "step p50, s": summary_cell(records, "step_time_p50_s"),
        "peak memory, GiB": peak_memory_cell(records),
        "MFU, %": summary_cell(records, "mfu_percent", num_digits=3),
        "MFU of measured matmul, %": summary_cell(records, "mfu_of_matmul_percent", num_digits=3),
        "power, W": median_cell(
            (record["summary"].get("gpu") or {}).get("power_w") for record in records
        ),
    }


def _extra_cells(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What a page alone can show: the names of the runs, and the command of the first."""
    return {
        "run ids": name_runs([record["run_id"] for record in records]),
        "command": shlex.join(records[0]["command"]),
    }


def _source_of(records: Sequence[dict[str, Any]]) -> str:
    """The dates of the runs and the commits of their code."""
    dates = sorted({record["started_utc"][:10] for record in records})
    commits = sorted({(record["git"]["commit"] or "unknown")[:7] for record in records})
    return f"{' and '.join(dates)}, code {' and '.join(commits)}"


def _figure_row(figure: dict[str, Any]) -> dict[str, Any]:
    rate, num_devices = figure["images_per_second"], figure.get("num_gpus")
    text = format_number(rate, num_digits=6)
    low, high = figure.get("images_per_second_low"), figure.get("images_per_second_high")
    if low is not None and high is not None:
        text += f" ({format_number(low)} to {format_number(high)})"
    num_workers = figure.get("num_workers")
    other_settings = None if num_workers is None else f"num_workers {num_workers}"
    return {
        "kind": figure["kind"],
        "device": device_of(figure),
        "devices": num_devices,
        "preset": figure.get("preset"),
        "other settings": optional_cell(other_settings),
        "images/s (95 % interval)": Cell(text, rate),
        "images/s per device": rate / num_devices if num_devices else None,
        "model": figure.get("model"),
        "px": figure.get("image_size"),
        "engine": figure.get("engine"),
        "precision": figure.get("precision"),
        "EMA": figure.get("ema"),
        "global batch": figure.get("global_batch"),
        "micro-batch": figure.get("micro_batch"),
        "scaling": EMPTY,
        "step p50, s": figure.get("step_time_p50_s"),
        "peak memory, GiB": figure.get("peak_memory_gib"),
        "MFU, %": figure.get("mfu_percent"),
        "MFU of measured matmul, %": figure.get("mfu_of_matmul_percent"),
        "power, W": figure.get("power_w"),
        "notes": optional_cell(figure.get("reason")),
        "source": describe_source(figure),
    }
