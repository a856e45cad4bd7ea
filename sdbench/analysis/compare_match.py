"""Matches the rows of two sides and compares the rates of each pair, as the help says."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sdbench.analysis.compare_sides import (
    POWER_LIMIT,
    UNCOMMITTED,
    VARIABLE_PREFIX,
    VERSION_PREFIX,
    WEIGHTS,
    WHEN,
    Row,
    Side,
)
from sdbench.base.errors import ConfigError
from sdbench.record.columns import COLUMNS, SETTING
from sdbench.record.configuration import group
from sdbench.report.figures import MEASURED, as_text
from sdbench.statistics.intervals import (
    NOT_TESTED,
    Comparison,
    correct_verdicts,
    geometric_mean,
    mean_rate,
)
from sdbench.statistics.occasions import compare_occasions, detectable_change, find_occasions

# A text for the baseline and one for the candidate.
Texts = tuple[str, str]

# Not settings, but differences are reported: in NAMES only if each side has a single value.
NAMES = ("kind", "source")
ORIGINS = (*NAMES, "git_commit", UNCOMMITTED, WEIGHTS, POWER_LIMIT)
ORIGIN_PREFIXES = (VERSION_PREFIX, VARIABLE_PREFIX)
# An unknown column counts as a setting: a difference in it is never overlooked.
NOT_SETTINGS = {name for name, one in COLUMNS.items() if one.kind != SETTING} | {WHEN, *ORIGINS}
# The work per image depends on these: encoders in the step make it 1.48 times as much, 512 px
# instead of 256 px 4.2 times. Sides that differ in them are compared only with --allow.
GUARDED = ("latents", "image_size", "precision", "model")
MAX_VALUES = 3
# Sides that differ in these were measured on different machines, which share no occasion.
MACHINES = frozenset(("gpu", "device", "num_cpu_cores"))
# The matrix product that is timed before a run depends on these; Ray gives a rank fewer threads.
SET_MATRIX_PRODUCT = MACHINES | {
    *("num_gpus", "num_devices", "num_nodes", "precision", "num_threads", "engine")
}
MAX_MACHINE_CHANGE = 0.05
MATCHED, MEAN = "matched", "geometric mean"
ONLY_BASELINE, ONLY_CANDIDATE = "only in the baseline", "only in the candidate"
APART = "not comparable: measured apart"
MACHINE_CHANGED = "not comparable: the machine changed"


@dataclasses.dataclass(frozen=True)
class Match:
    """Two sides, matched and compared.

    Attributes:
        columns: Settings that rows were matched on.
        compared: Values in baseline and candidate, by compared setting.
        missing_on: Settings that only the other side has, by name of the side that lacks them.
        origins: Values in baseline and candidate, by differing origin (commit, versions, ...).
        rows: One for each configuration and one for the mean ratio, each with its kind as ``row``.
    """

    baseline: Side
    candidate: Side
    columns: Sequence[str]
    compared: Mapping[str, Texts]
    missing_on: Mapping[str, Sequence[str]]
    origins: Mapping[str, Texts]
    rows: Sequence[Row]

    def of_kind(self, kind: str) -> list[Row]:
        """The rows of a kind."""
        return [row for row in self.rows if row["row"] == kind]


def match(
    baseline: Side, candidate: Side, *, between: Sequence[str] = (), allow: Sequence[str] = ()
) -> Match:
    """Match two sides.

    `between` names further settings to compare across, and `allow` the settings of `GUARDED` in
    which the sides may differ.
    """
    sides = (baseline, candidate)
    known = [_known_settings(side.rows) for side in sides]
    common = [column for column in known[0] if column in known[1]]
    if all(UNCOMMITTED in row for side in sides for row in side.rows):
        # Records have a column for each of these settings; this one also says who chose a value.
        common = [column for column in common if column != "other_settings"]
    differing, compared = {}, {}
    for column in common:
        ours, theirs = (_distinct(side.rows, column) for side in sides)
        if column in between or set(ours).isdisjoint(theirs):
            differing[column] = _in_words(column, ours), _in_words(column, theirs)
            if column in between or len(ours) == len(theirs) == 1:
                compared[column] = differing[column]
    _check_same_work(differing, known=known, sides=sides, allow=allow)
    columns = [column for column in common if column not in compared]
    ours, theirs = (
        group(side.rows, key_of=lambda row: tuple(row.get(column) for column in columns))
        for side in sides
    )
    keys = [key for key in ours if key in theirs]
    if not keys:
        apart = [column for column in differing if column not in compared]
        described = [f"{column}: {' and '.join(differing[column])}" for column in apart]
        raise ConfigError(
            "no configuration is on both sides",
            value="; ".join(described) or "several settings that differ together",
            allowed="at least one row whose settings are the same on both sides",
            flag=f"--between {','.join(apart) or 'COLUMN'}",
        )
    matched = [[row for key in keys for row in groups[key]] for groups in (ours, theirs)]
    for runs in (groups[key] for groups in (ours, theirs) for key in keys):
        _check_replicates(runs, compared)
    origins = _differing_origins(*matched)
    missing_on = {
        side.name: missing
        for side, mine, other in ((baseline, *known), (candidate, *reversed(known)))
        if (missing := [column for column in other if column not in mine])
    }
    rows = _make_rows(ours, theirs, columns=columns, compared=compared, origins=origins)
    return Match(baseline, candidate, columns, compared, missing_on, origins, rows)


def _make_rows(
    ours: Mapping[Any, Sequence[Row]],
    theirs: Mapping[Any, Sequence[Row]],
    *,
    columns: Sequence[str],
    compared: Collection[str],
    origins: Mapping[str, Texts],
) -> list[Row]:
    """Make the rows of `Match` from the runs of both sides, grouped by configuration."""
    pairs = [(runs, theirs[key]) for key, runs in ours.items() if key in theirs]
    judged = [_compare_runs(*pair, compared=compared, origins=origins) for pair in pairs]
    comparisons = correct_verdicts([comparison for comparison, _, _ in judged])
    num_tests = sum(comparison.interval is not None for comparison in comparisons)
    rows, independent = [], []
    for pair, (_, occasions, product), comparison in zip(pairs, judged, comparisons, strict=True):
        change = detectable_change(comparison, num_tests=num_tests)
        rows.append(
            _make_row(MATCHED, *pair, columns=columns)
            | _comparison_values(comparison)
            | {
                "num_baseline_occasions": occasions[0],
                "num_candidate_occasions": occasions[1],
                "detectable_percent": None if change is None else 100 * change,
                "matrix_product_ratio": product,
            }
        )
        if occasions != tuple(map(len, pair)):
            # An occasion affects all rows alike, so they are not independent.
            comparison = Comparison(comparison.ratio, None, NOT_TESTED)
        independent.append(comparison)
    for title, mine, others in ((ONLY_BASELINE, ours, theirs), (ONLY_CANDIDATE, theirs, ours)):
        for key in (key for key in mine if key not in others):
            sides = ours.get(key, ()), theirs.get(key, ())
            rows.append(_make_row(title, *sides, columns=columns))
    return [*rows, {"row": MEAN, **_comparison_values(geometric_mean(independent))}]


def _make_row(
    title: str, baseline: Sequence[Row], candidate: Sequence[Row], *, columns: Sequence[str]
) -> Row:
    runs = [*baseline, *candidate]
    flags = dict.fromkeys(flag for run in runs for flag in (run.get("flags") or "").split(";"))
    baseline_rate, candidate_rate = (
        float(mean_rate([row["images_per_second"] for row in rows])) if rows else None
        for rows in (baseline, candidate)
    )
    return {
        **{column: runs[0].get(column) for column in columns},
        "row": title,
        "baseline_images_per_second": baseline_rate,
        "candidate_images_per_second": candidate_rate,
        "num_baseline_runs": len(baseline),
        "num_candidate_runs": len(candidate),
        "flags": ", ".join(filter(None, flags)) or None,
    }


def _comparison_values(comparison: Comparison) -> Row:
    interval = comparison.interval
    return {
        "ratio": comparison.ratio,
        "ratio_low": interval and interval.low,
        "ratio_high": interval and interval.high,
        "verdict": comparison.verdict,
    }


def compare_rows(baseline: Sequence[Row], candidate: Sequence[Row]) -> Comparison:
    """Compare the runs of two configurations as `match` does, whatever they differ in.

    Unlike there, a side with a single run is measured apart if the runs have several occasions.
    """
    rows = [*baseline, *candidate]
    compared = [
        column
        for column in _known_settings(rows)
        if set(_distinct(baseline, column)) != set(_distinct(candidate, column))
    ]
    origins = _differing_origins(baseline, candidate)
    comparison, *_ = _compare_runs(baseline, candidate, compared=compared, origins=origins)
    if comparison.verdict == NOT_TESTED and len(find_occasions([row[WHEN] for row in rows])) > 1:
        return Comparison(comparison.ratio, None, APART)
    return comparison


def _compare_runs(
    baseline: Sequence[Row],
    candidate: Sequence[Row],
    *,
    compared: Collection[str],
    origins: Mapping[str, Texts],
) -> tuple[Comparison, tuple[int, int], float | None]:
    """Compare the runs of one configuration; without a verdict if the machine may differ.

    Also returns the numbers of occasions of both sides, and the ratio of the machine's matrix
    products: None if it is unknown, or differs from 1 by at most 5 % or by chance.
    """
    sides = (candidate, baseline)
    times, other_times = ([row[WHEN] for row in side] for side in sides)
    if not MACHINES.isdisjoint(compared):
        occasions = find_occasions(times), find_occasions(other_times)
    else:
        occasions = find_occasions(times, other_times), find_occasions(other_times, times)
    rates, products = (
        [[row.get(name) for row in side] for side in sides]
        for name in ("images_per_second", "matmul_tflops")
    )
    comparison = compare_occasions(*rates, occasions=occasions)
    product_ratio = None
    if all(product is not None for of_side in products for product in of_side):
        found = compare_occasions(*products, occasions=occasions)
        may_be_chance = found.interval and found.interval.low <= 1 <= found.interval.high
        if abs(found.ratio - 1) > MAX_MACHINE_CHANGE and not may_be_chance:
            product_ratio = found.ratio
    # A compared setting, version or environment variable may itself change the matrix product.
    is_explained = not SET_MATRIX_PRODUCT.isdisjoint(compared) or any(
        ours != theirs and column.startswith(ORIGIN_PREFIXES)
        for column, (ours, theirs) in origins.items()
    )
    if comparison.interval is None:
        if min(len(baseline), len(candidate)) > 1:
            comparison = Comparison(comparison.ratio, None, APART)
    elif product_ratio is not None and not is_explained:
        comparison = Comparison(comparison.ratio, None, MACHINE_CHANGED)
    return comparison, (len(occasions[1]), len(occasions[0])), product_ratio


def _known_settings(rows: Sequence[Row]) -> list[str]:
    """The settings that at least one row has a value for."""
    columns = dict.fromkeys(
        column for row in rows for column, value in row.items() if value is not None
    )
    return [
        column
        for column in columns
        if column not in NOT_SETTINGS and not column.startswith(ORIGIN_PREFIXES)
    ]


def _distinct(rows: Iterable[Row], column: str) -> list[Any]:
    """The distinct values of a column, in order."""
    return list(dict.fromkeys(row.get(column) for row in rows))


def _in_words(column: str, values: Sequence[Any]) -> str:
    """The first few values of a column, and the number of the others."""
    unknown = "not set" if column.startswith(VARIABLE_PREFIX) else "not told"
    more = len(values) - MAX_VALUES
    text = ", ".join(as_text(value) or unknown for value in values[:MAX_VALUES])
    return f"{text} and {more} more" if more > 0 else text


def _differing_origins(baseline: Sequence[Row], candidate: Sequence[Row]) -> dict[str, Texts]:
    """Columns of origin whose values differ between or within the sides."""
    origins = {}
    for column in dict.fromkeys(column for row in (*baseline, *candidate) for column in row):
        if column not in ORIGINS and not column.startswith(ORIGIN_PREFIXES):
            continue
        ours, theirs = (_distinct(rows, column) for rows in (baseline, candidate))
        is_one_each = len(ours) == len(theirs) == 1
        if (ours != theirs or not is_one_each) and (is_one_each or column not in NAMES):
            origins[column] = _in_words(column, ours), _in_words(column, theirs)
    return origins


def _check_same_work(
    differing: Mapping[str, Texts],
    *,
    known: Sequence[Sequence[str]],
    sides: Sequence[Side],
    allow: Sequence[str],
) -> None:
    """Refuse sides whose work per image differs or may differ."""
    for column in GUARDED:
        if column in allow:
            continue
        if column in differing:
            raise ConfigError(
                f"the sides differ in {column}, so an image is not the same work on both",
                value=" and ".join(differing[column]),
                allowed=f"the same {column} on both sides",
                flag=f"--where {column}=..., or compare nevertheless with --allow {column}",
            )
        lacking = [
            side.name for side, names in zip(sides, known, strict=True) if column not in names
        ]
        if column in ("latents", "image_size") and len(lacking) == 1:
            raise ConfigError(
                f"one side has no {column}, so its images may be other work",
                value=lacking[0],
                allowed=f"a column {column} on both sides",
                flag=f"--allow {column}",
            )


def _check_replicates(rows: Sequence[Row], compared: Iterable[str]) -> None:
    """Check that replicates have one value of each compared setting, and one source."""
    # The sources of measured rows are their run ids.
    are_measured = all(row.get("kind") == MEASURED for row in rows)
    for column in [*compared, *([] if are_measured else ["source"])]:
        values = _distinct(rows, column)
        if len(values) > 1:
            raise ConfigError(
                f"rows with the same settings have several values of {column}, so they are not "
                "runs of one configuration",
                value=" and ".join(map(as_text, values[:MAX_VALUES])),
                allowed=f"one {column} for each configuration",
                flag=f"--where {column}=...",
            )
