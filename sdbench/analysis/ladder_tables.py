"""Tables of what speed-ups, Composer, the EMA, micro-batches and ranks gain or cost.

A gain is the result of `python -m sdbench compare` for the runs of both configurations: a ratio of
geometric means with a 95 % interval, or the reason why there is no interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sdbench.analysis.compare_match import APART, MACHINE_CHANGED, compare_rows
from sdbench.analysis.ladder import (
    THREADS,
    Configuration,
    Ladder,
    changes,
    describe_recipe,
    difference,
    families,
    find_ladders,
    find_rung,
)
from sdbench.record.configuration import place_of_encoders, work_of
from sdbench.report.runs import (
    describe_devices,
    describe_work,
    notes_cell,
    peak_memory_cell,
    rates_cell,
    summary_cell,
)
from sdbench.report.tables import EMPTY, Cell, Field, Table, tabulate
from sdbench.settings.config import SETTINGS
from sdbench.settings.setting import EMA, RANKS, describe_flags
from sdbench.statistics.intervals import Comparison

SEED_ORIGIN = "mosaicml/diffusion-benchmark"
MICRO_BATCH = "device_train_microbatch_size"
CHECKPOINTING = "activation_checkpointing"
# A configuration and its baseline, if it has one.
Pair = tuple[Configuration, Configuration | None]


def make_ladder_tables(configurations: Sequence[Configuration]) -> list[Table]:
    """A table for each context in which the preset seed and a speed-up were measured."""
    return [
        tabulate(
            LADDER, _climb(ladder), name=f"ladder-{number}", caption=_describe_context(ladder.base)
        ).without_empty_columns()
        for number, ladder in enumerate(find_ladders(configurations), 1)
    ]


def make_pair_tables(configurations: Sequence[Configuration]) -> dict[str, Table]:
    """The tables by the names of their places; one may have no rows."""
    tables = (
        ("engines", "Composer and the lean engine", ENGINES, _pair_engines),
        ("ema", "A step with and without the EMA", EMAS, _pair_emas),
        ("micro-batches", "Micro-batches", MICRO_BATCHES, _pair_micro_batches),
        ("ranks", "One rank and several", SEVERAL_RANKS, _pair_ranks),
    )
    return {
        name: tabulate(fields, pair(configurations), name=name, caption=caption)
        for name, caption, fields, pair in tables
    }


class _Step(NamedTuple):
    """A row of a ladder.

    Attributes:
        alone: The rung on top of the preset seed.
        together: The rung on top of `above`.
        is_climbed: Whether it is in the chain, where each rung should be measured alone too.
    """

    name: str
    effect: str
    origin: str | None
    base: Configuration
    alone: Configuration | None = None
    together: Configuration | None = None
    above: Configuration | None = None
    is_climbed: bool = False

    @property
    def known(self) -> list[Sequence[dict[str, Any]]]:
        """The runs of either configuration."""
        return [one.runs for one in (self.alone, self.together) if one is not None]


def _climb(ladder: Ladder) -> Iterator[_Step]:
    """The rows of a ladder: seed, the chain, fast and its neighbours, then the other rungs."""
    base, fast = ladder.base, ladder.fast
    effect = f"the recipe of {SEED_ORIGIN}"
    yield _Step("--preset seed", effect, SEED_ORIGIN, base, together=base)
    climbed = []
    for above, after in itertools.pairwise([base, *ladder.chain]):
        rung = difference(above, after)
        climbed.append(rung)
        alone = next((one for one in ladder.alone if _own_settings(one.added) == rung), None)
        step = _make_step(rung, base, alone=alone, together=after, above=above)
        yield step._replace(is_climbed=True)
    if fast is not None:
        effect = f"seed {describe_flags(fast.added)}"
        yield _Step("--preset fast", effect, "this suite", base, together=fast)
        for one in ladder.beyond:
            rung = changes(fast, one)
            step = _make_step(rung, base, together=one, above=fast)
            origin = step.origin if find_rung(rung) else _origin(changes(one, fast))
            yield step._replace(name=f"--preset fast {step.name}", origin=origin)
    for alone in ladder.alone:
        if _own_settings(alone.added) not in climbed:
            yield _make_step(alone.added, base, alone=alone)


def _make_step(
    rung: Mapping[str, Any], base: Configuration, **configurations: Configuration | None
) -> _Step:
    name, effect = describe_flags(rung), _describe_effect(rung)
    return _Step(name, effect, _origin(rung), base, **configurations)


def _own_settings(added: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a rung without the settings that it needs."""
    rung = find_rung(added)
    needs = {} if rung is None else rung.needs
    return {name: value for name, value in added.items() if name not in needs}


