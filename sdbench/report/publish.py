"""How does a run get into results/, and its tables with it?

A published run is copied once and never edited. results/throughput.csv (training), results/data.csv
(loading) and the tables in results/README.md are made from the records there, so that no figure is
typed by hand.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdbench.errors import ConfigError
from sdbench.measure.record import (
    BENCHMARK,
    LOG_NAME,
    RECORD_NAME,
    STEPS_NAME,
    kind_of,
    load_record,
    replace_file,
)
from sdbench.report import feed_table
from sdbench.report.row import COLUMNS, make_row
from sdbench.report.terminal import format_rates

BEGIN_MARKER = "<!-- begin generated: throughput -->"
END_MARKER = "<!-- end generated: throughput -->"
BEGIN_DATA_MARKER = "<!-- begin generated: data -->"
END_DATA_MARKER = "<!-- end generated: data -->"
# A path of the machine: absolute, and neither the inside of another one nor of a URL.
PATH_PATTERN = re.compile(r"(?:(?<=file://)|(?<![\w./]))/(?!/)[^\s,=]+")

EPILOG = """\
examples:
  python -m sdbench publish runs/20261121T050000Z_2-core-cpu_tiny-64px-fast
  python -m sdbench publish            (rebuild the tables only)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Publish runs and rebuild the tables.

    Args:
        argv: Run folders.

    Returns:
        The exit code.

    Raises:
        ConfigError: For a folder that is no finished run, or that is published already.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sdbench publish",
        description="Copy finished runs into results/runs and rebuild the tables made from them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--results", type=Path, default=Path("results"), help="(default: results)")
    arguments = parser.parse_args(argv)
    for run in arguments.runs:
        print(f"published {publish(run, results=arguments.results)}")
    rebuild_tables(arguments.results)
    print(f"rebuilt README.md, throughput.csv and data.csv in {arguments.results}")
    return 0


def publish(run: Path, *, results: Path) -> Path:
    """Copy a run's record, log and, if it has them, steps into results/runs.

    Paths of this machine stay behind.

    Args:
        run: Folder of the run.
        results: The results folder.

    Returns:
        The new folder.

    Raises:
        ConfigError: If it is no run that ended well, or is there already.
    """
    try:
        record = load_record(run)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"this folder holds no record that can be read ({error})",
            value=str(run),
            allowed="a folder that benchmark.py, data.py or precompute made",
            flag="RUN",
        ) from None
    if record["status"] != "ok":
        raise ConfigError(
            f"only a run that ended well is published ({record['reason']})",
            value=record["status"],
            allowed="the status ok",
            flag="RUN",
        )
    target = results / "runs" / record["run_id"]
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            "this run is published already, and a published run is never edited",
            value=str(target),
            allowed="a run that is not in results/runs",
            flag="RUN",
        ) from None
    if kind_of(record) == BENCHMARK:
        shutil.copy(run / STEPS_NAME, target / STEPS_NAME)
    for name in (RECORD_NAME, LOG_NAME):
        text = (run / name).read_text(encoding="utf-8")
        replace_file(target / name, _without_paths(text, record["config"]))
    return target


def _without_paths(text: str, config: dict[str, Any]) -> str:
    """Put the flag's name in place of a path of the publisher's machine, e.g. <results_dir>."""
    names = {
        path: name
        for name, value in config.items()
        if isinstance(value, str)
        for path in ([value] if Path(value).is_absolute() else PATH_PATTERN.findall(value))
    }
    for path in sorted(names, key=len, reverse=True):  # one path may begin with another
        text = text.replace(path, f"<{names[path]}>")
    return text


def rebuild_tables(results: Path) -> None:
    """Make the CSV files and the tables in README.md from the published records.

    Args:
        results: The results folder.

    Raises:
        ConfigError: If its README.md lacks the markers between which the tables go.
    """
    records = [load_record(path) for path in sorted((results / "runs").glob("*/record.json"))]
    trained = [record for record in records if kind_of(record) == BENCHMARK]
    loaded = [record for record in records if kind_of(record) != BENCHMARK]
    readme = results / "README.md"
    text = readme.read_text(encoding="utf-8")
    for begin, end, table in (
        (BEGIN_MARKER, END_MARKER, format_markdown(trained)),
        (BEGIN_DATA_MARKER, END_DATA_MARKER, feed_table.format_markdown(loaded)),
    ):
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ConfigError(
                f"{readme} has no place for a table",
                value=f"no {end if found_begin else begin}",
                allowed=f"a line {begin} and below it a line {end}",
                flag="--results",
            )
        text = f"{before}{begin}\n{table}\n{end}{after}"
    replace_file(readme, text)
    replace_file(results / "throughput.csv", format_csv(trained))
    replace_file(results / "data.csv", feed_table.format_csv(loaded))


def format_csv(records: Iterable[dict[str, Any]]) -> str:
    """One row per run, unrounded."""
    import pandas

    rows = [make_row(record) for record in records]
    return pandas.DataFrame(rows, columns=COLUMNS).to_csv(index=False)


def format_markdown(records: Sequence[dict[str, Any]]) -> str:
    """One line per configuration, runs of the same one together.

    Three or more runs give a between-runs interval; fewer give the within-run one of each run.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(_configuration(record), []).append(record)
    lines = [
        "| device | ranks | model | px | preset | precision | EMA | global batch | micro-batch "
        "| runs | images/s (95 % interval) | step p50, s | peak memory, GiB |",
        "|---|---:|---|---:|---|---|---|---:|---:|---:|---|---:|---:|",
    ]
    for configuration, runs in groups.items():
        summaries = [record["summary"] for record in runs]
        cells = [
            *(
                ("yes" if cell else "no") if isinstance(cell, bool) else cell
                for cell in configuration
            ),
            len(runs),
            format_rates(summaries),
            f"{statistics.median(summary['step_time_p50_s'] for summary in summaries):.4g}",
            f"{max(summary['peak_memory_gib'] for summary in summaries):.1f}",
        ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _configuration(record: dict[str, Any]) -> tuple[Any, ...]:
    config = record["config"]
    names = ("image_size", "preset", "precision", "use_ema", "batch_size")
    return (
        record["machine"]["device_name"],
        record["ranks"]["world_size"],
        record["workload"]["architecture"],
        *(config[name] for name in names),
        config["device_train_microbatch_size"],
    )
