"""`find_ladders` finds which runs are which rung of the ladder, by the settings in their records.

A configuration is told by its speed-ups that differ from those of the preset seed. One rung away
from seed is that rung alone; the longest chain of configurations, each with one rung more than the
one before, is the ladder climbed rung by rung.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sdbench.record.configuration import settings_of
from sdbench.report.ladder_rungs import describe_flags, find_rung
from sdbench.report.throughput_table import describe_device, describe_work
from sdbench.settings.config import PRESETS, SETTINGS
from sdbench.settings.setting import COMPILED, EMA, ENCODERS, GPU, RANKS, of_device

SEED = PRESETS["seed"]
THREADS = "num_threads"
RANK_SETTINGS, EMA_SETTINGS = (
    tuple(name for name, declared in SETTINGS.items() if declared.acts_with == condition)
    for condition in (RANKS, EMA)
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Runs of one configuration.

    Attributes:
        runs: Their records.
        context: Every setting that is no speed-up, by name; the name of the preset is none.
        added: The speed-ups that differ from those of the preset seed, and do something here.
    """

    runs: Sequence[dict[str, Any]]
    context: Mapping[str, Any]
    added: Mapping[str, Any]

    @property
    def rates(self) -> list[float]:
        """Images/s of each run."""
        return [run["summary"]["images_per_second"] for run in self.runs]

    @property
    def step_time_s(self) -> float:
        """Median over the runs of their median steps."""
        return statistics.median(run["summary"]["step_time_p50_s"] for run in self.runs)

    @property
    def peak_memory_gib(self) -> float:
        """Of the run with most."""
        return max(run["summary"]["peak_memory_gib"] for run in self.runs)

    @property
    def config(self) -> Mapping[str, Any]:
        """All settings of the first run."""
        return self.runs[0]["config"]

    @property
    def num_ranks(self) -> int:
        """Ranks of a run."""
        return self.runs[0]["ranks"]["world_size"]

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.runs[0]["machine"]["device_type"]

    @property
    def preset(self) -> str | None:
        """The preset that this is, with none of its speed-ups changed by a flag."""
        return next((name for run in self.runs if (name := pure_preset(run)) is not None), None)


@dataclasses.dataclass(frozen=True)
class Ladder:
    """What was measured in one context.

    Attributes:
        base: The preset seed.
        alone: Configurations of one rung on top of it.
        chain: Configurations of ever one rung more, without the base; it ends with the preset fast
            where that was reached.
        fast: The preset fast; None where it was not measured.
        beyond: Configurations that are one rung away from fast, with one more or without one, and
            not in the chain.
    """

    base: Configuration
    alone: Sequence[Configuration]
    chain: Sequence[Configuration]
    fast: Configuration | None
    beyond: Sequence[Configuration]

    @property
    def caption(self) -> str:
        """Device and work, in a line."""
        run, config = self.base.runs[0], self.base.config
        parts = [
            f"{self.base.num_ranks} x {describe_device(run)}",
            describe_work(image_size=config["image_size"], latents=config["latents"]),
            run["workload"]["architecture"],
            f"engine {config['engine']}",
            f"global batch {config['batch_size']}",
            f"micro-batch {config['device_train_microbatch_size']}",
            "EMA" if config["use_ema"] else "no EMA",
        ]
        return ", ".join(parts)


def read_configurations(records: Iterable[dict[str, Any]]) -> list[Configuration]:
    """Put the runs of one configuration together, in the order in which each was first seen.

    A record of a version of the suite that lacked one of the speed-ups does not tell what it did
    and is left out.

    Args:
        records: Records of training runs with the status ok.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        if SEED.keys() <= record["config"].keys():
            key = (as_key(context_of(record)), as_key(added_to_seed(record)))
            groups.setdefault(key, []).append(record)
    return [
        Configuration(runs, context_of(runs[0]), added_to_seed(runs[0])) for runs in groups.values()
    ]


def added_to_seed(record: dict[str, Any]) -> dict[str, Any]:
    """Speed-ups of a run that differ from those of the preset seed and do something there."""
    config = record["config"]
    on_gpu = record["machine"]["device_type"] == GPU
    idle = idle_settings(config, num_ranks=record["ranks"]["world_size"])
    added = {}
    for name, value in SEED.items():
        seed_value = of_device(value, on_gpu=on_gpu)
        if config[name] != seed_value and name not in idle:
            added[name] = config[name]
    if _has_own_threads(record):
        added[THREADS] = config[THREADS]
    return added


def context_of(record: dict[str, Any]) -> dict[str, Any]:
    """Every setting of a run, and what it ran on, but for its speed-ups and the preset's name."""
    left_out = {*SEED, "preset", THREADS}
    return {name: value for name, value in settings_of(record).items() if name not in left_out}


