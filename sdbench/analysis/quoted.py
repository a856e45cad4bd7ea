"""Tables of published figures (results/quoted).

The seed's ratio of two GPUs has a table of its own; all other figures are folded by source.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdbench.analysis.throughput_table import make_figure_tables
from sdbench.base.errors import ConfigError
from sdbench.base.units import counted
from sdbench.record.configuration import group
from sdbench.report.figures import QUOTED, TIME, describe_source, device_of, read_figures
from sdbench.report.runs import use_each
from sdbench.report.tables import (
    Cell,
    Field,
    Fold,
    Table,
    make_cell,
    make_table,
    median_cell,
    tabulate,
)

# The tables of the AWS test case (2024), section 1.5: throughputs, and the ratios that it prints.
SEED_TABLE = "aws_p4de_p5_single_node"
SEED_RATIOS = "aws_p4de_p5_ratio"
SEED_CONDITIONS = {
    "model": "sd2-base",
    "image_size": 512,
    "latents": "online",
    "num_gpus": 8,
    "global_batch": 2048,
    "other_settings": None,
}
SETTINGS = ("micro_batch", "num_workers", "ema")
# The time of a run until its validation loss is reached.
MINUTES = "minutes_to_target"
TARGET = (
    Field("GPU", "gpu"),
    Field("GPUs", "num_gpus"),
    Field("images/s per GPU", "per_gpu", digits=3),
    Field("TFLOP/s per GPU", "tflops_per_gpu"),
    Field("GPU-hours to the target", "gpu_hours"),
    Field("minutes to the target", MINUTES),
    Field("images/s", "images_per_second", digits=6),
    Field("global batch", "global_batch"),
    Field("GPUs that share a model", "tensor_parallel", unknown=""),
    Field("px", "image_size"),
    Field("source", "origin"),
)


def load_figures(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], list[Path]]:
    """Read the tables of a folder, by name; all rows are of the kind quoted."""

    def read(path: Path) -> tuple[str, list[dict[str, Any]]]:
        return path.stem, [{**row, "kind": QUOTED} for row in read_figures(path)]

    tables, left_out = use_each(sorted(folder.glob("*.csv")), read)
    return dict(tables), left_out


def make_seed_table(
    quoted: dict[str, list[dict[str, Any]]], measured: Iterable[dict[str, Any]] = ()
) -> Table | None:
    """The seed's table of P4de against P5, with rates measured in the same settings.

    None without the seed's table.
    """
    if SEED_TABLE not in quoted:
        return None
    printed = {_settings(row): row.get("printed_ratio") for row in quoted.get(SEED_RATIOS, ())}
    rows = quoted[SEED_TABLE]
    rates = {(row.get("gpu"), _settings(row)): row.get("images_per_second") for row in rows}
    gpus = list(dict.fromkeys(gpu for gpu, _ in rates))
    all_settings = dict.fromkeys(settings for _, settings in rates)
    is_whole = len(rows) == len(rates) == 2 * len(all_settings) and None not in rates.values()
    if len(gpus) != 2 or not is_whole:
        raise ConfigError(
            f"quoted/{SEED_TABLE}.csv is no table of two GPUs",
            value=gpus,
            allowed="each setting once for either of two GPUs",
            flag="--folder",
        )
    p4de, p5 = gpus
    under_seed_conditions = [
        row
        for row in measured
        if row["gpu"] and all(row[name] == value for name, value in SEED_CONDITIONS.items())
    ]
    measured_on = group(under_seed_conditions, key_of=_name_column)
    table = []
    for settings in all_settings:
        of_gpu = {gpu: rates[gpu, settings] for gpu in gpus}
        row = dict(zip(("micro-batch", "num_workers", "EMA"), settings, strict=True))
        row["ratio"] = _times_cell(of_gpu[p5] / of_gpu[p4de])
        for gpu, rate in of_gpu.items():
            row[f"8 x {gpu.partition('-')[0]}, images/s"] = make_cell(rate, num_digits=6)
        row |= {"ratio printed there": _times_cell(printed.get(settings)), "tested": "no (n=1)"}
        for name, alike in measured_on.items():
            known = (one["images_per_second"] for one in alike if _settings(one) == settings)
            row[name] = median_cell(known)
        table.append(row)
    caption = (
        f"8 x {p5} over 8 x {p4de}: AWS (2024), MosaicML Stable Diffusion, section 1.5, reproduced"
    )
    return make_table(table, name="p4de-p5", caption=caption)


def make_target_table(rows: Iterable[dict[str, Any]]) -> Table | None:
    """Runs that trained to a target, the fastest GPU first; those without a rate come last.

    The rows have ``minutes_to_target`` and ``teraflop_per_image``, the arithmetic of a trained
    image. None without such rows.
    """
    found = [row for row in rows if row.get(MINUTES) is not None]
    if not found:
        return None
    table = []
    for row in found:
        rate, number = row.get("images_per_second"), row.get("num_gpus")
        per_gpu = rate / number if rate and number else None
        per_image = row.get("teraflop_per_image")
        table.append(
            row
            | {
                "per_gpu": per_gpu,
                "tflops_per_gpu": per_gpu * per_image if per_gpu and per_image else None,
                "gpu_hours": number * row[MINUTES] / 60 if number else None,
                "origin": describe_source(row),
            }
        )
    table.sort(key=lambda row: row["per_gpu"] or 0.0, reverse=True)
    models = dict.fromkeys(row.get("model") or "model not told" for row in found)
    caption = f"{' and '.join(models)}: trained to the target"
    return tabulate(TARGET, table, name="targets", caption=caption).without_empty_columns()


def _name_column(row: dict[str, Any]) -> str:
    """The heading of rates that were measured, here or by a submitter."""
    by = f" by {row['submitter']}" if "submitter" in row else ""
    device = f"8 x {row['gpu']}, preset {row['preset']}, {row['precision']}"
    return f"{row['kind']}{by}: {device}, images/s"


def _times_cell(ratio: Any) -> Cell:
    """A ratio; anything but a number is shown as it is."""
    return Cell(f"{ratio:.2f}x", ratio) if isinstance(ratio, int | float) else make_cell(ratio)


def fold_by_source(tables: Iterable[tuple[str, Sequence[dict[str, Any]]]]) -> list[Fold]:
    """Fold the figures of each source, given as the rows of each file.

    A fold has a table for each kind of work, and one for each file with figures other than
    images/s. Times of whole runs and the ratios that the seed prints have tables of their own and
    are left out.
    """
    named = [
        (file, row)
        for file, rows in tables
        for row in rows
        if file != SEED_RATIOS and TIME not in row
    ]
    by_source = group(named, key_of=lambda item: item[1].get("source") or "source not told")
    return [
        _make_fold(source, of_source, name=f"source-{number}")
        for number, (source, of_source) in enumerate(by_source.items(), 1)
    ]


def _make_fold(source: str, named: Sequence[tuple[str, dict[str, Any]]], *, name: str) -> Fold:
    """The figures of a source, given as rows with the names of their files."""
    rows = [row for _, row in named]
    devices = dict.fromkeys(device_of(row) or row.get("hardware") for row in rows)
    count = counted(len(rows), "figure")
    rates = [row for row in rows if row.get("images_per_second") is not None]
    tables = make_figure_tables(rates, name=name)
    others = [item for item in named if item[1].get("images_per_second") is None]
    for file, items in group(others, key_of=operator.itemgetter(0)).items():
        cells = [
            {column: make_cell(value, num_digits=6) for column, value in row.items()}
            for _, row in items
        ]
        caption = f"{file}.csv, quoted"
        tables.append(make_table(cells, name=f"{name}-{file}", caption=caption))
    return Fold(
        ": ".join([source, ", ".join([count, *(str(one) for one in devices if one)])]), tables
    )


def _settings(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in SETTINGS)
