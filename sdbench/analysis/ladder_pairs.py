"""Tables of the cost or gain of Composer, the EMA, micro-batches and ranks.

Each table compares configurations that differ in its subject only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sdbench.analysis.compare_match import compare_rows
from sdbench.analysis.ladder import (
    EMA_SETTINGS,
    RANK_SETTINGS,
    THREADS,
    Configuration,
    describe_recipe,
    families,
)
from sdbench.analysis.ladder_tables import how_sure, ratio_cell
from sdbench.record.configuration import place_of_encoders
from sdbench.report.runs import (
    describe_devices,
    notes_cell,
    peak_memory_cell,
    rates_cell,
    summary_cell,
)
from sdbench.report.tables import EMPTY, Cell, Field, Table, tabulate

MICRO_BATCH = "device_train_microbatch_size"
CHECKPOINTING = "activation_checkpointing"
# A configuration and the one that it is set against, if there is one.
Pair = tuple[Configuration, Configuration | None]


def make_pair_tables(configurations: Sequence[Configuration]) -> dict[str, Table]:
    """The tables by the names of their places; one may have no rows."""
    tables = (
        ("engines", "Composer and the lean engine", ENGINES, _pair_engines),
        ("ema", "A step with and without the EMA", EMAS, _pair_emas),
        ("micro-batches", "Micro-batches", MICRO_BATCHES, _pair_micro_batches),
        ("ranks", "One rank and several", RANKS, _pair_ranks),
    )
    return {
        name: tabulate(fields, pair(configurations), name=name, caption=caption)
        for name, caption, fields, pair in tables
    }


def _pair_engines(configurations: Sequence[Configuration]) -> Iterator[Pair]:
    """The same settings on Composer and on the engine torch, there with a CUDA graph too."""
    for family in families(configurations, without=("engine", "cuda_graph")):
        by_engine = {one.config["engine"]: one for one in reversed(family)}
        if {"composer", "torch"} <= by_engine.keys():
            for one in sorted(family, key=lambda other: other.config["engine"]):
                yield one, by_engine["composer"]


def _pair_emas(configurations: Sequence[Configuration]) -> Iterator[Pair]:
    """A run without an EMA, and the same with one of each implementation."""
    for family in families(configurations, without=("use_ema", *EMA_SETTINGS)):
        plain = next((one for one in family if not one.config["use_ema"]), None)
        if plain is not None and any(one.config["use_ema"] for one in family):
            for one in sorted(family, key=lambda other: other.config["use_ema"]):
                yield one, plain


def _pair_micro_batches(configurations: Sequence[Configuration]) -> Iterator[Pair]:
    """Micro-batches, with and without activation checkpointing."""
    for family in families(configurations, without=(MICRO_BATCH, "batch_size", CHECKPOINTING)):
        if len({one.config[MICRO_BATCH] for one in family}) > 1:
            names = (CHECKPOINTING, MICRO_BATCH)
            for one in sorted(family, key=lambda other: [other.config[name] for name in names]):
                yield one, None


def _pair_ranks(configurations: Sequence[Configuration]) -> Iterator[Pair]:
    """One rank, and several that share its work, with the same number of threads in all."""
    without = ("num_devices", "num_nodes", MICRO_BATCH, THREADS, *RANK_SETTINGS)
    for family in families(configurations, without=without):
        if len({one.num_ranks for one in family}) > 1:
            by_threads = {_num_threads(one): one for one in family if one.num_ranks == 1}
            for one in sorted(family, key=lambda other: other.num_ranks):
                yield one, by_threads.get(_num_threads(one)) if one.num_ranks > 1 else None


def _setting(heading: str, name: str) -> Field:
    return Field(heading, lambda pair: pair[0].config[name])


def _of_runs(heading: str, value: Callable[[Sequence[dict[str, Any]]], Any]) -> Field:
    return Field(heading, lambda pair: value(pair[0].runs))


def _ratio(heading: str) -> Field:
    return Field(heading, lambda pair: ratio_cell(*pair))


def _added_time_cell(pair: Pair) -> Cell:
    """How much longer the steps are than those without an EMA, in percent."""
    one, plain = pair
    if one is plain:
        return EMPTY
    comparison = compare_rows(one.rows, plain.rows)

    def form(ratio: float) -> str:
        return f"{100 * (ratio - 1):.1f}"

    text = f"{form(comparison.ratio)}{how_sure(comparison, form)}"
    return Cell(text, 100 * (comparison.ratio - 1))


def _describe_ema(pair: Pair) -> str:
    config = pair[0].config
    if not config["use_ema"]:
        return "none"
    num_steps = config["ema_interval_batches"]
    return config["ema_impl"] + (f", every {num_steps} steps" if num_steps > 1 else "")


def _num_threads(one: Configuration) -> int:
    """Threads of all ranks together."""
    return one.num_ranks * one.config[THREADS]


WORK = (
    _of_runs("device", lambda runs: describe_devices(runs[0])),
    Field("encoders", lambda pair: place_of_encoders(pair[0].config)),
    _setting("px", "image_size"),
    _of_runs("recipe", lambda runs: describe_recipe(runs[0])),
)
COST = (
    _of_runs("step p50, s", lambda runs: summary_cell(runs, "step_time_p50_s")),
    _of_runs("peak memory per rank, GiB", peak_memory_cell),
    _of_runs("notes", notes_cell)._replace(is_left=True),
)
ENGINE, RATE = _setting("engine", "engine"), _of_runs("images/s", rates_cell)
EMA, GLOBAL_BATCH = _setting("EMA", "use_ema"), _setting("global batch", "batch_size")
SIZE = _setting("micro-batch", MICRO_BATCH)
ENGINES = (*WORK, EMA, GLOBAL_BATCH, SIZE, ENGINE, RATE, _ratio("torch over Composer"), *COST)
EMAS = (
    *WORK[:-1],
    # That of the run without an EMA: the EMA has a column of its own.
    Field("recipe", lambda pair: describe_recipe(pair[1].runs[0])),
    ENGINE,
    Field(
        "images per rank and step", lambda pair: pair[0].config["batch_size"] // pair[0].num_ranks
    ),
    Field("EMA", _describe_ema),
    RATE,
    Field("adds to a step, %", _added_time_cell),
    *COST,
)
MICRO_BATCHES = (
    *WORK,
    ENGINE,
    EMA,
    _setting("activation checkpointing", CHECKPOINTING),
    GLOBAL_BATCH,
    SIZE,
    RATE,
    *COST,
)
RANKS = (
    *WORK,
    ENGINE,
    GLOBAL_BATCH,
    Field("ranks", lambda pair: pair[0].num_ranks),
    _setting("threads per rank", THREADS),
    RATE,
    _ratio("over one rank with as many threads"),
    *COST,
)
