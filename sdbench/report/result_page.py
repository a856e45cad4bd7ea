"""What does the page of one result say, in the shape that all such pages have?

A person writes who measured, what is not reported and why, and footnotes. All else, every figure
included, is made from the records of the runs that the page's marker names by patterns:

    <!-- begin generated: runs 202611*_sd2-base-256px-* -->
"""

from __future__ import annotations

import fnmatch
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.escape import for_markdown
from sdbench.report.markers import BEGIN, END, fill_block
from sdbench.report.tables import Cell, Column, Table, make_cell, median_cell, to_markdown
from sdbench.report.terminal import NOT_KNOWN, format_rate, format_rates
from sdbench.report.throughput_table import describe_notes, group_runs

RUNS_MARKER = re.compile(r"<!-- begin generated: runs +(?P<patterns>\S.*?) +-->")


def fill(text: str, records: Sequence[dict[str, Any]], *, path: Path) -> str:
    """Make the generated parts of a page again.

    Args:
        text: The page.
        records: Records of training runs with the status ok.
        path: The page's file, for messages.

    Raises:
        ConfigError: If the page lacks a marker, or no run fits a pattern.
    """
    marker = RUNS_MARKER.search(text)
    if marker is None:
        raise ConfigError(
            f"{path} does not say which runs it is about",
            value=f"no {BEGIN.format('runs ...')}",
            allowed=f"a line such as {BEGIN.format('runs 202611*_sd2-base-256px-*')}",
            flag="--results",
        )
    runs = _select(records, patterns=marker["patterns"].split(), path=path)
    for begin, end, content in (
        (BEGIN.format("dates"), END.format("dates"), _describe_dates(runs)),
        (marker[0], END.format("runs"), _format_runs(runs)),
        (BEGIN.format("versions"), END.format("versions"), _format_versions(runs)),
    ):
        text = fill_block(text, content, begin=begin, end=end, path=path)
    return text


def _select(
    records: Sequence[dict[str, Any]], *, patterns: Sequence[str], path: Path
) -> list[dict[str, Any]]:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(record["run_id"], pattern) for record in records):
            raise ConfigError(
                f"no published run fits a pattern of {path}",
                value=pattern,
                allowed="names of folders in results/runs, with * for any text",
                flag="--results",
            )
    return [
        record
        for record in records
        if any(fnmatch.fnmatchcase(record["run_id"], pattern) for pattern in patterns)
    ]


def _describe_dates(runs: Sequence[dict[str, Any]]) -> str:
    """The end of a sentence: when, and how many runs."""
    starts = sorted(run["started_utc"] for run in runs)
    first, last = (f"{moment[:10]} {moment[11:16]}" for moment in (starts[0], starts[-1]))
    return f"in {len(runs)} runs that began between {first} and {last} UTC."


def _format_runs(runs: Sequence[dict[str, Any]]) -> str:
    groups = group_runs(runs)
    tables = (
        ("The models.", _models_table(groups)),
        ("The hardware.", _hardware_table(runs)),
        ("The settings in which the configurations differ.", _settings_table(groups)),
        (
            "Throughput by configuration. Three or more runs have a 95 % interval between runs (t "
            "on the logs of their rates).",
            _throughput_table(groups),
        ),
        (
            "Every run. Its interval is within the run (t over block means of its steps).",
            _runs_table(groups),
        ),
        (
            "Where the time of a step goes: medians over the runs, of steps behind the measured "
            "window in which the device is waited for between phases.",
            _breakdown_table(groups),
        ),
    )
    headings = (
        "Models",
        "Hardware",
        "How it was measured",
        "Throughput",
        None,
        "Where the time goes",
    )
    parts = []
    for number, (heading, (caption, table)) in enumerate(zip(headings, tables, strict=True), 1):
        if not table.rows and heading == "Where the time goes":
            continue  # records made before steps were profiled
        if heading is not None:
            parts.append(f"## {heading}")
        if heading == "How it was measured":
            parts.append(_describe_method(runs))
        parts += [f"**Table {number}.** {caption}", to_markdown(table)]
    return "\n\n".join(parts)


