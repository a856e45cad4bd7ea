"""Tables of published figures (results/quoted) and of predictions (results/modelled).

The seed's ratio of two GPUs has a table of its own; all other figures are folded by source.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.analysis.throughput_table import make_figure_tables
from sdbench.base.errors import ConfigError
from sdbench.report.figures import TIME, device_of, read_figures
from sdbench.report.runs import use_each
from sdbench.report.tables import Cell, Fold, Table, make_cell, make_table

# The tables of seed 003, section 1.5: throughputs, and the ratios that it prints.
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


def load_figures(folder: Path, *, kind: str) -> tuple[dict[str, list[dict[str, Any]]], list[Path]]:
    """Read the tables of a folder, by name; those that cannot be read are named and left out.

    Rows without a kind get this one.
    """

    def read(path: Path) -> tuple[str, list[dict[str, Any]]]:
        return path.stem, [{**row, "kind": row.get("kind") or kind} for row in read_figures(path)]

    tables, left_out = use_each(sorted(folder.glob("*.csv")), read)
    return dict(tables), left_out


def make_seed_table(
    quoted: dict[str, list[dict[str, Any]]], measured: Iterable[dict[str, Any]] = ()
) -> Table | None:
    """The seed's table of P4de against P5, with rates measured here in the same settings.

    None without the seed's table.
    """
    if SEED_TABLE not in quoted:
        return None
    printed_ratios = {
        _settings(row): row.get("printed_ratio") for row in quoted.get(SEED_RATIOS, ())
    }
    rates: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in quoted[SEED_TABLE]:
        rates.setdefault(_settings(row), {})[row.get("gpu")] = row.get("images_per_second")
    gpus = list(dict.fromkeys(row.get("gpu") for row in quoted[SEED_TABLE]))
    is_whole = all(len(rate) == 2 and None not in rate.values() for rate in rates.values())
    if len(gpus) != 2 or not is_whole:
        raise ConfigError(
            f"quoted/{SEED_TABLE}.csv is no table of two GPUs",
            value=gpus,
            allowed="each setting once for either of two GPUs",
            flag="--folder",
        )
    p4de, p5 = gpus
    ours = _measured_under_seed_conditions(measured)
    rows = []
    for settings, rate in rates.items():
        ratio = rate[p5] / rate[p4de]
        printed = printed_ratios.get(settings)
        rows.append(
            {
                **dict(zip(("micro-batch", "num_workers", "EMA"), settings, strict=True)),
                "ratio": Cell(f"{ratio:.2f}x", ratio),
                **{
                    f"8 x {gpu.partition('-')[0]}, images/s": make_cell(rate[gpu], num_digits=6)
                    for gpu in gpus
                },
                "ratio printed there": Cell(f"{printed:.2f}x", printed)
                if isinstance(printed, int | float)
                else printed,
                "tested": "no (n=1)",
                **{
                    f"measured: 8 x {name}, images/s": by_settings.get(settings)
                    for name, by_settings in ours.items()
                },
            }
        )
    caption = f"8 x {p5} over 8 x {p4de}: seed 003, section 1.5, reproduced"
    return make_table(rows, name="p4de-p5", caption=caption)


def fold_by_source(tables: Iterable[tuple[str, Sequence[dict[str, Any]]]]) -> list[Fold]:
    """Fold the figures of each source, given as the rows of each file.

    A fold has a table for each kind of work, and one for each file with figures other than
    images/s. Times of whole runs and the ratios that the seed prints have tables of their own and
    are left out.
    """
    by_source: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for file, rows in tables:
        for row in rows:
            if file != SEED_RATIOS and TIME not in row:
                files = by_source.setdefault(row.get("source") or "source not told", {})
                files.setdefault(file, []).append(row)
    return [
        _make_fold(source, files, number=number)
        for number, (source, files) in enumerate(by_source.items(), 1)
    ]


def _make_fold(source: str, files: Mapping[str, Sequence[dict[str, Any]]], *, number: int) -> Fold:
    rows = [row for of_file in files.values() for row in of_file]
    rates = [row for row in rows if row.get("images_per_second") is not None]
    others = {
        file: rest
        for file, of_file in files.items()
        if (rest := [row for row in of_file if row.get("images_per_second") is None])
    }
    devices = dict.fromkeys(device_of(row) or row.get("hardware") for row in rows)
    count = "1 figure" if len(rows) == 1 else f"{len(rows)} figures"
    summary = f"{source}: {count}, {', '.join(str(name) for name in devices if name)}"
    return Fold(
        summary,
        [
            *make_figure_tables(rates, name=f"source-{number}"),
            *(
                _as_it_is(file, rest, name=f"source-{number}-{file}")
                for file, rest in others.items()
            ),
        ],
    )


def _settings(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in SETTINGS)


def _measured_under_seed_conditions(
    measured: Iterable[dict[str, Any]],
) -> dict[str, dict[tuple[Any, ...], float]]:
    """Median images/s by settings, for each GPU, preset and precision that was measured."""
    rates: dict[str, dict[tuple[Any, ...], list[float]]] = {}
    for row in measured:
        if all(row[name] == value for name, value in SEED_CONDITIONS.items()) and row["gpu"]:
            name = f"{row['gpu']}, preset {row['preset']}, {row['precision']}"
            by_settings = rates.setdefault(name, {})
            by_settings.setdefault(_settings(row), []).append(row["images_per_second"])
    return {
        name: {settings: statistics.median(runs) for settings, runs in by_settings.items()}
        for name, by_settings in rates.items()
    }


def _as_it_is(file: str, rows: Sequence[dict[str, Any]], *, name: str) -> Table:
    cells = [{name: make_cell(value, num_digits=6) for name, value in row.items()} for row in rows]
    return make_table(cells, name=name, caption=f"{file}.csv, {rows[0]['kind']}")
