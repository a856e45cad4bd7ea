"""How fast did training go, here and according to others?

One table per resolution and place of the encoders: a step with the encoders in it is about 1.5
times the work of one on latents, and a picture of 512 px four times that of 256, so that figures of
the two never stand in one table. Within a table, measured rows come first, then quoted, then
modelled ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from sdbench.record.configuration import describe_other_settings, settings_of
from sdbench.report.tables import Cell, Column, Table, make_cell, median_cell
from sdbench.report.terminal import FLAG_MEANINGS, format_number, format_rates

LATENTS_IN_WORDS = {
    "online": "the encoders run in the step (online)",
    "precomputed": "latents and text embeddings made beforehand (precomputed)",
    "moments": "VAE moments made beforehand, text encoder in the step (moments)",
}
COLUMNS = (
    Column("kind"),
    Column("device"),
    Column("devices", is_number=True),
    Column("runs", is_number=True),
    Column("images/s (95 % interval)", is_number=True),
    Column("images/s per device", is_number=True),
    Column("model"),
    Column("px", is_number=True),
    Column("preset"),
    Column("precision"),
    Column("EMA"),
    Column("global batch", is_number=True),
    Column("micro-batch", is_number=True),
    Column("scaling"),
    Column("other settings"),
    Column("step p50, s", is_number=True),
    Column("peak memory, GiB", is_number=True),
    Column("MFU, %", is_number=True),
    Column("MFU of measured matmul, %", is_number=True),
    Column("power, W", is_number=True),
    Column("notes"),
    Column("source"),
)


def make_tables(
    records: Iterable[dict[str, Any]], figures: Iterable[dict[str, Any]] = ()
) -> list[Table]:
    """Sort measured, quoted and modelled figures into tables.

    Runs of one configuration become one row: three or more have a between-runs interval, fewer the
    within-run one of each run.

    Args:
        records: Records of training runs with the status ok.
        figures: Rows of quoted and modelled tables, with their kind.

    Returns:
        One table per resolution and place of the encoders; those with measured rows come first.
    """
    rows: dict[tuple[Any, Any], list[list[Cell]]] = {}
    groups = group_runs(records)
    scalings = describe_scalings([runs[0] for runs in groups])
    for runs, scaling in zip(groups, scalings, strict=True):
        config = runs[0]["config"]
        cells = _measured_row(runs, scaling=scaling)
        rows.setdefault((config["image_size"], config["latents"]), []).append(cells)
    for figure in figures:
        if figure.get("images_per_second") is not None:
            key = (figure.get("image_size"), figure.get("latents"))
            rows.setdefault(key, []).append(_figure_row(figure))
    return [
        Table(
            name=f"{image_size}px-{latents}",
            caption=describe_work(image_size=image_size, latents=latents),
            columns=COLUMNS,
            rows=cells,
        ).without_empty_columns()
        for (image_size, latents), cells in rows.items()
    ]


def describe_work(*, image_size: int | None, latents: str | None) -> str:
    """What a step does, in words."""
    size = "resolution not told" if image_size is None else f"{image_size} px"
    place = "place of the encoders not told" if latents is None else latents
    return f"{size}, {LATENTS_IN_WORDS.get(place, place)}"


def group_runs(records: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Runs of one configuration together, in the order in which each was first seen."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(sorted(settings_of(record).items())), []).append(record)
    return list(groups.values())


def describe_scalings(records: Sequence[dict[str, Any]]) -> list[str | None]:
    """What a configuration shows together with those that differ from it in the number of devices.

    Args:
        records: One of each configuration.

    Returns:
        For each: ``strong`` if the others share the same global batch, ``weak`` if each of their
        devices has as many images in a step, both in a grid, and None if it stands alone.
    """
    sized = ("num_devices", "num_nodes", "batch_size")
    series: dict[tuple[Any, ...], set[int]] = {}
    keys = []
    for record in records:
        settings = settings_of(record)
        alike = tuple(sorted((key, settings[key]) for key in settings.keys() - set(sized)))
        num_devices, global_batch = settings["num_devices"], settings["batch_size"]
        strong = ("strong", global_batch, *alike)
        weak = ("weak", global_batch / num_devices, *alike)
        keys.append((strong, weak))
        for key in (strong, weak):
            series.setdefault(key, set()).add(num_devices)
    return [", ".join(key[0] for key in pair if len(series[key]) > 1) or None for pair in keys]


def describe_notes(records: Sequence[dict[str, Any]]) -> str | None:
    """What a reader must know before trusting these runs, in words."""
    flags = [flag for record in records for flag in record["summary"].get("flags", ())]
    # A flag of another version of the suite speaks for itself.
    notes = [f"{flag}: {FLAG_MEANINGS.get(flag, flag)}" for flag in dict.fromkeys(flags)]
    if any(record["git"]["dirty"] for record in records):
        notes.append("the code had uncommitted changes")
    return "; ".join(notes) or None


def _shown_settings(record: dict[str, Any]) -> tuple[Any, ...]:
    """What the columns show of a configuration, in their order."""
    config = record["config"]
    return (
        describe_device(record),
        record["ranks"]["world_size"],
        record["workload"]["architecture"],
        config["image_size"],
        config["preset"],
        config["precision"],
        config["use_ema"],
        config["batch_size"],
        config["device_train_microbatch_size"],
    )


def describe_device(record: dict[str, Any]) -> str:
    """The device that trained; a CPU's name alone does not say how many cores of it."""
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


