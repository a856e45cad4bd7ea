"""Finds the ladder of speed-ups among runs, by the settings in their records.

A configuration is identified by its speed-ups that differ from the preset seed. A rung measured
alone is the preset seed with that rung only. The ladder is the longest chain of configurations in
which each adds one rung to the one before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sdbench.analysis.compare_sides import Row, row_of_run
from sdbench.record.configuration import as_key, group, place_of_encoders, settings_of
from sdbench.settings.config import PRESETS, SETTINGS
from sdbench.settings.data import ONLINE
from sdbench.settings.setting import (
    ANY_NUMBER,
    COMPILED,
    EMA,
    ENCODERS,
    GPU,
    RANKS,
    Rung,
    describe_flags,
    of_device,
)

SEED = PRESETS["seed"]
THREADS = "num_threads"
# Origins of a setting that the user chose.
BY_USER = ("flag", "file")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedRung(Rung):
    """A declared rung with all settings that belong to it, by name.

    `needs_ranks` says whether it has an effect only with several ranks.
    """

    settings: Mapping[str, Any]
    needs_ranks: bool

    def is_part_of(self, added: Mapping[str, Any]) -> bool:
        """Whether these settings contain this rung; `ANY_NUMBER` matches any value."""
        return all(
            name in added and value in (ANY_NUMBER, added[name])
            for name, value in self.settings.items()
        )


def _in_order(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in SETTINGS if name in settings}


RUNGS = tuple(
    NamedRung(
        **vars(rung),
        settings=_in_order({name: rung.value, **rung.together}),
        needs_ranks=declared.acts_with == RANKS,
    )
    for name, declared in SETTINGS.items()
    for rung in declared.rungs
)


def find_rung(added: Mapping[str, Any]) -> NamedRung | None:
    """The rung with these settings, which may include the settings that it needs; or None."""
    for rung in RUNGS:
        rest = {name: value for name, value in added.items() if name not in rung.settings}
        if rung.is_part_of(added) and rest in ({}, rung.needs):
            return rung
    return None


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Records of the runs of one configuration.

    Attributes:
        context: Every setting that is not a speed-up, by name, without the name of the preset.
        added: The speed-ups that differ from the preset seed and have an effect here.
    """

    runs: Sequence[dict[str, Any]]
    context: Mapping[str, Any]
    added: Mapping[str, Any]

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The runs as rows of a comparison."""
        return [row_of_run(run) for run in self.runs]

    @property
    def config(self) -> Mapping[str, Any]:
        """All settings of the first run."""
        return self.runs[0]["config"]

    @property
    def num_ranks(self) -> int:
        """Ranks of a run."""
        return self.runs[0]["ranks"]["world_size"]

    @property
    def preset(self) -> str | None:
        """The preset of the runs, if none of its speed-ups was changed by a flag."""
        return next((name for run in self.runs if (name := _pure_preset(run)) is not None), None)


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The configurations measured in one context.

    Attributes:
        base: The preset seed.
        alone: Configurations with one rung.
        chain: Configurations with one more rung each, up to the preset fast if a chain reaches it.
        beyond: Configurations outside the chain with one rung more or less than fast.
    """

    base: Configuration
    alone: Sequence[Configuration]
    chain: Sequence[Configuration]
    fast: Configuration | None
    beyond: Sequence[Configuration]


def read_configurations(records: Iterable[dict[str, Any]]) -> list[Configuration]:
    """Group runs by configuration, in the order in which each was first seen.

    A record that does not know one of the speed-ups is left out.
    """
    groups = group(
        (record for record in records if None not in map(record["config"].get, SEED)),
        key_of=lambda record: (as_key(_context_of(record)), as_key(_added_to_seed(record))),
    )
    return [
        Configuration(runs, _context_of(runs[0]), _added_to_seed(runs[0]))
        for runs in groups.values()
    ]


def _added_to_seed(record: dict[str, Any]) -> dict[str, Any]:
    """Speed-ups that differ from the preset seed and have an effect in this run."""
    return _changed_from(SEED, record) | _own_threads(record)


def _pure_preset(record: dict[str, Any]) -> str | None:
    """The preset of a run, or None if the user changed one of its speed-ups."""
    has_own = _own_speedups(record) or _own_threads(record)
    return None if has_own else record["config"]["preset"]