def _describe_effect(settings: Mapping[str, Any]) -> str:
    """What the settings do, in the words of --help."""
    return "; ".join(SETTINGS[name].help for name in settings)


def _origin(rung: Mapping[str, Any]) -> str | None:
    found = find_rung(rung)
    return None if found is None else found.origin


def _describe_context(base: Configuration) -> str:
    """Device and work of a ladder, in a line."""
    run, config = base.runs[0], base.config
    parts = [
        describe_devices(run),
        describe_work(*work_of(run)),
        f"engine {config['engine']}",
        f"global batch {config['batch_size']}",
        f"micro-batch {config[MICRO_BATCH]}",
        "EMA" if config["use_ema"] else "no EMA",
    ]
    return ", ".join(parts)


def _pair_engines(configurations: Sequence[Configuration]) -> Iterator[Pair]:
    """The same settings on Composer and on the engine torch, the latter also with a CUDA graph."""
    for family in families(configurations, without=("engine", "cuda_graph")):
        by_engine = {one.config["engine"]: one for one in reversed(family)}
        if {"composer", "torch"} <= by_engine.keys():
            for one in sorted(family, key=lambda other: other.config["engine"]):
                yield one, by_engine["composer"]


def _pair_emas(configurations: Sequence[Configuration]) -> Iterator[Pair]:
    """A run without an EMA, and the same run with each implementation of the EMA."""
    for family in families(configurations, without=("use_ema", *_acting_with(EMA))):
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
    """One rank, and several ranks that share its work, with the same total number of threads."""

    def num_threads(one: Configuration) -> int:
        return one.num_ranks * one.config[THREADS]

    without = ("num_devices", "num_nodes", MICRO_BATCH, THREADS, *_acting_with(RANKS))
    for family in families(configurations, without=without):
        if len({one.num_ranks for one in family}) > 1:
            by_threads = {num_threads(one): one for one in family if one.num_ranks == 1}
            for one in sorted(family, key=lambda other: other.num_ranks):
                yield one, by_threads.get(num_threads(one)) if one.num_ranks > 1 else None


def _acting_with(condition: str) -> list[str]:
    """The settings that have an effect only under this condition."""
    return [name for name, declared in SETTINGS.items() if declared.acts_with == condition]


def _ratio_cell(one: Configuration | None, baseline: Configuration | None) -> Cell:
    """The rate over that of the baseline, with its interval; empty for the baseline itself."""
    if one is None or baseline is None or one is baseline:
        return EMPTY
    return _compare(one, baseline, lambda ratio: f"{ratio:.2f}", unit="x")


def _added_time_cell(pair: Pair) -> Cell:
    """How much longer steps take than without an EMA, in percent."""
    one, plain = pair
    if one is plain:
        return EMPTY
    text, ratio = _compare(plain, one, lambda ratio: f"{100 * (ratio - 1):.1f}")
    return Cell(text, 100 * (ratio - 1))


def _compare(
    one: Configuration, baseline: Configuration, form: Callable[[float], str], *, unit: str = ""
) -> Cell:
    return comparison_cell(compare_rows(baseline.rows, one.rows), form, unit=unit)


