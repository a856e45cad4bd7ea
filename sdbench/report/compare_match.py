"""Which figures of two sides are of the same configuration, and what differs between the sides?

Rows are matched on every setting, except those that are one value throughout the baseline and
another throughout the candidate: these are what is being compared, and they are named. Runs of one
configuration are its replicates.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.record.row import COLUMNS
from sdbench.report.compare_sides import VERSION_PREFIX, NothingToCompareError, Row, Side
from sdbench.report.figures import MEASURED, as_text
from sdbench.statistics.intervals import Comparison, compare, correct_verdicts, geometric_mean

Groups = dict[tuple[Any, ...], list[Row]]

# The columns of ours that set how a run is made; the others are its figures and its origin. A
# column that we do not know is taken for a setting, so that nothing is compared across it unseen.
SETTINGS = frozenset(
    {
        "gpu",
        "num_gpus",
        "image_size",
        "latents",
        "ema",
        "micro_batch",
        "num_workers",
        "global_batch",
        "precision",
        "engine",
        "model",
        "preset",
        "data_format",
        "device",
        "num_devices",
        "num_cpu_cores",
        "num_nodes",
        "other_settings",
    }
)
NOT_SETTINGS = (frozenset(COLUMNS) - SETTINGS) | {"read_from"}
# The work of one image depends on these: with the encoders in the step it is 1.48 times that
# without, at 512 px 4.2 times that at 256. They are compared across only by who says so.
GUARDED = ("latents", "image_size", "precision", "model")
# No settings, but worth a word where they are one value here and another there.
ORIGINS = ("kind", "source", "git_commit")


@dataclasses.dataclass(frozen=True)
class Pair:
    """One configuration on both sides.

    Attributes:
        baseline: Runs of the baseline.
        candidate: Runs of the candidate.
        comparison: Candidate over baseline.
    """

    baseline: Sequence[Row]
    candidate: Sequence[Row]
    comparison: Comparison


@dataclasses.dataclass(frozen=True)
class Match:
    """What became of two sides.

    Attributes:
        baseline: One side.
        candidate: The other.
        columns: Settings that rows were matched on.
        compared: Settings that were compared across: the values of baseline and candidate.
        missing_on: Settings that only one side tells, and the name of the other.
        origins: What differs beside the settings: the values of baseline and candidate.
        pairs: Configurations on both sides, in the order of the baseline.
        only_baseline: Runs of each configuration that the candidate lacks.
        only_candidate: Runs of each that the baseline lacks.
        mean: The geometric mean of the pairs.
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
    """Set two sides against each other.

    Args:
        baseline: One side.
        candidate: The other.
        between: Settings to compare across, beside those that are one value on either side.
        allow: Settings of `GUARDED` that may be compared across.

    Raises:
        ConfigError: If they differ in a guarded setting, if no configuration is on both sides, or
            if what looks like runs of one configuration are not.
    """
    told = [_told_settings(side) for side in (baseline, candidate)]
    common = [column for column in told[0] if column in told[1]]
    values = {column: _values(baseline, candidate, column) for column in common}
    compared = {
        column: (_in_words(ours), _in_words(theirs))
        for column, (ours, theirs) in values.items()
        if column in between or (len(ours) == len(theirs) == 1 and ours != theirs)
    }
    _check_guarded(compared, allow=allow)
    _check_both_tell(told, (baseline, candidate), allow=allow)
    columns = [column for column in common if column not in compared]
    groups = _group(baseline.rows, columns), _group(candidate.rows, columns)
    keys = [key for key in groups[0] if key in groups[1]]
    if not keys:
        raise _nothing_matches({column: values[column] for column in columns}, allow=allow)
    for group, key in itertools.product(groups, keys):
        _check_replicates(group[key], compared)
    pairs = _compare([(groups[0][key], groups[1][key]) for key in keys])
    return Match(
        baseline=baseline,
        candidate=candidate,
        columns=columns,
        compared=compared,
        missing_on={
            column: side.name
            for side, mine, other in ((baseline, *told), (candidate, *reversed(told)))
            for column in other
            if column not in mine
        },
        origins=_differing_origins(baseline, candidate),
        pairs=pairs,
        only_baseline=[rows for key, rows in groups[0].items() if key not in groups[1]],
        only_candidate=[rows for key, rows in groups[1].items() if key not in groups[0]],
        mean=geometric_mean([pair.comparison for pair in pairs]),
    )


def _compare(sides: Iterable[tuple[list[Row], list[Row]]]) -> list[Pair]:
    sides = list(sides)
    comparisons = [compare(_rates(candidate), _rates(baseline)) for baseline, candidate in sides]
    return [
        Pair(baseline, candidate, comparison)
        for (baseline, candidate), comparison in zip(
            sides, correct_verdicts(comparisons), strict=True
        )
    ]


def _rates(rows: Iterable[Row]) -> list[float]:
    return [row["images_per_second"] for row in rows]


def _told_settings(side: Side) -> list[str]:
    """Settings that at least one row of this side has a value for."""
    columns = dict.fromkeys(column for row in side.rows for column in row)
    return [
        column
        for column in columns
        if column not in NOT_SETTINGS
        and not column.startswith(VERSION_PREFIX)
        and any(row.get(column) is not None for row in side.rows)
    ]


def _values(baseline: Side, candidate: Side, column: str) -> tuple[list[Any], list[Any]]:
    """The different values on either side, in their order."""
    return tuple(
        list(dict.fromkeys(row.get(column) for row in side.rows)) for side in (baseline, candidate)
    )


def _in_words(values: Sequence[Any]) -> str:
    return ", ".join(as_text(value) or "not told" for value in values)


def _group(rows: Iterable[Row], columns: Sequence[str]) -> Groups:
    groups: Groups = {}
    for row in rows:
        groups.setdefault(tuple(row.get(column) for column in columns), []).append(row)
    return groups


def _differing_origins(baseline: Side, candidate: Side) -> dict[str, tuple[str, str]]:
    columns = dict.fromkeys(
        column
        for row in (*baseline.rows, *candidate.rows)
        for column in row
        if column in ORIGINS or column.startswith(VERSION_PREFIX)
    )
    values = {column: _values(baseline, candidate, column) for column in columns}
    return {
        column: (_in_words(ours), _in_words(theirs))
        for column, (ours, theirs) in values.items()
        if len(ours) == len(theirs) == 1 and ours != theirs
    }


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
    told: Sequence[Sequence[str]], sides: Sequence[Side], *, allow: Sequence[str]
) -> None:
    """Where one side does not tell whether its images are the same work, nobody knows."""
    for column in ("latents", "image_size"):
        silent = [side.name for side, names in zip(sides, told, strict=True) if column not in names]
        if len(silent) == 1 and column not in allow:
            raise ConfigError(
                f"one side does not tell its {column}, so an image may be other work on the other",
                value=silent[0],
                allowed=f"a column {column} on both sides",
                flag=f"--allow {column}",
            )


def _nothing_matches(
    values: dict[str, tuple[list[Any], list[Any]]], *, allow: Sequence[str]
) -> NothingToCompareError:
    apart = {
        column: (_in_words(ours), _in_words(theirs))
        for column, (ours, theirs) in values.items()
        if not set(ours) & set(theirs)
    }
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
    """Runs of one configuration have one value in what is compared across, and one origin."""
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
