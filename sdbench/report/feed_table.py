"""What did loading data come to: for a person, as rows of a table?

For runs of data.py (how fast a source feeds a trainer) and for those that encode a data set
beforehand (how fast that went).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from sdbench.measure.record import FEED, kind_of
from sdbench.report.terminal import format_number, format_rate, format_rates

PHASES = ("read", "decode", "transform", "tokenize", "collate")
NOT_APPLICABLE = "-"
COLUMNS = (
    "source",
    "kind",
    "job",
    "device",
    "num_cpu_cores",
    "data_format",
    "data",
    "latents",
    "image_size",
    "batch_size",
    "num_workers",
    "images_per_second",
    "images_per_second_low",
    "images_per_second_high",
    "images_per_second_per_core",
    "megabytes_per_second",
    *(f"{phase}_ms_per_image" for phase in PHASES),
    "emulate_step_seconds",
    "data_wait_percent",
    "num_measured_steps",
    "num_images",
    "num_bad_samples",
    "num_dropped_samples",
    "status",
    "started_utc",
    "git_commit",
    "reason",
)


def format_feed(record: dict[str, Any]) -> str:
    """What a person reads when data.py has ended.

    Args:
        record: A record of kind feed with the status ok.

    Returns:
        Lines of name and value, and the answer to --target_images_per_second.
    """
    config, summary = record["config"], record["summary"]
    kilobytes_per_image = 1000 * summary["megabytes_per_second"] / summary["images_per_second"]
    split_ms = summary["ms_per_image"]
    if config["emulate_step_seconds"]:
        rows = [("images/s of the trainer", format_rate(summary))]
        rows.append(("it waits for data", _describe_wait(record)))
    else:
        rows = [("images/s", format_rate(summary))]
        rows.append(("images/s per process", _describe_processes(record)))
    rows += [
        (
            "read from storage",
            f"{format_number(summary['megabytes_per_second'])} MB/s, "
            f"{format_number(kilobytes_per_image)} kB per image",
        ),
        (
            "time per image",
            f"{sum(split_ms.values()):.3g} ms of a process: "
            + ", ".join(f"{phase} {split_ms[phase]:.3g}" for phase in PHASES),
        ),
        (
            "samples",
            f"{summary['num_images']} delivered, {summary['num_bad_samples']} bad; filters leave "
            f"out {summary['num_dropped_samples']} of the data set",
        ),
    ]
    if config["target_images_per_second"] is not None:
        rows.append((f"{config['target_images_per_second']:g} images/s?", _answer(record)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _describe_processes(record: dict[str, Any]) -> str:
    """What one loading process contributes, and how many there are."""
    num_workers, num_cores = record["config"]["num_workers"], record["machine"]["num_cpu_cores"]
    who = _count(num_workers, "worker") if num_workers else "the trainer's own, without workers"
    rate = format_number(record["summary"]["images_per_second_per_process"])
    return f"{rate} ({who}; {_count(num_cores, 'CPU core')})"


def _describe_wait(record: dict[str, Any]) -> str:
    """How much of the time the emulated trainer waited."""
    summary = record["summary"]
    waited_s = summary["data_wait_percent"] / 100 * summary["window_s"]
    return (
        f"{summary['data_wait_percent']:.1f} % of the time: "
        f"{waited_s / summary['num_measured_steps']:.3g} s for each batch, beside steps of "
        f"{record['config']['emulate_step_seconds']:g} s"
    )


def _answer(record: dict[str, Any]) -> str:
    """Whether the source feeds the rate that was asked for, and with how many workers."""
    summary, target = record["summary"], record["config"]["target_images_per_second"]
    interval = summary["images_per_second_interval"]
    verdict = "yes" if summary["images_per_second"] >= target else "no"
    if interval and interval["low"] <= target <= (interval["high"] or target):
        verdict += ", but so close that another run may say otherwise"
    num_needed, num_cores = summary["num_workers_for_target"], record["machine"]["num_cpu_cores"]
    rate_of_each = format_number(summary["images_per_second_per_core"])
    return (
        f"{verdict}. It takes {_count(num_needed, 'worker')} of {rate_of_each} images/s, if each "
        f"has a CPU core of its own; this machine has "
        f"{num_cores if num_needed <= num_cores else f'only {num_cores}'}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def make_row(record: dict[str, Any]) -> dict[str, Any]:
    """Flatten a record.

    Args:
        record: A record of kind feed or precompute, of any status.

    Returns:
        A value for every column; None where the run gave none.
    """
    config, machine = record["config"], record["machine"]
    summary = record["summary"] or {}
    interval = summary.get("images_per_second_interval") or {}
    split_ms = summary.get("ms_per_image") or {}
    row = {
        **{f"{phase}_ms_per_image": split_ms.get(phase) for phase in PHASES},
        "source": record["run_id"],
        "kind": "measured",
        "job": kind_of(record),
        "device": _name_device(record),
        "num_cpu_cores": machine["num_cpu_cores"],
        "data": _name_data(config),
        "images_per_second_low": interval.get("low"),
        "images_per_second_high": interval.get("high"),
        "git_commit": record["git"]["commit"],
    }
    known = {**record, **config, **summary, **row}
    return {column: known.get(column) for column in COLUMNS}


def format_csv(records: Iterable[dict[str, Any]]) -> str:
    """One row per run, unrounded."""
    import pandas

    rows = [make_row(record) for record in records]
    return pandas.DataFrame(rows, columns=COLUMNS).to_csv(index=False)


def format_markdown(records: Sequence[dict[str, Any]]) -> str:
    """One line per configuration, runs of the same one together.

    Args:
        records: Records of kind feed or precompute with the status ok.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(_configuration(record), []).append(record)
    lines = [
        "| device | cores | job | data | format | samples | px | batch | workers | step, s | runs "
        "| images/s (95 % interval) | images/s per core | MB/s "
        "| ms per image: read, decode, transform, tokenize, collate | trainer waits |",
        "|---|---:|---|---|---|---|---:|---:|---:|---:|---:|---|---:|---:|---|---:|",
    ]
    for configuration, runs in groups.items():
        rows = [make_row(record) for record in runs]
        split_ms = [_median(rows, f"{phase}_ms_per_image") for phase in PHASES]
        wait_percent = _median(rows, "data_wait_percent")
        cells = [
            *(NOT_APPLICABLE if cell is None else cell for cell in configuration),
            len(runs),
            format_rates([record["summary"] for record in runs]),
            _median(rows, "images_per_second_per_core"),
            _median(rows, "megabytes_per_second"),
            ", ".join(split_ms) if set(split_ms) != {NOT_APPLICABLE} else NOT_APPLICABLE,
            wait_percent if wait_percent == NOT_APPLICABLE else f"{wait_percent} %",
        ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _configuration(record: dict[str, Any]) -> tuple[Any, ...]:
    row = make_row(record)
    columns = ("device", "num_cpu_cores", "job", "data", "data_format", "latents", "image_size")
    columns += ("batch_size", "num_workers", "emulate_step_seconds")
    if row["data"] is not None:
        row["data"] = f"`{row['data']}`"  # <remote> would pass for an HTML tag
    # What was read; to encode a data set beforehand is to read images.
    row["latents"] = "latents" if row["latents"] == "precomputed" else "images"
    return tuple(row[column] for column in columns)


def _median(rows: Sequence[dict[str, Any]], column: str) -> str:
    values = [row[column] for row in rows if row[column] is not None]
    return format_number(statistics.median(values), num_digits=3) if values else NOT_APPLICABLE


def _name_device(record: dict[str, Any]) -> str:
    """What did the work: data.py loads on the CPU, whatever else the machine has."""
    return record["machine"]["cpu_name" if kind_of(record) == FEED else "device_name"]


def _name_data(config: dict[str, Any]) -> str | None:
    """Where the samples were, as the user said it."""
    return next((config[name] for name in ("streams", "remote", "local") if config.get(name)), None)
