"""What do Composer, the EMA, a micro-batch and several ranks cost or gain, all else being equal?

Each table has families of configurations that differ in what the table is about and in nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.report.ladder import (
    EMA_SETTINGS,
    RANK_SETTINGS,
    THREADS,
    Configuration,
    describe_recipe,
    families,
)
from sdbench.report.ladder_tables import EMPTY, memory_cell, notes_of, rate_cell, ratio_cell
from sdbench.report.tables import Cell, Column, Table, make_cell
from sdbench.report.throughput_table import describe_device
from sdbench.statistics.intervals import Comparison, compare

MICRO_BATCH = "device_train_microbatch_size"
WORK_COLUMNS = (
    Column("device"),
    Column("encoders"),
    Column("px", is_number=True),
    Column("recipe"),
)
COST_COLUMNS = (
    Column("step p50, s", is_number=True),
    Column("peak memory per rank, GiB", is_number=True),
    Column("notes"),
)


def make_pair_tables(configurations: Sequence[Configuration]) -> dict[str, Table]:
    """The tables by the names of their places; one without rows has nothing to compare."""
    return {
        "engines": _engine_table(configurations),
        "ema": _ema_table(configurations),
        "micro-batches": _micro_batch_table(configurations),
        "ranks": _rank_table(configurations),
    }


def _engine_table(configurations: Sequence[Configuration]) -> Table:
    """The same settings on Composer and on the engine torch, there with a CUDA graph too."""
    columns = [
        *WORK_COLUMNS,
        Column("EMA"),
        Column("global batch", is_number=True),
        Column("micro-batch", is_number=True),
        Column("engine"),
        Column("images/s", is_number=True),
        Column("torch over Composer", is_number=True),
        *COST_COLUMNS,
    ]
    rows = []
    for family in families(
        configurations, without=("engine", "cuda_graph"), is_wanted=_has_both_engines
    ):
        composer = next(one for one in family if one.config["engine"] == "composer")
        for one in sorted(family, key=lambda other: other.config["engine"]):
            is_lean = one is not composer
            rows.append(
                [
                    *_work_cells(one),
                    make_cell(one.config["use_ema"]),
                    make_cell(one.config["batch_size"]),
                    make_cell(one.config[MICRO_BATCH]),
                    make_cell(one.config["engine"]),
                    rate_cell(one),
                    ratio_cell(compare(one.rates, composer.rates)) if is_lean else EMPTY,
                    *_cost_cells(one),
                ]
            )
    return Table("engines", "Composer and the lean engine", columns, rows)


def _ema_table(configurations: Sequence[Configuration]) -> Table:
    """What keeping an EMA adds to a step, by implementation."""
    columns = [
        *WORK_COLUMNS,
        Column("engine"),
        Column("images per rank and step", is_number=True),
        Column("EMA"),
        Column("images/s", is_number=True),
        Column("adds to a step, %", is_number=True),
        *COST_COLUMNS,
    ]
    rows = []
    for family in families(
        configurations, without=("use_ema", *EMA_SETTINGS), is_wanted=_has_ema_and_none
    ):
        plain = next(one for one in family if not one.config["use_ema"])
        for one in sorted(family, key=lambda other: other.config["use_ema"]):
            has_ema = one is not plain
            rows.append(
                [
                    *_work_cells(plain),
                    make_cell(one.config["engine"]),
                    make_cell(one.config["batch_size"] // one.num_ranks),
                    make_cell(_describe_ema(one.config)),
                    rate_cell(one),
                    _added_cell(compare(plain.rates, one.rates)) if has_ema else EMPTY,
                    *_cost_cells(one),
                ]
            )
    return Table("ema", "A step with and without the EMA", columns, rows)


def _micro_batch_table(configurations: Sequence[Configuration]) -> Table:
    """Micro-batches, and those that activation checkpointing makes room for."""
    columns = [
        *WORK_COLUMNS,
        Column("engine"),
        Column("EMA"),
        Column("activation checkpointing"),
        Column("global batch", is_number=True),
        Column("micro-batch", is_number=True),
        Column("images/s", is_number=True),
        *COST_COLUMNS,
    ]
    rows = [
        [
            *_work_cells(one),
            make_cell(one.config["engine"]),
            make_cell(one.config["use_ema"]),
            make_cell(one.config["activation_checkpointing"]),
            make_cell(one.config["batch_size"]),
            make_cell(one.config[MICRO_BATCH]),
            rate_cell(one),
            *_cost_cells(one),
        ]
        for family in families(
            configurations,
            without=(MICRO_BATCH, "batch_size", "activation_checkpointing"),
            is_wanted=lambda family: len({one.config[MICRO_BATCH] for one in family}) > 1,
        )
        for one in sorted(family, key=_checkpointing_and_micro_batch)
    ]
    return Table("micro-batches", "Micro-batches", columns, rows)


def _rank_table(configurations: Sequence[Configuration]) -> Table:
    """One rank beside several that share its work, on the same number of threads in all."""
    columns = [
        *WORK_COLUMNS,
        Column("engine"),
        Column("global batch", is_number=True),
        Column("ranks", is_number=True),
        Column("threads per rank", is_number=True),
        Column("images/s", is_number=True),
        Column("over one rank with as many threads", is_number=True),
        *COST_COLUMNS,
    ]
    rows = []
    for family in families(
        configurations,
        without=("num_devices", "num_nodes", MICRO_BATCH, THREADS, *RANK_SETTINGS),
        is_wanted=lambda family: len({one.num_ranks for one in family}) > 1,
    ):
        by_threads = {_num_threads(one): one for one in family if one.num_ranks == 1}
        for one in sorted(family, key=lambda other: other.num_ranks):
            alone = by_threads.get(_num_threads(one)) if one.num_ranks > 1 else None
            rows.append(
                [
                    *_work_cells(one),
                    make_cell(one.config["engine"]),
                    make_cell(one.config["batch_size"]),
                    make_cell(one.num_ranks),
                    make_cell(one.config[THREADS]),
                    rate_cell(one),
                    ratio_cell(compare(one.rates, alone.rates)) if alone is not None else EMPTY,
                    *_cost_cells(one),
                ]
            )
    return Table("ranks", "One rank and several", columns, rows)


def _work_cells(one: Configuration) -> list[Cell]:
    return [
        make_cell(f"{one.num_ranks} x {describe_device(one.runs[0])}"),
        make_cell(one.config["latents"]),
        make_cell(one.config["image_size"]),
        make_cell(describe_recipe(one.runs[0])),
    ]


def _cost_cells(one: Configuration) -> list[Cell]:
    return [
        make_cell(one.step_time_s),
        memory_cell(one),
        make_cell(notes_of(one), unknown=""),
    ]


def _added_cell(comparison: Comparison) -> Cell:
    """How much longer the second of two takes, from the first's rate over the second's."""
    percent, interval = 100 * (comparison.ratio - 1), comparison.interval
    text = f"{percent:.1f}"
    if interval is not None:
        text += f" ({100 * (interval.low - 1):.1f} to {100 * (interval.high - 1):.1f})"
    return Cell(text, percent)


def _describe_ema(config: Mapping[str, Any]) -> str:
    if not config["use_ema"]:
        return "none"
    num_steps = config["ema_interval_batches"]
    return config["ema_impl"] + (f", every {num_steps} steps" if num_steps > 1 else "")


def _num_threads(one: Configuration) -> int:
    """Threads of all ranks together."""
    return one.num_ranks * one.config[THREADS]


def _checkpointing_and_micro_batch(one: Configuration) -> tuple[str, int]:
    return one.config["activation_checkpointing"], one.config[MICRO_BATCH]


def _has_both_engines(family: Sequence[Configuration]) -> bool:
    return {"composer", "torch"} <= {one.config["engine"] for one in family}


def _has_ema_and_none(family: Sequence[Configuration]) -> bool:
    return {True, False} <= {one.config["use_ema"] for one in family}
