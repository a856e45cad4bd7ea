"""Matches the rows of two sides and compares the rates of each pair.

Rows are matched on every setting, except those that have one value in the baseline and another in
the candidate: these are compared. Runs of one configuration are its replicates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.record.configuration import group
from sdbench.record.row import COLUMNS
from sdbench.report.compare_sides import VERSION_PREFIX, NothingToCompareError, Row, Side
from sdbench.report.figures import MEASURED, as_text
from sdbench.statistics.intervals import Comparison, compare, correct_verdicts, geometric_mean

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
NOT_SETTINGS = (frozenset(COLUMNS) - SETTINGS) | {"read_from"}
# The work per image depends on these: with the encoders in the step it is 1.48 times that without,
# at 512 px 4.2 times that at 256. Sides that differ in them are compared only with --allow.
GUARDED = ("latents", "image_size", "precision", "model")
# No settings, but a difference in them is printed.
ORIGINS = ("kind", "source", "git_commit")


@dataclasses.dataclass(frozen=True)
class Pair:
    """One configuration on both sides.

    Attributes:
        baseline: Runs of the baseline.
        candidate: Runs of the candidate.
        comparison: Rate of the candidate over that of the baseline.
    """

    baseline: Sequence[Row]
    candidate: Sequence[Row]
    comparison: Comparison


@dataclasses.dataclass(frozen=True)
class Match:
    """Two sides, matched and compared.

    Attributes:
        baseline: One side.
        candidate: The other.
        columns: Settings that rows were matched on.
        compared: Values of baseline and candidate of each setting that is compared.
        missing_on: Settings that one side has no value for, each with the name of that side.
        origins: Values of baseline and candidate in which they differ otherwise.
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
            if what looks like runs of one configuration are not.
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
    comparisons = correct_verdicts(
        [compare(_rates(theirs[key]), _rates(ours[key])) for key in keys]
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
        origins=_differing_origins(baseline, candidate),
        pairs=[
            Pair(ours[key], theirs[key], comparison)
            for key, comparison in zip(keys, comparisons, strict=True)
        ],
        only_baseline=[runs for key, runs in ours.items() if key not in theirs],
        only_candidate=[runs for key, runs in theirs.items() if key not in ours],
        mean=geometric_mean(comparisons),
    )


def _rates(rows: Iterable[Row]) -> list[float]:
    return [row["images_per_second"] for row in rows]


def _known_settings(side: Side) -> list[str]:
    """Settings that at least one row of this side has a value for."""
    return [
        column
        for column in dict.fromkeys(column for row in side.rows for column in row)
        if column not in NOT_SETTINGS
        and not column.startswith(VERSION_PREFIX)
        and any(row.get(column) is not None for row in side.rows)
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


def _differing_origins(baseline: Side, candidate: Side) -> dict[str, tuple[str, str]]:
    columns = dict.fromkeys(
        column
        for row in (*baseline.rows, *candidate.rows)
        for column in row
        if column in ORIGINS or column.startswith(VERSION_PREFIX)
    )
    values = {column: _values(baseline, candidate, column) for column in columns}
    return _in_words({column: sides for column, sides in values.items() if _is_apart(sides)})


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
    """Refuse sides of which only one has the columns that decide the work of an image."""
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
    """Check that runs of one configuration have one value of what is compared, and one source."""
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
