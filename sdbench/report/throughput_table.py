"""Tables of training throughput, with measured, quoted and modelled rows in this order.

Each resolution and place of the encoders has a table of its own: a step with the encoders in it is
about 1.5 times the work of a step on latents, and an image of 512 px four times that of one of 256.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sdbench.record.configuration import (
    as_key,
    describe_model,
    describe_other_settings,
    place_of_encoders,
    settings_of,
)
from sdbench.report.figures import describe_source, device_of
from sdbench.report.runs import (
    describe_device,
    describe_work,
    group_runs,
    notes_cell,
    peak_memory_cell,
    rates_cell,
    summary_cell,
)
from sdbench.report.tables import EMPTY, Cell, Table, make_table, median_cell, optional_cell
from sdbench.report.terminal import format_number


def make_tables(
    records: Iterable[dict[str, Any]], figures: Iterable[dict[str, Any]] = ()
) -> list[Table]:
    """Make the tables of throughput.

    The runs of one configuration are one row, with a between-runs interval of three or more runs,
    or the within-run interval of each of fewer.

    Args:
        records: Records of training runs with the status ok.
        figures: Rows of quoted and modelled tables, with their kind.

    Returns:
        One table for each resolution and place of the encoders, those with measured rows first.
    """
    rows: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    groups = group_runs(records)
    scalings = describe_scalings([runs[0] for runs in groups])
    for runs, scaling in zip(groups, scalings, strict=True):
        config = runs[0]["config"]
        row = _measured_row(runs, scaling=scaling)
        rows.setdefault((config["image_size"], place_of_encoders(config)), []).append(row)
    for figure in figures:
        if figure.get("images_per_second") is not None:
            key = (figure.get("image_size"), figure.get("latents"))
            rows.setdefault(key, []).append(_figure_row(figure))
    return [
        make_table(
            of_work,
            name=f"{image_size}px-{latents}",
            caption=describe_work(image_size=image_size, latents=latents),
        ).without_empty_columns()
        for (image_size, latents), of_work in rows.items()
    ]


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


def _measured_row(records: Sequence[dict[str, Any]], *, scaling: str | None) -> dict[str, Any]:
    first, config = records[0], records[0]["config"]
    settings = {
        "model": describe_model(first),
        "px": config["image_size"],
        "preset": config["preset"],
        "engine": config["engine"],
        "precision": config["precision"],
        "EMA": config["use_ema"],
        "global batch": config["batch_size"],
        "micro-batch": config["device_train_microbatch_size"],
        "scaling": scaling,
        "other settings": _other_settings(first),
    }
    return {
        "kind": "measured",
        "device": describe_device(first),
        "devices": first["ranks"]["world_size"],
        "runs": len(records),
        "images/s (95 % interval)": rates_cell(records),
        "images/s per device": summary_cell(records, "images_per_second_per_device"),
        **{name: optional_cell(value) for name, value in settings.items()},
        "step p50, s": summary_cell(records, "step_time_p50_s"),
        "peak memory, GiB": peak_memory_cell(records),
        "MFU, %": summary_cell(records, "mfu_percent", num_digits=3),
        "MFU of measured matmul, %": summary_cell(records, "mfu_of_matmul_percent", num_digits=3),
        "power, W": median_cell(
            (record["summary"].get("gpu") or {}).get("power_w") for record in records
        ),
        "notes": notes_cell(records),
        "source": _source_of(records),
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
        "images/s (95 % interval)": Cell(text, rate),
        "images/s per device": rate / num_devices if num_devices else None,
        "model": figure.get("model"),
        "px": figure.get("image_size"),
        "preset": figure.get("preset"),
        "engine": figure.get("engine"),
        "precision": figure.get("precision"),
        "EMA": figure.get("ema"),
        "global batch": figure.get("global_batch"),
        "micro-batch": figure.get("micro_batch"),
        "scaling": EMPTY,
        "other settings": optional_cell(other_settings),
        "step p50, s": figure.get("step_time_p50_s"),
        "peak memory, GiB": figure.get("peak_memory_gib"),
        "MFU, %": figure.get("mfu_percent"),
        "MFU of measured matmul, %": figure.get("mfu_of_matmul_percent"),
        "power, W": figure.get("power_w"),
        "notes": optional_cell(figure.get("reason")),
        "source": describe_source(figure),
    }