def _measured_row(records: Sequence[dict[str, Any]], *, scaling: str | None) -> list[Cell]:
    summaries = [record["summary"] for record in records]
    rates = [summary["images_per_second"] for summary in summaries]
    peak_memory_gib = max(summary["peak_memory_gib"] for summary in summaries)
    device, num_devices, *work = _shown_settings(records[0])
    return [
        make_cell("measured"),
        make_cell(device),
        make_cell(num_devices),
        make_cell(len(records)),
        Cell(format_rates(summaries), statistics.median(rates)),
        median_cell(summary["images_per_second_per_device"] for summary in summaries),
        *(make_cell(value, unknown="") for value in (*work, scaling, _other_settings(records[0]))),
        median_cell(summary["step_time_p50_s"] for summary in summaries),
        Cell(f"{peak_memory_gib:.1f}", peak_memory_gib),
        median_cell((summary["mfu_percent"] for summary in summaries), num_digits=3),
        median_cell((summary.get("mfu_of_matmul_percent") for summary in summaries), num_digits=3),
        median_cell((summary.get("gpu") or {}).get("power_w") for summary in summaries),
        make_cell(describe_notes(records), unknown=""),
        make_cell(_source_of(records)),
    ]


def _source_of(records: Sequence[dict[str, Any]]) -> str:
    """When the runs began, and the commit of the code."""
    dates = sorted({record["started_utc"][:10] for record in records})
    commits = sorted({(record["git"]["commit"] or "unknown")[:7] for record in records})
    return f"{' and '.join(dates)}, code {' and '.join(commits)}"


def _figure_row(figure: dict[str, Any]) -> list[Cell]:
    rate, num_devices = figure["images_per_second"], figure.get("num_gpus")
    text = format_number(rate, num_digits=6)
    low, high = figure.get("images_per_second_low"), figure.get("images_per_second_high")
    if low is not None and high is not None:
        text += f" ({format_number(low)} to {format_number(high)})"
    num_workers = figure.get("num_workers")
    source = (figure.get(name) for name in ("source", "submitter", "read_from"))
    return [
        make_cell(figure["kind"]),
        make_cell(figure.get("gpu") or figure.get("device")),
        make_cell(num_devices),
        make_cell(None),
        Cell(text, rate),
        make_cell(rate / num_devices if num_devices else None),
        make_cell(figure.get("model")),
        make_cell(figure.get("image_size")),
        make_cell(figure.get("preset")),
        make_cell(figure.get("precision")),
        make_cell(figure.get("ema")),
        make_cell(figure.get("global_batch")),
        make_cell(figure.get("micro_batch")),
        make_cell(None, unknown=""),
        make_cell(None if num_workers is None else f"num_workers {num_workers}", unknown=""),
        make_cell(figure.get("step_time_p50_s")),
        make_cell(figure.get("peak_memory_gib")),
        make_cell(figure.get("mfu_percent")),
        make_cell(figure.get("mfu_of_matmul_percent")),
        make_cell(figure.get("power_w")),
        make_cell(figure.get("reason"), unknown=""),
        make_cell(", ".join(str(part) for part in source if part is not None) or None),
    ]
