"""Tables of what Composer, the EMA, micro-batches and ranks cost or gain.

The configurations of one comparison differ in what the table is about and in nothing else.
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
from sdbench.report.tables import Cell, Table, make_cell, make_table
from sdbench.report.throughput_table import describe_device
from sdbench.statistics.intervals import Comparison, compare

MICRO_BATCH = "device_train_microbatch_size"


def make_pair_tables(configurations: Sequence[Configuration]) -> dict[str, Table]:
    """The tables by the names of their places; one without rows has nothing to compare."""
    tables = (
        ("engines", "Composer and the lean engine", _engine_rows(configurations)),
        ("ema", "A step with and without the EMA", _ema_rows(configurations)),
        ("micro-batches", "Micro-batches", _micro_batch_rows(configurations)),
        ("ranks", "One rank and several", _rank_rows(configurations)),
    )
    return {
        name: make_table(rows, name=name, caption=caption, left=["notes"])
        for name, caption, rows in tables
    }


def _engine_rows(configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
    """The same settings on Composer and on the engine torch, there with a CUDA graph too."""
    rows = []
    for family in families(
        configurations, without=("engine", "cuda_graph"), is_wanted=_has_both_engines
    ):
        composer = next(one for one in family if one.config["engine"] == "composer")
        rows += [
            {
                **_work(one),
                "EMA": one.config["use_ema"],
                "global batch": one.config["batch_size"],
                "micro-batch": one.config[MICRO_BATCH],
                "engine": one.config["engine"],
                "images/s": rate_cell(one),
                "torch over Composer": _ratio(one, composer),
                **_cost(one),
            }
            for one in sorted(family, key=lambda other: other.config["engine"])
        ]
    return rows


def _ema_rows(configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
    """The time that keeping an EMA adds to a step, by implementation."""
    rows = []
    for family in families(
        configurations, without=("use_ema", *EMA_SETTINGS), is_wanted=_has_ema_and_none
    ):
        plain = next(one for one in family if not one.config["use_ema"])
        rows += [
            {
                **_work(plain),
                "engine": one.config["engine"],
                "images per rank and step": one.config["batch_size"] // one.num_ranks,
                "EMA": _describe_ema(one.config),
                "images/s": rate_cell(one),
                "adds to a step, %": EMPTY
                if one is plain
                else _added_cell(compare(plain.rates, one.rates)),
                **_cost(one),
            }
            for one in sorted(family, key=lambda other: other.config["use_ema"])
        ]
    return rows


def _micro_batch_rows(configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
    """Micro-batches, with and without activation checkpointing."""
    return [
        {
            **_work(one),
            "engine": one.config["engine"],
            "EMA": one.config["use_ema"],
            "activation checkpointing": one.config["activation_checkpointing"],
            "global batch": one.config["batch_size"],
            "micro-batch": one.config[MICRO_BATCH],
            "images/s": rate_cell(one),
            **_cost(one),
        }
        for family in families(
            configurations,
            without=(MICRO_BATCH, "batch_size", "activation_checkpointing"),
            is_wanted=lambda family: len({one.config[MICRO_BATCH] for one in family}) > 1,
        )
        for one in sorted(family, key=_checkpointing_and_micro_batch)
    ]


def _rank_rows(configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
    """One rank beside several that share its work, on the same number of threads in all."""
    rows = []
    for family in families(
        configurations,
        without=("num_devices", "num_nodes", MICRO_BATCH, THREADS, *RANK_SETTINGS),
        is_wanted=lambda family: len({one.num_ranks for one in family}) > 1,
    ):
        by_threads = {_num_threads(one): one for one in family if one.num_ranks == 1}
        rows += [
            {
                **_work(one),
                "engine": one.config["engine"],
                "global batch": one.config["batch_size"],
                "ranks": one.num_ranks,
                "threads per rank": one.config[THREADS],
                "images/s": rate_cell(one),
                "over one rank with as many threads": _ratio(
                    one, by_threads.get(_num_threads(one)) if one.num_ranks > 1 else None
                ),
                **_cost(one),
            }
            for one in sorted(family, key=lambda other: other.num_ranks)
        ]
    return rows


def _work(one: Configuration) -> dict[str, Any]:
    return {
        "device": f"{one.num_ranks} x {describe_device(one.runs[0])}",
        "encoders": one.config["latents"],
        "px": one.config["image_size"],
        "recipe": describe_recipe(one.runs[0]),
    }


def _cost(one: Configuration) -> dict[str, Any]:
    return {
        "step p50, s": one.step_time_s,
        "peak memory per rank, GiB": memory_cell(one),
        "notes": make_cell(notes_of(one), unknown=""),
    }


def _ratio(one: Configuration, baseline: Configuration | None) -> Cell:
    """Rate over that of a baseline; empty without a baseline and for the baseline itself."""
    if baseline is None or one is baseline:
        return EMPTY
    return ratio_cell(compare(one.rates, baseline.rates))


def _added_cell(comparison: Comparison) -> Cell:
    """Longer step of the second of two, in percent, from the ratio of the first to the second."""
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
