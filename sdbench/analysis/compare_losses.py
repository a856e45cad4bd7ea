"""`python -m sdbench compare --losses`: whether the losses of two sets of runs differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sdbench.analysis.training_times import KEPT
from sdbench.base.errors import ConfigError
from sdbench.base.files import refused_unless_read
from sdbench.base.outside import open_table
from sdbench.base.units import counted
from sdbench.record.configuration import settings_of
from sdbench.record.store import BENCHMARK, OK, RECORD_NAME, STEPS_NAME, TRAIN, kind_of
from sdbench.report.runs import name_runs, read_record, read_steps, use_each
from sdbench.report.tables import Field, Table, tabulate
from sdbench.settings.recipe import WatchSettings
from sdbench.settings.setting import declarations
from sdbench.statistics.loss_gate import (
    CORRELATION,
    MIN_BAND_RUNS,
    MIN_STEPS,
    Check,
    judge_losses,
)

INSIDE, OUTSIDE = "inside", "OUTSIDE"
COLUMN = "loss"
# The number of a step, in tables of train.py and of benchmark.py; others may have neither.
NUMBERS = ("step", "index")
# Settings that change no loss: how long and where a run is kept, and what is told about it.
NOT_OF_RECIPE = KEPT - {"on_bad_loss"} | declarations(WatchSettings).keys()
# The place and the machine of a run, which differ between equal runs of one side.
PLACES = ("remote", "local", "device", "num_cpu_cores")


class Curve(NamedTuple):
    """The losses of a run, by step; runs of both sides with one key have the same seeds."""

    name: str
    key: Hashable
    settings: Mapping[str, Any]
    losses: dict[float, float]

    @property
    def identity(self) -> Hashable:
        """What a copy of the run has in common with it; other runs may have the same name."""
        return self.name, self.key, repr(self.losses)


class Verdict(NamedTuple):
    """The answer of the gate; `failures` are reasons why the candidate does not pass."""

    facts: list[str]
    checks: list[Check]
    failures: list[str]


def compare_losses(baseline: Path, candidate: Path, *, tolerance: float) -> Verdict:
    """Compare the losses of the runs of two folders.

    Raises ConfigError if a side has too few runs or steps, several recipes or two runs with the
    same seeds, if the steps differ, or if the baseline has a loss that is no number above 0.
    """
    (ours, our_failures), (theirs, their_failures) = map(_load, (baseline, candidate))
    failures = [*our_failures, *their_failures]
    known = {curve.identity for curve in ours}
    both = sorted(curve.name for curve in theirs if curve.identity in known)
    if both:
        what = f"{counted(len(both), 'run')} on both sides"
        _refuse(what, name_runs(both), "two sides with different runs", flag="A B")
    for curves, path, least in ((ours, baseline, MIN_BAND_RUNS), (theirs, candidate, 1)):
        _check_side(curves, path, least=least)
    lengths = [len(curve.losses) for curve in (*ours, *theirs)]
    num_planned = lengths[0]
    # benchmark.py makes its window longer while steps are not steady: that is not of the losses.
    is_timed = BENCHMARK in (ours[0].settings.get("kind"), theirs[0].settings.get("kind"))
    if not is_timed:
        for curve in ours:
            if len(curve.losses) != num_planned:
                value = f"{curve.name}: {len(curve.losses)} steps"
                _refuse("runs of the baseline differ in length", value, str(num_planned), flag="A")
        failures += [
            f"{curve.name} has {len(curve.losses)} of {num_planned} steps"
            for curve in theirs
            if len(curve.losses) < num_planned
        ]
    steps = list(ours[0].losses)[: min(lengths)]
    for curve in (*ours, *theirs):
        if list(curve.losses)[: len(steps)] != steps:
            others = f"the steps of {ours[0].name}, {steps[0]:g} to {steps[-1]:g}"
            _refuse("runs have losses of other steps", curve.name, others, flag="A B")
    for curve in ours:
        bad = [step for step in steps if not 0 < curve.losses[step] < math.inf]
        if bad:
            value = f"{curve.name}, step {bad[0]:g}: {curve.losses[bad[0]]:g}"
            _refuse("a loss of the baseline is unusable", value, "numbers above 0", flag="A")
    for curve in theirs:
        bad = [step for step, loss in curve.losses.items() if not math.isfinite(loss)]
        if bad:
            failures.append(f"{curve.name}: the loss of step {bad[0]:g} is not finite")
    rows = {curve.key: row for row, curve in enumerate(ours)}
    partners = [rows.get(curve.key) for curve in theirs]
    num_pairs = sum(row is not None for row in partners)
    is_paired = num_pairs == len(theirs) >= MIN_BAND_RUNS
    how = (
        "with the same seeds, compared in pairs"
        if is_paired
        else f"{num_pairs} with the seeds of a baseline run, not compared in pairs"
    )
    facts = [
        f"baseline: {baseline}, {counted(len(ours), 'run')}",
        f"candidate: {candidate}, {counted(len(theirs), 'run')}, {how}",
        *_changes(ours[0].settings, theirs[0].settings),
        f"losses of {len(steps)} steps; of equal recipes at most 1 % have a row outside its band",
    ]
    if len(steps) < max(lengths):
        facts.append(f"not compared: steps after these, of which the longest has {max(lengths)}")
    before, after = (
        np.array([list(curve.losses.values())[: len(steps)] for curve in side])
        for side in (ours, theirs)
    )
    checks = judge_losses(
        before, after, partners=partners if is_paired else None, tolerance=tolerance
    )
    failures += [
        f"{check.what}: {_value(check)}, allowed {_band(check)}, steps {check.first} to "
        f"{check.last}"
        for check in checks
        if not check.is_inside
    ]
    return Verdict(facts, checks, failures)


def make_loss_table(checks: Sequence[Check]) -> Table:
    """A row for each check."""
    return tabulate(FIELDS, checks)


def _load(path: Path) -> tuple[list[Curve], list[str]]:
    """The curves below a path, and why runs there that train have none."""
    failures: list[str] = []
    if not path.is_dir():
        allowed = "a folder of runs, or of tables with a column loss, one for each run"
        _refuse("no such folder", str(path), allowed, flag="A B")
    records = sorted(path.rglob(RECORD_NAME))

    def read_run(file: Path) -> Curve | None:
        record = read_record(file, flag="A B")
        if kind_of(record) not in (BENCHMARK, TRAIN):
            return None
        if record["status"] != OK:
            failures.append(f"{record['run_id']}: {record['status']}")
            return None
        config = record["config"]
        seed, weights_seed = config["seed"], config["weights_seed"]
        key = seed, seed if weights_seed is None else weights_seed
        settings = {"kind": kind_of(record), "max_duration": config.get("max_duration")}
        settings |= {
            name: value for name, value in settings_of(record).items() if name not in NOT_OF_RECIPE
        }
        return _read_curve(file.with_name(STEPS_NAME), record["run_id"], key, settings)

    def read_table(file: Path) -> Curve:
        return _read_curve(file, str(file), str(file.relative_to(path)), {})

    if records:
        curves, left_out = use_each(records, read_run)
    else:
        curves, left_out = use_each(sorted(path.rglob("*.csv")), read_table)
    failures += [f"{file}: it cannot be read" for file in left_out]
    # A run counts once, however many copies of its folder there are.
    found = {curve.identity: curve for curve in curves if curve is not None}
    return list(found.values()), failures


def _read_curve(file: Path, name: str, key: Hashable, settings: Mapping[str, Any]) -> Curve:
    with refused_unless_read(file, "a table", allowed=f"a column {COLUMN}", flag="A B"):
        header = open_table(file, required=[COLUMN]).fieldnames or ()
    number = next((column for column in NUMBERS if column in header), None)
    columns = [COLUMN] if number is None else [COLUMN, number]
    rows = read_steps(file, columns=columns, flag="A B", least=MIN_STEPS)
    losses = {
        position if number is None else row[number]: row[COLUMN]
        for position, row in enumerate(rows, 1)
    }
    if len(losses) < len(rows):
        value = f"{file}: {len(rows)} rows, {len(losses)} steps"
        _refuse("a step occurs twice", value, "each step once", flag="A B")
    return Curve(name, key, settings, losses)


def _check_side(curves: Sequence[Curve], path: Path, *, least: int) -> None:
    if len(curves) < least:
        allowed = f"{least} or more that ended well, each with other seeds"
        value = f"{counted(len(curves), 'run')} in {path}"
        _refuse("a side has too few runs whose losses can be read", value, allowed, flag="A B")
    (key, number), *_ = Counter(curve.key for curve in curves).most_common()
    if number > 1:
        value = f"{number} runs in {path} with seed and weights_seed {key}"
        _refuse("runs of a side have the same seeds", value, "other seeds", flag="--seed")
    names = {name for curve in curves for name in curve.settings}
    for name in sorted(names.difference(PLACES)):
        # A setting that a record does not know may be that of the others.
        values = [curve.settings[name] for curve in curves if name in curve.settings]
        if any(value != values[0] for value in values):
            value = f"{path}: {name} {' and '.join(dict.fromkeys(map(str, values)))}"
            _refuse("a side has several recipes", value, "runs that differ in seeds", flag="A B")


def _changes(settings: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """The settings that differ between the sides, e.g. ``lr: 0.001 -> 0.0012``."""
    if not (settings and others):  # tables have none
        return []
    pairs = [
        (name, settings.get(name, "unknown"), others.get(name, "unknown"))
        for name in sorted(settings.keys() | others.keys())
    ]
    return [f"{name}: {ours} -> {theirs}" for name, ours, theirs in pairs if ours != theirs]


def _refuse(what: str, value: str, allowed: str, *, flag: str) -> None:
    raise ConfigError(what, value=value, allowed=allowed, flag=flag)


def _value(check: Check) -> str:
    if check.what == CORRELATION:
        return f"{check.value:.4f}"
    return f"{100 * check.value:+.3g} %"


def _band(check: Check) -> str:
    if check.what == CORRELATION:
        return f"{check.low:.4f} and more"
    return f"{100 * check.low:+.3g} to {100 * check.high:+.3g} %"


FIELDS = (
    Field("question", lambda check: check.what),
    Field("steps", lambda check: f"{check.first} to {check.last}"),
    Field("candidate against baseline", _value),
    Field("band", _band),
    Field("verdict", lambda check: INSIDE if check.is_inside else OUTSIDE),
)
