"""Fills the generated parts of a page about one result.

An author writes who measured, what is not reported and why, and footnotes. Everything else comes
from the records of the runs that the marker of the page names by patterns:

    <!-- begin generated: runs 202611*_sd2-base-256px-* -->
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.escape import for_markdown
from sdbench.base.units import counted
from sdbench.record.configuration import count_devices, place_of_encoders
from sdbench.report.markers import BEGIN, fill_blocks
from sdbench.report.runs import group_runs, notes_cell, rates_cell, summary_cell
from sdbench.report.tables import Cell, Table, make_cell, make_table, median_cell, to_markdown
from sdbench.report.terminal import NOT_KNOWN, format_rate
from sdbench.settings.data import ONLINE

# Runs of each configuration by its name: (a), (b), ...
Groups = Mapping[str, list[dict[str, Any]]]

RUNS_MARKER = re.compile(BEGIN.format(r"(?P<name>runs +(?P<patterns>\S.*?))"))


def fill(text: str, records: Sequence[dict[str, Any]], *, path: Path) -> str:
    """Fill the generated parts of a page."""
    marker = RUNS_MARKER.search(text)
    if marker is None:
        raise ConfigError(
            f"{path} does not say which runs it is about",
            value=f"no {BEGIN.format('runs ...')}",
            allowed=f"a line such as {BEGIN.format('runs 202611*_sd2-base-256px-*')}",
            flag="--folder",
        )
    runs = _select(records, patterns=marker["patterns"].split(), path=path)
    versions = [
        {
            "this suite, commit": run["git"]["commit"],
            "uncommitted changes": run["git"]["dirty"],
            "date of the runs": run["started_utc"][:10],
            **run["versions"],
        }
        for run in runs
    ]
    contents = {
        "dates": _describe_dates(runs),
        marker["name"]: _format_runs(runs),
        "versions": to_markdown(_facts_table(versions, heading="version")),
    }
    return fill_blocks(text, contents, path=path)


def _select(
    records: Sequence[dict[str, Any]], *, patterns: Sequence[str], path: Path
) -> list[dict[str, Any]]:
    chosen: set[str] = set()
    for pattern in patterns:
        fitting = fnmatch.filter((record["run_id"] for record in records), pattern)
        if not fitting:
            raise ConfigError(
                f"no published run fits a pattern of {path}",
                value=pattern,
                allowed=f"names of folders in {path.parent.parent / 'runs'}, with * for any text",
                flag="--folder",
            )
        chosen.update(fitting)
    return [record for record in records if record["run_id"] in chosen]


def _describe_dates(runs: Sequence[dict[str, Any]]) -> str:
    """The number of runs, and when the first and the last began, as the end of a sentence."""
    starts = sorted(run["started_utc"] for run in runs)
    first, last = (f"{moment[:10]} {moment[11:16]}" for moment in (starts[0], starts[-1]))
    return f"in {counted(len(runs), 'run')} that began between {first} and {last} UTC."


def _format_runs(runs: Sequence[dict[str, Any]]) -> str:
    names = (f"({chr(ord('a') + number)})" for number in itertools.count())
    groups = dict(zip(names, group_runs(runs), strict=False))
    by_configuration = [_throughput_row(name, group) for name, group in groups.items()]
    by_run = [_run_row(name, run) for name, group in groups.items() for run in group]
    breakdown = _breakdown_table(groups)
    parts = (
        "## Models",
        ("The models.", _models_table(groups)),
        "## Hardware",
        ("The hardware.", _hardware_table(runs)),
        f"## How it was measured\n\n{_describe_method(runs)}",
        # One configuration differs in no setting.
        ("The settings in which the configurations differ.", _settings_table(groups)),
        "## Throughput",
        (
            "Throughput by configuration. Three or more runs have a 95 % interval between runs (t "
            "on the logs of their rates).",
            make_table(by_configuration, left=["notes"]),
        ),
        (
            "Every run. Its interval is within the run (t over block means of its steps).",
            make_table(by_run, left=["notes"]),
        ),
        "## Where the time goes" if breakdown.rows else "",
        (
            "Where the time of a step goes: medians over the runs, of steps after the measured "
            "window in which the device is waited for between phases.",
            breakdown,  # old records have none
        ),
    )
    texts, numbers = [], itertools.count(1)
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part[1].rows:
            texts += [f"**Table {next(numbers)}.** {part[0]}", to_markdown(part[1])]
    return "\n\n".join(filter(None, texts))


def _models_table(groups: Groups) -> Table:
    rows = []
    for group in groups.values():
        workload, config = group[0]["workload"], group[0]["config"]
        place = place_of_encoders(config)
        row = {
            "model": workload["architecture"],
            "parameters": _grouped_cell(workload.get("num_parameters")),
            "trained parameters": _grouped_cell(workload.get("num_trainable_parameters")),
            "weights": workload["weights"],
            "model FLOP per image, 10^9": _grouped_cell(round(workload["flops_per_image"] / 1e9)),
            "resolution, px": config["image_size"],
            "encoders": "in the step" if place == ONLINE else place,
        }
        if row not in rows:
            rows.append(row)
    return make_table(rows)


def _hardware_table(runs: Sequence[dict[str, Any]]) -> Table:
    facts = []
    for run in runs:
        machine, ranks = run["machine"], run["ranks"]
        facts.append(
            {
                "device": count_devices(machine, ranks),
                "nodes": ranks["num_nodes"],
                "memory of a device, GiB": machine["device_memory_gib"],
                "CPU": machine["cpu_name"],
                "CPU cores": machine["num_cpu_cores"],
                "CPU instructions for training": ", ".join(machine["cpu_flags"]),
                "memory, GiB": machine["memory_gib"],
                "driver": machine["driver"],
                "system": machine["platform"],
            }
        )
    return _facts_table(facts, heading="value")


def _facts_table(facts: Sequence[Mapping[str, Any]], *, heading: str) -> Table:
    """A row for each fact, with its distinct values in all runs."""
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    return make_table(
        {"what": name, heading: _join(of_run.get(name) for of_run in facts)} for name in names
    )


def _settings_table(groups: Groups) -> Table:
    """One column per configuration, one row per setting in which two of them differ."""
    configs = [group[0]["config"] for group in groups.values()]
    rows = []
    for setting in dict.fromkeys(setting for config in configs for setting in config):
        values = [config.get(setting) for config in configs]
        if len(set(map(str, values))) > 1:
            rows.append({"setting": setting, **dict(zip(groups, values, strict=True))})
    return make_table(rows, left=list(groups))


def _throughput_row(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    config = runs[0]["config"]
    return {
        "configuration": name,
        "preset": config["preset"],
        "precision": config["precision"],
        "global batch": config["batch_size"],
        "runs": len(runs),
        "images/s (95 % interval)": rates_cell(runs),
        "step p50, s": summary_cell(runs, "step_time_p50_s"),
        "data wait, %": summary_cell(runs, "data_wait_percent", num_digits=2),
        "peak memory, GiB": make_cell(
            max(run["summary"]["peak_memory_gib"] for run in runs), num_digits=3
        ),
        "achieved TFLOP/s": summary_cell(runs, "achieved_tflops_per_device", num_digits=3),
        "of a matrix product, %": summary_cell(runs, "mfu_of_matmul_percent", num_digits=3),
        "notes": notes_cell(runs),
    }


def _run_row(name: str, run: dict[str, Any]) -> dict[str, Any]:
    summary = run["summary"]
    return {
        "configuration": name,
        "run": run["run_id"],
        "images/s (95 % interval)": Cell(format_rate(summary), summary["images_per_second"]),
        "warm-up steps": _num_warmup_steps(run),
        "measured steps": summary["num_measured_steps"],
        "step p50, s": summary["step_time_p50_s"],
        "step p95, s": summary["step_time_p95_s"],
        "loss, first to last": f"{summary['loss_first']:.4f} to {summary['loss_last']:.4f}",
        "notes": notes_cell([run]),
    }


def _breakdown_table(groups: Groups) -> Table:
    """Seconds and shares by phase, two columns per profiled configuration; no rows without one."""
    rows: dict[str, dict[str, Any]] = {}
    for name, group in groups.items():
        known = [run["summary"]["breakdown"] for run in group if run["summary"].get("breakdown")]
        for phase in known[0]["seconds"] if known else ():
            row = rows.setdefault(phase, {"phase": phase.replace("_", " ")})
            times_s = [one["seconds"].get(phase, 0.0) for one in known]
            shares = [
                100 * time_s / one["step_time_s"]
                for time_s, one in zip(times_s, known, strict=True)
            ]
            row[f"{name}, s"] = median_cell(times_s, num_digits=3)
            row[f"{name}, %"] = median_cell(shares, num_digits=2)
    return make_table(rows.values())


def _describe_method(runs: Sequence[dict[str, Any]]) -> str:
    """A paragraph on how the runs were measured, from their settings."""
    configs = [run["config"] for run in runs]

    def all_of(name: str) -> str:
        return for_markdown(_join(config[name] for config in configs))

    warmups = _join(map(_num_warmup_steps, runs))
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


def _num_warmup_steps(run: dict[str, Any]) -> int:
    """Steps before the measured window. Old records have only the setting, which was exact then."""
    return run["summary"].get("num_warmup_steps", run["config"]["warmup_batches"])


def _join(values: Any) -> str:
    """The distinct values, joined by "or"."""
    texts = (make_cell(NOT_KNOWN if value is None else value).text for value in values)
    return " or ".join(dict.fromkeys(texts))


def _grouped_cell(number: int | None) -> Cell:
    """A whole number with commas between thousands."""
    return make_cell(None) if number is None else Cell(f"{number:,}", number)
