"""Printed results, CSV rows and a table of runs that load or encode data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sdbench.base.units import counted
from sdbench.record.configuration import group, hash_of_data
from sdbench.record.row import PHASES, make_feed_row
from sdbench.record.store import OK, kind_of
from sdbench.report.runs import rates_cell, summary_cell
from sdbench.report.tables import Cell, Field, Table, median_cell, tabulate
from sdbench.report.terminal import NOT_KNOWN, align, format_number, format_rate
from sdbench.settings.data import PRECOMPUTED

# Kinds of actors of Ray Data.
STAGES = ("decoder", "encoder")
NOT_APPLICABLE = "-"


def format_feed(record: dict[str, Any]) -> str:
    """Format the result of a data.py run that ended well, as lines of name and value."""
    config, summary = record["config"], record["summary"]
    stages, target = summary.get("ray"), config["target_images_per_second"]
    megabytes, split_ms = summary["megabytes_per_second"], summary["ms_per_image"]
    kilobytes_per_image = 1000 * megabytes / summary["images_per_second"]
    parts = ", ".join(f"{phase} {split_ms[phase]:.3g}" for phase in PHASES)
    samples = "{num_images} delivered, {num_bad_samples} bad; {num_dropped_samples} of the data set"
    if config["emulate_step_seconds"]:
        rows = [("images/s of the trainer", format_rate(summary))]
        rows.append(("it waits for data", _describe_wait(record)))
    else:
        rows = [("images/s", format_rate(summary))]
        if not stages:
            rows.append(("images/s per process", _describe_processes(record)))
    if stages:
        rows += [(f"images/s of each {one}", _describe_stage(stages, one)) for one in STAGES]
    rows += [
        (
            "read from storage",
            f"{format_number(megabytes)} MB/s, {format_number(kilobytes_per_image)} kB per image",
        ),
        ("time per image", f"{sum(split_ms.values()):.3g} ms of a process: {parts}"),
        ("samples", f"{samples.format_map(summary)} are left out"),
    ]
    if stages and (target := stages["target_images_per_second"]) is not None:
        rows.append((f"{target:.4g} images/s?", _needed(stages)))
    elif target is not None:
        rows.append((f"{target:g} images/s?", _answer(record)))
    if stages and stages["num_failed_blocks"]:
        rows.append(("failed batches", str(stages["num_failed_blocks"])))
    return align(rows)


def _describe_processes(record: dict[str, Any]) -> str:
    """Images/s of a loading process, with the numbers of processes and CPU cores."""
    num_workers, num_cores = record["config"]["num_workers"], record["machine"]["num_cpu_cores"]
    who = counted(num_workers, "worker") if num_workers else "the trainer's own, without workers"
    rate = format_number(record["summary"]["images_per_second_per_process"])
    return f"{rate} ({who}; {counted(num_cores, 'CPU core')})"


def _describe_wait(record: dict[str, Any]) -> str:
    """The share of the time in which the emulated trainer waited, and seconds per batch."""
    summary = record["summary"]
    waited_s = summary["data_wait_percent"] / 100 * summary["window_s"]
    return (
        f"{summary['data_wait_percent']:.1f} % of the time: "
        f"{waited_s / summary['num_measured_steps']:.3g} s for each batch, beside steps of "
        f"{record['config']['emulate_step_seconds']:g} s"
    )


def _answer(record: dict[str, Any]) -> str:
    """Whether the source reaches the target, and how many workers that takes."""
    summary, target = record["summary"], record["config"]["target_images_per_second"]
    interval = summary["images_per_second_interval"]
    verdict = "yes" if summary["images_per_second"] >= target else "no"
    if interval and interval["low"] <= target <= (interval["high"] or target):
        verdict += ", but so close that another run may say otherwise"
    num_needed, num_cores = summary["num_workers_for_target"], record["machine"]["num_cpu_cores"]
    rate_of_each = format_number(summary["images_per_second_per_core"])
    return (
        f"{verdict}. It takes {counted(num_needed, 'worker')} of {rate_of_each} images/s, if each "
        f"has a CPU core of its own; this machine has "
        f"{num_cores if num_needed <= num_cores else f'only {num_cores}'}"
    )


def _describe_stage(stages: dict[str, Any], worker: str) -> str:
    """Images/s of one actor while it works, with the number of them."""
    name = f"images_per_second_per_{worker}"
    figures = {"images_per_second": stages[name]}
    figures["images_per_second_interval"] = stages[f"{name}_interval"]
    rate = NOT_KNOWN if stages[name] is None else f"{format_rate(figures)} while it is busy"
    return f"{rate}, {counted(stages[f'num_{worker}s'], worker)}"


def _needed(stages: dict[str, Any]) -> str:
    """How many actors reach the target."""
    numbers = {one: stages[f"num_{one}s_for_target"] for one in STAGES}
    if None in numbers.values():
        return "not known: too little was prepared in the window"
    needed = " and ".join(counted(number, one) for one, number in numbers.items())
    return f"it takes {needed}, if each has a core or a GPU of its own"


def make_data_table(records: Iterable[dict[str, Any]]) -> Table:
    """The table with a row for each configuration of the runs that ended well."""
    ended_well = [record for record in records if record["status"] == OK]
    groups = group(ended_well, key_of=lambda record: tuple(_configuration_of(record).items()))
    rows = [{**dict(settings), "of": runs} for settings, runs in groups.items()]
    settings = [name for name in (rows[0] if rows else ()) if name != "of"]
    fields = [Field(name, name, unknown=NOT_APPLICABLE) for name in settings]
    return tabulate([*fields, *FIGURES], rows, name="data", caption="Loading and encoding data")


def _configuration_of(record: dict[str, Any]) -> dict[str, Any]:
    """The device, data and settings that replicates of kind feed or precompute share."""
    row = make_feed_row(record)
    return {
        "device": row["device"],
        "cores": row["num_cpu_cores"],
        "job": _name_job(record),
        "data": ", ".join(filter(None, (row["data"], *hash_of_data(record).values()))) or None,
        "format": row["data_format"],
        # The samples that are read: encoding a data set reads images.
        "samples": _describe_samples(record["config"]),
        "px": row["image_size"],
        "batch": row["batch_size"],
        "workers": row["num_workers"],
        "step, s": row["emulate_step_seconds"],
    }


def _describe_samples(config: dict[str, Any]) -> str:
    samples = "latents" if config["latents"] == PRECOMPUTED else "images"
    buckets = config["buckets"]
    return samples if buckets is None else f"{samples} in buckets {buckets}"


def _name_job(record: dict[str, Any]) -> str:
    """The kind of the record, with its actors if Ray ran them."""
    stages = (record["summary"] or {}).get("ray")
    if not stages:
        return kind_of(record)
    actors = ", ".join(counted(stages[f"num_{one}s"], one) for one in ("trainer", *STAGES))
    return f"{kind_of(record)}, {actors}"


def _median(runs: Iterable[dict[str, Any]], name: str) -> Cell:
    return summary_cell(runs, name, num_digits=3, unknown=NOT_APPLICABLE)


def _phases_cell(row: dict[str, Any]) -> Cell:
    """The medians of the phases, sorted by their sum."""
    splits = [run["summary"].get("ms_per_image") or {} for run in row["of"]]
    medians = [
        median_cell((split.get(phase) for split in splits), num_digits=3) for phase in PHASES
    ]
    if medians[0].value is None:
        return Cell(NOT_APPLICABLE, None)
    return Cell(", ".join(cell.text for cell in medians), sum(cell.value for cell in medians))


def _wait_cell(row: dict[str, Any]) -> Cell:
    wait = _median(row["of"], "data_wait_percent")
    return wait if wait.value is None else Cell(f"{wait.text} %", wait.value)


FIGURES = (
    Field("runs", lambda row: len(row["of"])),
    Field("images/s (95 % interval)", lambda row: rates_cell(row["of"]), is_left=True),
    Field("images/s per core", lambda row: _median(row["of"], "images_per_second_per_core")),
    Field("MB/s", lambda row: _median(row["of"], "megabytes_per_second")),
    Field(f"ms per image: {', '.join(PHASES)}", _phases_cell, is_left=True),
    Field("trainer waits", _wait_cell),
)