def _models_table(groups: Sequence[Sequence[dict[str, Any]]]) -> Table:
    columns = [
        Column("model"),
        Column("parameters", is_number=True),
        Column("trained parameters", is_number=True),
        Column("weights"),
        Column("model FLOP per image, 10^9", is_number=True),
        Column("resolution, px", is_number=True),
        Column("encoders"),
    ]
    rows = []
    for group in groups:
        workload, config = group[0]["workload"], group[0]["config"]
        row = [
            make_cell(workload["architecture"]),
            _grouped_cell(workload.get("num_parameters")),
            _grouped_cell(workload.get("num_trainable_parameters")),
            make_cell(workload["weights"]),
            _grouped_cell(round(workload["flops_per_image"] / 1e9)),
            make_cell(config["image_size"]),
            make_cell("in the step" if config["latents"] == "online" else config["latents"]),
        ]
        if row not in rows:
            rows.append(row)
    return Table("models", "", columns, rows)


def _hardware_table(runs: Sequence[dict[str, Any]]) -> Table:
    columns = [Column("what"), Column("value")]
    rows = []
    for name, value_of in (
        ("device", lambda run: f"{run['ranks']['world_size']} x {run['machine']['device_name']}"),
        ("nodes", lambda run: run["ranks"]["num_nodes"]),
        ("memory of a device, GiB", lambda run: run["machine"]["device_memory_gib"]),
        ("CPU", lambda run: run["machine"]["cpu_name"]),
        ("CPU cores", lambda run: run["machine"]["num_cpu_cores"]),
        ("CPU instructions for training", lambda run: ", ".join(run["machine"]["cpu_flags"])),
        ("memory, GiB", lambda run: run["machine"]["memory_gib"]),
        ("driver", lambda run: run["machine"]["driver"]),
        ("system", lambda run: run["machine"]["platform"]),
    ):
        rows.append([make_cell(name), make_cell(_join(value_of(run) for run in runs))])
    return Table("hardware", "", columns, rows)


def _settings_table(groups: Sequence[Sequence[dict[str, Any]]]) -> Table:
    """One column per configuration; only settings that differ between two."""
    configs = [group[0]["config"] for group in groups]
    names = [
        name
        for name in dict.fromkeys(name for config in configs for name in config)
        if len({str(config.get(name)) for config in configs}) > 1
    ]
    columns = [Column("setting"), *(Column(f"({letter})") for letter in _letters(groups))]
    rows = [
        [make_cell(name), *(make_cell(config.get(name)) for config in configs)] for name in names
    ]
    return Table("settings", "", columns, rows)


def _throughput_table(groups: Sequence[Sequence[dict[str, Any]]]) -> Table:
    columns = [
        Column("configuration"),
        Column("preset"),
        Column("precision"),
        Column("global batch", is_number=True),
        Column("runs", is_number=True),
        Column("images/s (95 % interval)", is_number=True),
        Column("step p50, s", is_number=True),
        Column("data wait, %", is_number=True),
        Column("peak memory, GiB", is_number=True),
        Column("achieved TFLOP/s", is_number=True),
        Column("of a matrix product, %", is_number=True),
        Column("notes"),
    ]
    rows = []
    for letter, group in zip(_letters(groups), groups, strict=True):
        config, summaries = group[0]["config"], [run["summary"] for run in group]
        rates = [summary["images_per_second"] for summary in summaries]
        rows.append(
            [
                make_cell(f"({letter})"),
                make_cell(config["preset"]),
                make_cell(config["precision"]),
                make_cell(config["batch_size"]),
                make_cell(len(group)),
                Cell(format_rates(summaries), statistics.median(rates)),
                median_cell(summary["step_time_p50_s"] for summary in summaries),
                median_cell((summary["data_wait_percent"] for summary in summaries), num_digits=2),
                make_cell(max(summary["peak_memory_gib"] for summary in summaries), num_digits=3),
                median_cell(
                    (summary["achieved_tflops_per_device"] for summary in summaries), num_digits=3
                ),
                median_cell(
                    (summary.get("mfu_of_matmul_percent") for summary in summaries), num_digits=3
                ),
                make_cell(describe_notes(group), unknown=""),
            ]
        )
    return Table("throughput", "", columns, rows)