def comparison_cell(
    comparison: Comparison, form: Callable[[float], str], *, unit: str = ""
) -> Cell:
    """A ratio; in brackets its interval, or why the runs are not comparable."""
    text = f"{form(comparison.ratio)}{unit}"
    if comparison.interval is not None:
        text += f" ({form(comparison.interval.low)} to {form(comparison.interval.high)})"
    elif comparison.verdict in (APART, MACHINE_CHANGED):
        text += f" ({comparison.verdict.partition(': ')[2]})"
    return Cell(text, comparison.ratio)


def _rates_alone(step: _Step) -> Cell:
    if step.alone is None and step.together is not step.base:
        return Cell("not measured", None) if step.is_climbed else EMPTY
    return rates_cell((step.alone or step.base).runs)


def _join(cells: Sequence[Cell]) -> Cell:
    return Cell("; ".join(cell.text for cell in cells), cells[-1].value)


def _step_time_cell(runs: Sequence[dict[str, Any]]) -> Cell:
    return summary_cell(runs, "step_time_p50_s")


def _describe_ema(pair: Pair) -> str:
    config = pair[0].config
    if not config["use_ema"]:
        return "none"
    num_steps = config["ema_interval_batches"]
    return config["ema_impl"] + (f", every {num_steps} steps" if num_steps > 1 else "")


def _setting(heading: str, name: str) -> Field:
    return Field(heading, lambda pair: pair[0].config[name])


LADDER = (
    Field("rung", lambda step: step.name),
    Field("what it does", lambda step: step.effect),
    Field("alone, images/s", _rates_alone),
    Field("alone, over seed", lambda step: _ratio_cell(step.alone, step.base)),
    Field(
        "with those above, images/s",
        lambda step: rates_cell(step.together.runs) if step.together else EMPTY,
    ),
    Field("over the one above", lambda step: _ratio_cell(step.together, step.above)),
    Field("over seed", lambda step: _ratio_cell(step.together, step.base)),
    Field("step p50, s", lambda step: _join(list(map(_step_time_cell, step.known)))),
    Field("peak memory, GiB", lambda step: _join(list(map(peak_memory_cell, step.known)))),
    Field("from", lambda step: step.origin),
    Field("notes", lambda step: notes_cell(list(itertools.chain(*step.known)))),
)
PLACE = (
    Field("device", lambda pair: describe_devices(pair[0].runs[0])),
    Field("encoders", lambda pair: place_of_encoders(pair[0].config)),
    _setting("px", "image_size"),
)
WORK = (*PLACE, Field("recipe", lambda pair: describe_recipe(pair[0].runs[0])))
RATE = Field("images/s", lambda pair: rates_cell(pair[0].runs))
COST = (
    Field("step p50, s", lambda pair: _step_time_cell(pair[0].runs)),
    Field("peak memory per rank, GiB", lambda pair: peak_memory_cell(pair[0].runs)),
    Field("notes", lambda pair: notes_cell(pair[0].runs), is_left=True),
)
ENGINE = _setting("engine", "engine")
HAS_EMA = _setting("EMA", "use_ema")
SIZES = (_setting("global batch", "batch_size"), _setting("micro-batch", MICRO_BATCH))
ENGINES = (
    *(*WORK, HAS_EMA, *SIZES, ENGINE, RATE),
    Field("torch over Composer", lambda pair: _ratio_cell(*pair)),
    *COST,
)
EMAS = (
    *PLACE,
    # The recipe of the run without an EMA: the EMA has a column of its own.
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
    *(*WORK, ENGINE, HAS_EMA, _setting("activation checkpointing", CHECKPOINTING)),
    *(*SIZES, RATE, *COST),
)
SEVERAL_RANKS = (
    *(*WORK, ENGINE, SIZES[0]),
    Field("ranks", lambda pair: pair[0].num_ranks),
    _setting("threads per rank", THREADS),
    RATE,
    Field("over one rank with as many threads", lambda pair: _ratio_cell(*pair)),
    *COST,
)
