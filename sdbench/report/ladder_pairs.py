"""Tables of the cost or gain of Composer, the EMA, micro-batches and ranks.

Each table compares configurations that differ in its subject only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.record.configuration import place_of_encoders
from sdbench.report.compare_match import compare_rows
from sdbench.report.ladder import (
    EMA_SETTINGS,
    RANK_SETTINGS,
    THREADS,
    Configuration,
    describe_recipe,
    families,
)
from sdbench.report.ladder_tables import how_sure, ratio_cell
from sdbench.report.runs import (
    describe_devices,
    notes_cell,
    peak_memory_cell,
    rates_cell,
    summary_cell,
)
from sdbench.report.tables import EMPTY, Cell, Table, make_table

MICRO_BATCH = "device_train_microbatch_size"


def make_pair_tables(configurations: Sequence[Configuration]) -> dict[str, Table]:
    """The tables by the names of their places; one may have no rows."""
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
    for family in families(configurations, without=("engine", "cuda_graph")):
        by_engine = {one.config["engine"]: one for one in reversed(family)}
        if not {"composer", "torch"} <= by_engine.keys():
            continue
        rows += [
            {
                **_work(one),
                "EMA": one.config["use_ema"],
                "global batch": one.config["batch_size"],
                "micro-batch": one.config[MICRO_BATCH],
                "engine": one.config["engine"],
                "images/s": rates_cell(one.runs),
                "torch over Composer": ratio_cell(one, by_engine["composer"]),
                **_cost(one),
            }
            for one in sorted(family, key=lambda other: other.config["engine"])
        ]
    return rows


def _ema_rows(configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
    """The time that keeping an EMA adds to a step, by implementation."""
    rows = []
    for family in families(configurations, without=("use_ema", *EMA_SETTINGS)):
        plain = next((one for one in family if not one.config["use_ema"]), None)
        if plain is None or not any(one.config["use_ema"] for one in family):
            continue
        rows += [
            {
                **_work(plain),
                "engine": one.config["engine"],
                "images per rank and step": one.config["batch_size"] // one.num_ranks,
                "EMA": _describe_ema(one.config),
                "images/s": rates_cell(one.runs),
                "adds to a step, %": _added_time_cell(one, plain),
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
            "images/s": rates_cell(one.runs),
            **_cost(one),
        }
        for family in families(
            configurations, without=(MICRO_BATCH, "batch_size", "activation_checkpointing")
        )
        if len({one.config[MICRO_BATCH] for one in family}) > 1
        for one in sorted(
            family,
            key=lambda other: (other.config["activation_checkpointing"], other.config[MICRO_BATCH]),
        )
    ]


def _rank_rows(configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
    """One rank beside several that share its work, with the same number of threads in all."""
    rows = []
    for family in families(
        configurations, without=("num_devices", "num_nodes", MICRO_BATCH, THREADS, *RANK_SETTINGS)
    ):
        if len({one.num_ranks for one in family}) == 1:
            continue
        by_threads = {_num_threads(one): one for one in family if one.num_ranks == 1}
        rows += [
            {
                **_work(one),
                "engine": one.config["engine"],
                "global batch": one.config["batch_size"],
                "ranks": one.num_ranks,
                "threads per rank": one.config[THREADS],
                "images/s": rates_cell(one.runs),
                "over one rank with as many threads": ratio_cell(
                    one, by_threads.get(_num_threads(one)) if one.num_ranks > 1 else None
                ),
                **_cost(one),
            }
            for one in sorted(family, key=lambda other: other.num_ranks)
        ]
    return rows


def _work(one: Configuration) -> dict[str, Any]:
    return {
        "device": describe_devices(one.runs[0]),
        "encoders": place_of_encoders(one.config),
        "px": one.config["image_size"],
        "recipe": describe_recipe(one.runs[0]),
    }


def _cost(one: Configuration) -> dict[str, Any]:
    return {
        "step p50, s": summary_cell(one.runs, "step_time_p50_s"),
        "peak memory per rank, GiB": peak_memory_cell(one.runs),
        "notes": notes_cell(one.runs),
    }


def _added_time_cell(one: Configuration, plain: Configuration) -> Cell:
    """How much longer the steps are than those without an EMA, in percent."""
    if one is plain:
        return EMPTY
    comparison = compare_rows(one.rows, plain.rows)

    def form(ratio: float) -> str:
        return f"{100 * (ratio - 1):.1f}"

    text = f"{form(comparison.ratio)}{how_sure(comparison, form)}"
    return Cell(text, 100 * (comparison.ratio - 1))


def _describe_ema(config: Mapping[str, Any]) -> str:
    if not config["use_ema"]:
        return "none"
    num_steps = config["ema_interval_batches"]
    return config["ema_impl"] + (f", every {num_steps} steps" if num_steps > 1 else "")


def _num_threads(one: Configuration) -> int:
    """Threads of all ranks together."""
    return one.num_ranks * one.config[THREADS]
