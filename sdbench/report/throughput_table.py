"""Tables of training throughput: measured, quoted and modelled figures.

One table per resolution and place of the encoders: a step with the encoders in it is about 1.5
times the work of one on latents, and an image of 512 px four times that of 256. Measured rows come
first, then quoted, then modelled ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from sdbench.record.configuration import as_key, describe_other_settings, group, settings_of
from sdbench.report.tables import Cell, Table, make_cell, make_table, median_cell
from sdbench.report.terminal import FLAG_MEANINGS, format_number, format_rates

LATENTS_IN_WORDS = {
    "online": "the encoders run in the step (online)",
    "precomputed": "latents and text embeddings made beforehand (precomputed)",
    "moments": "VAE moments made beforehand, text encoder in the step (moments)",
}


def make_tables(
    records: Iterable[dict[str, Any]], figures: Iterable[dict[str, Any]] = ()
) -> list[Table]:
    """Sort measured, quoted and modelled figures into tables.

    The runs of one configuration are one row: three or more have a between-runs interval, fewer
    have the within-run interval of each run.

    Args:
        records: Records of training runs with the status ok.
        figures: Rows of quoted and modelled tables, with their kind.

    Returns:
        One table per resolution and place of the encoders; those with measured rows come first.
    """
    rows: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    groups = group_runs(records)
    scalings = describe_scalings([runs[0] for runs in groups])
    for runs, scaling in zip(groups, scalings, strict=True):
        config = runs[0]["config"]
        row = _measured_row(runs, scaling=scaling)
        rows.setdefault((config["image_size"], config["latents"]), []).append(row)
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


def describe_work(*, image_size: int | None, latents: str | None) -> str:
    """The resolution and the place of the encoders in words."""
    size = "resolution not told" if image_size is None else f"{image_size} px"
    place = "place of the encoders not told" if latents is None else latents
    return f"{size}, {LATENTS_IN_WORDS.get(place, place)}"


def group_runs(records: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group runs by configuration, in the order in which each configuration first occurs."""
    return list(group(records, key_of=lambda record: as_key(settings_of(record))).values())


def describe_scalings(records: Sequence[dict[str, Any]]) -> list[str | None]:
    """The kind of scaling that configurations show, which differ in the number of devices only.

    Args:
        records: One of each configuration.

    Returns:
        For each: ``strong`` if others have the same global batch, ``weak`` if others have the same
        batch per device, both in a grid, and None if it stands alone.
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


def describe_notes(records: Sequence[dict[str, Any]]) -> str | None:
    """Flags of the runs and uncommitted changes of their code, in words; None without any."""
    flags = [flag for record in records for flag in record["summary"].get("flags", ())]
    # A flag of another version of the suite speaks for itself.
    notes = [f"{flag}: {FLAG_MEANINGS.get(flag, flag)}" for flag in dict.fromkeys(flags)]
    if any(record["git"]["dirty"] for record in records):
        notes.append("the code had uncommitted changes")
    return "; ".join(notes) or None


def describe_device(record: dict[str, Any]) -> str:
    """The device that trained; for a CPU with its number of cores."""
    machine = record["machine"]
    cores = f", {machine['num_cpu_cores']} cores" if machine["device_type"] == "cpu" else ""
    return f"{machine['device_name']}{cores}"


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
    summaries = [record["summary"] for record in records]
    rates = [summary["images_per_second"] for summary in summaries]
    peak_memory_gib = max(summary["peak_memory_gib"] for summary in summaries)
    settings = {
        "model": first["workload"]["architecture"],
        "px": config["image_size"],
        "preset": config["preset"],
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
        "images/s (95 % interval)": Cell(format_rates(summaries), statistics.median(rates)),
        "images/s per device": median_cell(
            summary["images_per_second_per_device"] for summary in summaries
        ),
        **{name: make_cell(value, unknown="") for name, value in settings.items()},
        "step p50, s": median_cell(summary["step_time_p50_s"] for summary in summaries),
        "peak memory, GiB": Cell(f"{peak_memory_gib:.1f}", peak_memory_gib),
        "MFU, %": median_cell((summary["mfu_percent"] for summary in summaries), num_digits=3),
        "MFU of measured matmul, %": median_cell(
            (summary.get("mfu_of_matmul_percent") for summary in summaries), num_digits=3
        ),
        "power, W": median_cell((summary.get("gpu") or {}).get("power_w") for summary in summaries),
        "notes": make_cell(describe_notes(records), unknown=""),
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
    source = (figure.get(name) for name in ("source", "submitter", "read_from"))
    return {
        "kind": figure["kind"],
        "device": figure.get("gpu") or figure.get("device"),
        "devices": num_devices,
        "runs": None,
        "images/s (95 % interval)": Cell(text, rate),
        "images/s per device": rate / num_devices if num_devices else None,
        "model": figure.get("model"),
        "px": figure.get("image_size"),
        "preset": figure.get("preset"),
        "precision": figure.get("precision"),
        "EMA": figure.get("ema"),
        "global batch": figure.get("global_batch"),
        "micro-batch": figure.get("micro_batch"),
        "scaling": make_cell(None, unknown=""),
        "other settings": make_cell(other_settings, unknown=""),
        "step p50, s": figure.get("step_time_p50_s"),
        "peak memory, GiB": figure.get("peak_memory_gib"),
        "MFU, %": figure.get("mfu_percent"),
        "MFU of measured matmul, %": figure.get("mfu_of_matmul_percent"),
        "power, W": figure.get("power_w"),
        "notes": make_cell(figure.get("reason"), unknown=""),
        "source": ", ".join(str(part) for part in source if part is not None) or None,
    }
