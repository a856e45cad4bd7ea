"""Matches the rows of two sides and compares the rates of each pair.

Rows are matched on every setting, except those that have one value in the baseline and another in
the candidate: these are compared. Runs of one configuration are its replicates, and those of one
occasion are one sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.record.configuration import group
from sdbench.record.row import COLUMNS
from sdbench.report.compare_sides import (
    FACTS,
    MACHINE_FIGURES,
    PRODUCT,
    VARIABLE_PREFIX,
    VERSION_PREFIX,
    WHEN,
    NothingToCompareError,
    Row,
    Side,
)
from sdbench.report.figures import MEASURED, as_text
from sdbench.statistics.intervals import NOT_TESTED, Comparison, correct_verdicts, geometric_mean
from sdbench.statistics.occasions import Time, compare_occasions, detectable_change, find_occasions

# The distinct values of a column in the baseline and in the candidate.
Values = tuple[list[Any], list[Any]]

# The columns of this suite that are settings; its others are figures and origins. An unknown column
# counts as a setting, so that a difference in it is never overlooked.
SETTINGS = frozenset(
    (
        *("gpu", "num_gpus", "device", "num_devices", "num_cpu_cores", "num_nodes"),
        *("model", "image_size", "latents", "ema", "preset", "precision", "engine"),
        *("global_batch", "micro_batch", "num_workers", "data_format", "other_settings"),
    )
)
NOT_SETTINGS = (frozenset(COLUMNS) - SETTINGS) | {"read_from", WHEN, *FACTS, *MACHINE_FIGURES}
# The work per image depends on these: with the encoders in the step it is 1.48 times that without,
# at 512 px 4.2 times that at 256. Sides that differ in them are compared only with --allow.
GUARDED = ("latents", "image_size", "precision", "model")
# No settings, but a difference in them is printed; of names only where each side has one.
NAMES = ("kind", "source")
ORIGINS = (*NAMES, "git_commit", *FACTS)
ORIGIN_PREFIXES = (VERSION_PREFIX, VARIABLE_PREFIX)
MAX_VALUES = 3
# Sides that differ in these were measured on different machines, which share no occasion.
MACHINES = frozenset(("gpu", "device", "num_cpu_cores"))
# The matrix product that is timed before a run depends on these; Ray gives a rank fewer threads.
SET_MATRIX_PRODUCT = MACHINES | {
    *("num_gpus", "num_devices", "num_nodes", "precision", "num_threads", "engine"),
}
MAX_MACHINE_CHANGE = 0.05
APART = "not comparable: measured apart"
MACHINE_CHANGED = "not comparable: the machine changed"


@dataclasses.dataclass(frozen=True)
class Pair:
    """The runs of one configuration on both sides.

    Attributes:
        comparison: Rate of the candidate over that of the baseline.
        num_occasions: Number of occasions of the baseline and of the candidate.
        machine: Ratio of each known figure of `MACHINE_FIGURES` that differs by more than 5 %.
        detectable_change: Change that 80 % of such comparisons would find, as a fraction; None if
            unknown.
    """

    baseline: Sequence[Row]
    candidate: Sequence[Row]
    comparison: Comparison
    num_occasions: tuple[int, int]
    machine: Mapping[str, float]
    detectable_change: float | None = None

    @property
    def has_samples_of_several_runs(self) -> bool:
        """Whether runs of one occasion were averaged into one sample."""
        return self.num_occasions != (len(self.baseline), len(self.candidate))


@dataclasses.dataclass(frozen=True)
class Match:
    """Two sides, matched and compared.

    Attributes:
        columns: Settings that rows were matched on.
        compared: Values of baseline and candidate of each setting that is compared.
        missing_on: Name of the side that has no value of a setting, by setting.
        origins: Other differences: values of baseline and candidate by column.
        pairs: Configurations on both sides, in the order of the baseline.
        only_baseline: Runs of each configuration that the candidate lacks.
        only_candidate: Runs of each configuration that the baseline lacks.
        mean: Geometric mean of the ratios of the pairs.
    """

    baseline: Side
    candidate: Side
    columns: Sequence[str]
    compared: dict[str, tuple[str, str]]
    missing_on: dict[str, str]
    origins: dict[str, tuple[str, str]]
    pairs: Sequence[Pair]
    only_baseline: Sequence[Sequence[Row]]
    only_candidate: Sequence[Sequence[Row]]
    mean: Comparison


def match(
    baseline: Side, candidate: Side, *, between: Sequence[str] = (), allow: Sequence[str] = ()
) -> Match:
    """Match two sides.

    Args:
        baseline: One side.
        candidate: The other.
        between: Settings to compare, beside those that have one value on each side.
        allow: Settings of `GUARDED` in which the sides may differ.

    Raises:
        ConfigError: If they differ in a guarded setting, if no configuration is on both sides, or
            if rows with the same settings are not replicates.
    """
    known = [_known_settings(side) for side in (baseline, candidate)]
    common = [column for column in known[0] if column in known[1]]
    if baseline.is_of_records and candidate.is_of_records:
        # Each of them has a column of its own; this one differs by who chose a value, too.
        common = [column for column in common if column != "other_settings"]
    values = {column: _values(baseline, candidate, column) for column in common}
    compared = _in_words(
        {name: sides for name, sides in values.items() if name in between or _is_apart(sides)}
    )
    _check_guarded(compared, allow=allow)
    _check_both_tell(known, (baseline, candidate), allow=allow)
    columns = [column for column in common if column not in compared]
    ours, theirs = (
        group(side.rows, key_of=lambda row: tuple(row.get(column) for column in columns))
        for side in (baseline, candidate)
    )
    keys = [key for key in ours if key in theirs]
    if not keys:
        raise _nothing_matches({column: values[column] for column in columns}, allow=allow)
    for runs in (groups[key] for groups in (ours, theirs) for key in keys):
        _check_replicates(runs, compared)
    origins = _differing_origins(
        *([row for key in keys for row in groups[key]] for groups in (ours, theirs))
    )
    pairs = _correct(
        [_compare_runs(ours[key], theirs[key], compared=compared, origins=origins) for key in keys]
    )
    return Match(
        baseline=baseline,
        candidate=candidate,
        columns=columns,
        compared=compared,
        missing_on={
            column: side.name
            for side, mine, other in ((baseline, *known), (candidate, *reversed(known)))
            for column in other
            if column not in mine
        },
        origins=origins,
        pairs=pairs,
        only_baseline=[runs for key, runs in ours.items() if key not in theirs],
        only_candidate=[runs for key, runs in theirs.items() if key not in ours],
        mean=geometric_mean(
            [
                # An occasion affects all rows alike, so they are not independent.
                _without_verdict(pair.comparison, NOT_TESTED)
                if pair.has_samples_of_several_runs
                else pair.comparison
                for pair in pairs
            ]
        ),
    )


def compare_rows(baseline: Sequence[Row], candidate: Sequence[Row]) -> Comparison:
    """Compare the runs of two configurations, whatever they differ in.

    Args:
        baseline: Runs of one configuration that ended well, by `row_of_run`.
        candidate: Those of the other.

    Returns:
        What `match` says of such a pair; but where a side has a single run and not all runs are of
        one occasion, they count as measured apart.
    """
    rows = [*baseline, *candidate]
    compared = [
        column
        for column in _settings_in(rows)
        if {row.get(column) for row in baseline} != {row.get(column) for row in candidate}
    ]
    origins = _differing_origins(baseline, candidate)
    comparison = _compare_runs(baseline, candidate, compared=compared, origins=origins).comparison
    if comparison.verdict == NOT_TESTED and len(find_occasions(_times_of(rows))) > 1:
        return _without_verdict(comparison, APART)
    return comparison


def _compare_runs(
    baseline: Sequence[Row],
    candidate: Sequence[Row],
    *,
    compared: Collection[str],
    origins: Mapping[str, tuple[str, str]],
) -> Pair:
    """Compare the runs of one configuration, unless the machine may be what differs."""
    times, other_times = map(_times_of, (candidate, baseline))
    if not MACHINES.isdisjoint(compared):
        occasions = find_occasions(times), find_occasions(other_times)
    else:
        occasions = find_occasions(times, other_times), find_occasions(other_times, times)

    def over_occasions(name: str) -> Comparison | None:
        figures = [[row.get(name) for row in side] for side in (candidate, baseline)]
        if not all(_is_figure(figure) for side in figures for figure in side):
            return None
        return compare_occasions(*figures, occasions=occasions)

    comparison = over_occasions("images_per_second")
    assert comparison is not None  # rows without a rate are left out of a side
    machine = {
        name: found.ratio for name in MACHINE_FIGURES if _has_changed(found := over_occasions(name))
    }
    if comparison.interval is None and min(len(baseline), len(candidate)) > 1:
        comparison = _without_verdict(comparison, APART)
    elif comparison.interval is not None and any(
        not _explains(name, compared, origins) for name in machine
    ):
        comparison = _without_verdict(comparison, MACHINE_CHANGED)
    return Pair(
        baseline,
        candidate,
        comparison,
        num_occasions=tuple(map(len, reversed(occasions))),
        machine=machine,
    )


def _times_of(rows: Sequence[Row]) -> list[Time]:
    return [row.get(WHEN, Time(None)) for row in rows]


def _is_figure(value: Any) -> bool:
    """Whether a cell has a figure: a broken sensor may report 0, and a table may hold any text."""
    return isinstance(value, int | float) and value > 0


def _has_changed(figure: Comparison | None) -> bool:
    """Whether a figure of the machine differs, beyond chance where that is known."""
    if figure is None or abs(figure.ratio - 1) <= MAX_MACHINE_CHANGE:
        return False
    return figure.interval is None or not figure.interval.low <= 1 <= figure.interval.high


def _explains(name: str, compared: Collection[str], origins: Mapping[str, tuple[str, str]]) -> bool:
    """Whether a difference of the sides may itself change a figure of the machine.

    A matrix product depends on libraries and their environment variables; the clock and the
    temperature of a GPU depend on its load, that is on every setting and on the code.
    """
    between = [
        column
        for column, (ours, theirs) in origins.items()
        if column not in NAMES and ours != theirs
    ]
    if name == PRODUCT:
        return not SET_MATRIX_PRODUCT.isdisjoint(compared) or any(
            column.startswith(ORIGIN_PREFIXES) for column in between
        )
    return bool(compared or between)


def _without_verdict(comparison: Comparison, verdict: str) -> Comparison:
    return Comparison(comparison.ratio, None, verdict)


def _correct(pairs: Sequence[Pair]) -> list[Pair]:
    """Correct the verdicts for the number of tests, and add the change that was detectable."""
    comparisons = correct_verdicts([pair.comparison for pair in pairs])
    num_tests = sum(comparison.interval is not None for comparison in comparisons)
    return [
        dataclasses.replace(
            pair,
            comparison=comparison,
            detectable_change=detectable_change(comparison, num_tests=num_tests),
        )
        for pair, comparison in zip(pairs, comparisons, strict=True)
    ]


def _known_settings(side: Side) -> list[str]:
    """Settings that at least one row of this side has a value for."""
    return [
        column
        for column in _settings_in(side.rows)
        if any(row.get(column) is not None for row in side.rows)
    ]


def _settings_in(rows: Iterable[Row]) -> list[str]:
    """The columns that are settings."""
    return [
        column
        for column in dict.fromkeys(column for row in rows for column in row)
        if column not in NOT_SETTINGS and not column.startswith(ORIGIN_PREFIXES)
    ]


def _values(baseline: Side, candidate: Side, column: str) -> Values:
    """The distinct values on each side, in order."""
    return tuple(
        list(dict.fromkeys(row.get(column) for row in side.rows)) for side in (baseline, candidate)
    )


def _is_apart(sides: Values) -> bool:
    """Whether each side has one value and the two differ."""
    ours, theirs = sides
    return len(ours) == len(theirs) == 1 and ours != theirs


def _in_words(values: Mapping[str, Values]) -> dict[str, tuple[str, str]]:
    return {
        column: tuple(", ".join(as_text(one) or "not told" for one in side) for side in sides)
        for column, sides in values.items()
    }


def _differing_origins(
    baseline: Sequence[Row], candidate: Sequence[Row]
) -> dict[str, tuple[str, str]]:
    """Columns of origin whose values differ between or within the sides."""
    columns = dict.fromkeys(
        column
        for row in (*baseline, *candidate)
        for column in row
        if column in ORIGINS or column.startswith(ORIGIN_PREFIXES)
    )
    origins = {}
    for column in columns:
        unknown = "not set" if column.startswith(VARIABLE_PREFIX) else "not told"
        ours, theirs = (
            list(dict.fromkeys(as_text(row.get(column)) or unknown for row in side))
            for side in (baseline, candidate)
        )
        is_one_each = len(ours) == len(theirs) == 1
        is_same = is_one_each and ours == theirs
        if not is_same and (is_one_each or column not in NAMES):
            origins[column] = (_list_values(ours), _list_values(theirs))
    return origins


def _list_values(values: Sequence[str]) -> str:
    more = len(values) - MAX_VALUES
    return ", ".join(values[:MAX_VALUES]) + (f" and {more} more" if more > 0 else "")


def _check_guarded(compared: dict[str, tuple[str, str]], *, allow: Sequence[str]) -> None:
    for column in GUARDED:
        if column in compared and column not in allow:
            ours, theirs = compared[column]
            raise ConfigError(
                f"the sides differ in {column}, so an image is not the same work on both",
                value=f"{ours} and {theirs}",
                allowed=f"the same {column} on both sides",
                flag=f"--where {column}=..., or compare nevertheless with --allow {column}",
            )


def _check_both_tell(
    known: Sequence[Sequence[str]], sides: Sequence[Side], *, allow: Sequence[str]
) -> None:
    """Refuse two sides if only one has the columns that determine the work of an image."""
    for column in ("latents", "image_size"):
        lacking = [
            side.name for side, names in zip(sides, known, strict=True) if column not in names
        ]
        if len(lacking) == 1 and column not in allow:
            raise ConfigError(
                f"one side does not tell its {column}, so an image may be other work on the other",
                value=lacking[0],
                allowed=f"a column {column} on both sides",
                flag=f"--allow {column}",
            )


def _nothing_matches(
    values: Mapping[str, Values], *, allow: Sequence[str]
) -> NothingToCompareError:
    apart = _in_words(
        {name: sides for name, sides in values.items() if set(sides[0]).isdisjoint(sides[1])}
    )
    _check_guarded(apart, allow=allow)
    described = "; ".join(
        f"{column}: {ours} and {theirs}" for column, (ours, theirs) in apart.items()
    )
    return NothingToCompareError(
        "no configuration is on both sides",
        value=described or "no single setting that explains it",
        allowed="at least one row whose settings are the same on both sides",
        flag=f"--between {','.join(apart) or 'COLUMN'}",
    )


def _check_replicates(rows: Sequence[Row], compared: Iterable[str]) -> None:
    """Check that replicates have one value of each compared setting, and one source."""
    for column in compared:
        _check_one_value(rows, column, "a side has several values of what is compared")
    if any(row.get("kind") != MEASURED for row in rows):
        _check_one_value(
            rows,
            "source",
            "figures of several sources are no runs of one configuration "
            "(rows of the kind measured would be)",
        )


def _check_one_value(rows: Sequence[Row], column: str, what: str) -> None:
    values = list(dict.fromkeys(as_text(row.get(column)) for row in rows))
    if len(values) > 1:
        raise ConfigError(
            what,
            value=" and ".join(values[:3]),
            allowed=f"one {column} for each configuration",
            flag=f"--where {column}=...",
        )