def describe_recipe(record: dict[str, Any]) -> str:
    """The preset of a run, and the flags of speed-ups that the user set on top of it."""
    chosen = {"preset": record["config"]["preset"], **_own_speedups(record)}
    if record["origin"].get(THREADS) in BY_USER:
        chosen[THREADS] = record["config"][THREADS]
    return describe_flags(chosen)


def _context_of(record: dict[str, Any]) -> dict[str, Any]:
    """Every setting of a run and its hardware, without speed-ups and the preset's name."""
    left_out = {*SEED, "preset", THREADS}
    return {name: value for name, value in settings_of(record).items() if name not in left_out}


def _changed_from(preset: Mapping[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Speed-ups that differ from a preset and have an effect in this run."""
    config = record["config"]
    on_gpu = record["machine"]["device_type"] == GPU
    acts = {
        RANKS: record["ranks"]["world_size"] > 1,
        EMA: config["use_ema"],
        ENCODERS: place_of_encoders(config) == ONLINE,
        COMPILED: config["compile"] != "none",
        None: True,
    }
    return {
        name: config[name]
        for name in SEED
        if acts[SETTINGS[name].acts_with] and config[name] != of_device(preset[name], on_gpu=on_gpu)
    }


def _own_speedups(record: dict[str, Any]) -> dict[str, Any]:
    """Speed-ups that the user set to a value other than that of the preset."""
    changed = _changed_from(PRESETS[record["config"]["preset"]], record)
    return {name: value for name, value in changed.items() if record["origin"].get(name) in BY_USER}


def _own_threads(record: dict[str, Any]) -> dict[str, Any]:
    """The number of threads of a rank, if the user chose it."""
    is_flag = record["origin"].get(THREADS) in BY_USER
    has_own = is_flag or record["chosen"].get(THREADS) == "OMP_NUM_THREADS"
    return {THREADS: record["config"][THREADS]} if has_own else {}


def find_ladders(configurations: Sequence[Configuration]) -> list[Ladder]:
    """One ladder for every context in which the preset seed and a speed-up were measured."""
    ladders = []
    for base in configurations:
        others = [one for one in configurations if one.context == base.context and one.added]
        if others and not base.added:
            ladders.append(_make_ladder(base, others))
    return ladders


def _make_ladder(base: Configuration, others: Sequence[Configuration]) -> Ladder:
    fast = next((one for one in others if one.preset == "fast"), None)
    # The longest chain from the base to each configuration. Among chains of one length, the chain
    # whose last configuration was measured first comes first.
    chains = [[base]]
    for one in sorted(others, key=lambda other: len(other.added)):
        before = [chain for chain in chains if is_one_rung(difference(chain[-1], one))]
        if before:
            chains.append([*max(before, key=len), one])
    to_fast = [chain for chain in chains if chain[-1] is fast]
    chain = max(to_fast or chains, key=len)[1:]
    return Ladder(
        base=base,
        alone=[one for one in others if is_one_rung(one.added)],
        chain=chain,
        fast=fast,
        beyond=[
            one
            for one in others
            if fast is not None
            and one not in chain
            and (is_one_rung(changes(fast, one)) or is_one_rung(changes(one, fast)))
        ],
    )


def difference(before: Configuration, after: Configuration) -> dict[str, Any]:
    """The speed-ups that `after` adds to `before`; empty if it lacks or changes one of `before`."""
    if any(after.added.get(name) != value for name, value in before.added.items()):
        return {}
    return {name: value for name, value in after.added.items() if name not in before.added}


def changes(before: Configuration, after: Configuration) -> dict[str, Any]:
    """The speed-ups in which two configurations differ, with the values of `after`."""
    names = {**after.added, **before.added}
    return {name: after.config[name] for name in names if before.config[name] != after.config[name]}


def is_one_rung(added: Mapping[str, Any]) -> bool:
    """Whether settings are one rung: a single one, or several that belong together."""
    return len(added) == 1 or find_rung(added) is not None


def families(
    configurations: Iterable[Configuration], *, without: Iterable[str]
) -> list[list[Configuration]]:
    """Group configurations that differ only in the settings named in `without`."""
    names = set(without)

    def key_of(one: Configuration) -> tuple[Any, ...]:
        # A setting is part of the context or a speed-up, never both.
        settings = {**one.context, **one.added}
        return as_key({name: value for name, value in settings.items() if name not in names})

    return list(group(configurations, key_of=key_of).values())