def _runs_table(groups: Sequence[Sequence[dict[str, Any]]]) -> Table:
    columns = [
        Column("configuration"),
        Column("run"),
        Column("images/s (95 % interval)", is_number=True),
        Column("warm-up steps", is_number=True),
        Column("measured steps", is_number=True),
        Column("step p50, s", is_number=True),
        Column("step p95, s", is_number=True),
        Column("loss, first to last"),
        Column("notes"),
    ]
    rows = []
    for letter, group in zip(_letters(groups), groups, strict=True):
        for run in group:
            summary = run["summary"]
            losses = f"{summary['loss_first']:.4f} to {summary['loss_last']:.4f}"
            rows.append(
                [
                    make_cell(f"({letter})"),
                    make_cell(run["run_id"]),
                    Cell(format_rate(summary), summary["images_per_second"]),
                    make_cell(summary.get("num_warmup_steps", run["config"]["warmup_batches"])),
                    make_cell(summary["num_measured_steps"]),
                    make_cell(summary["step_time_p50_s"]),
                    make_cell(summary["step_time_p95_s"]),
                    make_cell(losses),
                    make_cell(describe_notes([run]), unknown=""),
                ]
            )
    return Table("runs", "", columns, rows)


def _breakdown_table(groups: Sequence[Sequence[dict[str, Any]]]) -> Table:
    """Seconds and shares by phase, a pair of columns per configuration; no rows if none has any."""
    columns, breakdowns = [Column("phase")], []
    for letter, group in zip(_letters(groups), groups, strict=True):
        known = [run["summary"]["breakdown"] for run in group if run["summary"].get("breakdown")]
        if known:
            breakdowns.append(known)
            columns += [Column(f"({letter}), s", True), Column(f"({letter}), %", True)]
    if not breakdowns:
        return Table("breakdown", "", columns, [])
    rows = []
    for phase in breakdowns[0][0]["seconds"]:
        row = [make_cell(phase.replace("_", " "))]
        for known in breakdowns:
            shares = [100 * one["seconds"][phase] / one["step_time_s"] for one in known]
            row.append(median_cell((one["seconds"][phase] for one in known), num_digits=3))
            row.append(median_cell(shares, num_digits=2))
        rows.append(row)
    return Table("breakdown", "", columns, rows)


def _describe_method(runs: Sequence[dict[str, Any]]) -> str:
    """In words, from the settings that all runs share."""
    configs = [run["config"] for run in runs]

    def all_of(name: str) -> str:
        return for_markdown(_join(config[name] for config in configs))

    # Records made before a window could be extended do not count their warm-up.
    warmups = _join(
        run["summary"].get("num_warmup_steps", run["config"]["warmup_batches"]) for run in runs
    )
    windows = _join(run["summary"]["num_measured_steps"] for run in runs)

    return (
        f"Each run is a process of its own: {warmups} warm-up steps, then "
        f"{windows} measured ones, of {all_of('batch_size')} images each in "
        f"micro-batches of {all_of('device_train_microbatch_size')}; data: "
        f"{all_of('data_format')}, {all_of('num_workers')} loader workers; EMA: "
        f"{all_of('use_ema')}; engine: {all_of('engine')}; seed {all_of('seed')}. The device is "
        "synchronised at the edges of the measured window only, and images/s is images over the "
        "time of that window. A window in which the step time has not settled becomes warm-up, and "
        "another one is measured, up to a bound. The command of a run and every setting are in its "
        "record."
    )


def _format_versions(runs: Sequence[dict[str, Any]]) -> str:
    names = dict.fromkeys(name for run in runs for name in run["versions"])
    rows = [
        [
            make_cell("this suite, commit"),
            make_cell(_join(run["git"]["commit"] for run in runs)),
        ],
        [
            make_cell("uncommitted changes"),
            make_cell(_join(run["git"]["dirty"] for run in runs)),
        ],
        [
            make_cell("date of the runs"),
            make_cell(_join(run["started_utc"][:10] for run in runs)),
        ],
        *(
            [make_cell(name), make_cell(_join(run["versions"].get(name) for run in runs))]
            for name in names
        ),
    ]
    return to_markdown(Table("versions", "", [Column("what"), Column("version")], rows))


def _letters(groups: Sequence[Any]) -> list[str]:
    """a, b, c for the configurations of a page."""
    return [chr(ord("a") + index) for index in range(len(groups))]


def _join(values: Any) -> str:
    """What all runs share, or each value once."""
    texts = (make_cell(NOT_KNOWN if value is None else value).text for value in values)
    return " or ".join(dict.fromkeys(texts))


def _grouped_cell(number: int | None) -> Cell:
    """A large whole number with commas between thousands."""
    return make_cell(None) if number is None else Cell(f"{number:,}", number)