def idle_settings(config: Mapping[str, Any], *, num_ranks: int) -> set[str]:
    """Speed-ups that change nothing in a run, whatever their value.

    Args:
        config: All settings of the run.
        num_ranks: Its ranks.
    """
    has = {
        RANKS: num_ranks > 1,
        EMA: config["use_ema"],
        ENCODERS: config["latents"] == "online",
        COMPILED: config["compile"] != "none",
        None: True,
    }
    return {name for name, declared in SETTINGS.items() if not has[declared.acts_with]}


def pure_preset(record: dict[str, Any]) -> str | None:
    """The preset of a run whose speed-ups are all as the preset has them; None for another."""
    has_own = bool(_own_speedups(record)) or _has_own_threads(record)
    return None if has_own else record["config"]["preset"]


def _own_speedups(record: dict[str, Any]) -> dict[str, Any]:
    """Speed-ups that the user set to something else than the preset does."""
    config, origin = record["config"], record["origin"]
    on_gpu = record["machine"]["device_type"] == GPU
    preset = PRESETS[config["preset"]]
    return {
        name: config[name]
        for name in SEED
        if origin.get(name) in ("flag", "file")
        and config[name] != of_device(preset[name], on_gpu=on_gpu)
    }


def describe_recipe(record: dict[str, Any]) -> str:
    """The preset of a run, and the flags of speed-ups that the user set on top of it."""
    config = record["config"]
    idle = idle_settings(config, num_ranks=record["ranks"]["world_size"])
    own = {name: value for name, value in _own_speedups(record).items() if name not in idle}
    if record["origin"].get(THREADS) in ("flag", "file"):
        own[THREADS] = config[THREADS]
    return describe_flags({"preset": config["preset"], **own})


def find_ladders(configurations: Sequence[Configuration]) -> list[Ladder]:
    """One ladder for every context in which the preset seed was measured, with rungs."""
    ladders = []
    for base in configurations:
        if base.added:
            continue
        others = [one for one in configurations if one.context == base.context and one.added]
        if others:
            ladders.append(_make_ladder(base, others))
    return ladders


def _make_ladder(base: Configuration, others: Sequence[Configuration]) -> Ladder:
    fast = next((one for one in others if one.preset == "fast"), None)
    chains = _find_chains(base, others)
    to_fast = [chain for chain in chains if chain[-1] is fast]
    chain = max(to_fast or chains, key=len)[1:]
    rest = [one for one in others if one not in chain]
    return Ladder(
        base=base,
        alone=[one for one in others if is_one_rung(one.added)],
        chain=chain,
        fast=fast,
        beyond=[one for one in rest if fast is not None and _is_beside(fast, one)],
    )


def _find_chains(base: Configuration, others: Iterable[Configuration]) -> list[list[Configuration]]:
    """The longest chain to every configuration that has one, from the base on.

    Each configuration of a chain has one rung more than the one before. Of several equally long
    chains, the first is the one whose last configuration was measured first.
    """
    chains = [[base]]
    for one in sorted(others, key=lambda other: len(other.added)):
        before = [chain for chain in chains if is_one_rung(difference(chain[-1], one))]
        if before:
            chains.append([*max(before, key=len), one])
    return chains


def difference(before: Configuration, after: Configuration) -> dict[str, Any]:
    """What `after` has on top of `before`; empty if it has not all that `before` has."""
    if any(after.added.get(name) != value for name, value in before.added.items()):
        return {}
    return {name: value for name, value in after.added.items() if name not in before.added}


def changes(before: Configuration, after: Configuration) -> dict[str, Any]:
    """The speed-ups in which two configurations differ, as `after` has them."""
    names = {**after.added, **before.added}
    return {name: after.config[name] for name in names if before.config[name] != after.config[name]}


def _is_beside(fast: Configuration, one: Configuration) -> bool:
    """Whether one has a rung more than fast, or lacks one."""
    return is_one_rung(changes(fast, one)) or is_one_rung(changes(one, fast))


def is_one_rung(added: Mapping[str, Any]) -> bool:
    """Whether settings are one step of the ladder: a single one, or several that go together."""
    return len(added) == 1 or find_rung(added) is not None


def families(
    configurations: Iterable[Configuration],
    *,
    without: Iterable[str],
    is_wanted: Callable[[Sequence[Configuration]], bool],
) -> list[list[Configuration]]:
    """Configurations that are the same but for some settings.

    Args:
        configurations: All of them.
        without: Names of those settings.
        is_wanted: Whether a family says something.
    """
    names = set(without)
    found: dict[tuple[Any, ...], list[Configuration]] = {}
    for one in configurations:
        context, added = (
            as_key({name: value for name, value in settings.items() if name not in names})
            for settings in (one.context, one.added)
        )
        found.setdefault((context, added), []).append(one)
    return [family for family in found.values() if is_wanted(family)]


def as_key(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Settings as what a table of Python can be indexed by."""
    return tuple(sorted((name, str(value)) for name, value in settings.items()))


def _has_own_threads(record: dict[str, Any]) -> bool:
    """Whether a user, and not the number of cores, decided how many threads a rank has."""
    is_flag = record["origin"].get(THREADS) in ("flag", "file")
    return is_flag or record["chosen"].get(THREADS) == "OMP_NUM_THREADS"
