"""A comparison as text for a terminal, markdown, CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sdbench.base.escape import for_markdown, for_terminal
from sdbench.record.row import format_csv
from sdbench.report.compare_match import Match, Pair
from sdbench.report.compare_sides import Row
from sdbench.report.figures import as_text
from sdbench.report.tables import (
    EMPTY,
    Cell,
    Table,
    make_cell,
    make_table,
    optional_cell,
    to_markdown,
    to_terminal,
)
from sdbench.statistics.intervals import NOT_TESTED, Comparison, mean_rate

FIGURE_COLUMNS = (
    "row",
    "baseline_images_per_second",
    "candidate_images_per_second",
    "num_baseline_runs",
    "num_candidate_runs",
    "ratio",
    "ratio_low",
    "ratio_high",
    "verdict",
    "flags",
)
MATCHED = "matched"
ONLY_BASELINE = "only in the baseline"
ONLY_CANDIDATE = "only in the candidate"
GEOMETRIC_MEAN = "geometric mean"


def to_text(match: Match) -> str:
    """The comparison for a terminal."""
    return _compose(match, for_terminal, to_terminal, heading="{}:", bullet="  ")


def to_markdown_text(match: Match) -> str:
    """The comparison in markdown."""
    return _compose(match, for_markdown, to_markdown, heading="**{}**\n", bullet="- ")


def to_csv_text(match: Match) -> str:
    """One row for each configuration, also those on one side only, and one for the mean ratio."""
    return format_csv(_make_rows(match), columns=(*match.columns, *FIGURE_COLUMNS))


def to_json_text(match: Match) -> str:
    """The whole comparison, unrounded."""
    content = {
        **{
            name: {"name": side.name, "num_figures": len(side.rows), "left_out": side.left_out}
            for name, side in (("baseline", match.baseline), ("candidate", match.candidate))
        },
        "matched_on": match.columns,
        "compared": match.compared,
        "not_told_by": match.missing_on,
        "other_differences": match.origins,
        "rows": _make_rows(match),
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Match], str]] = {
    "terminal": to_text,
    "markdown": to_markdown_text,
    "csv": to_csv_text,
    "json": to_json_text,
}


def describe_settings(row: Row, columns: Iterable[str]) -> str:
    """The known settings of a row as text, e.g. ``micro_batch 4, ema true``."""
    known = [
        f"{column} {as_text(row[column])}" for column in columns if row.get(column) is not None
    ]
    return ", ".join(known) or "the only configuration"


def _compose(
    match: Match,
    escape: Callable[[Any], str],
    draw: Callable[[Table], str],
    *,
    heading: str,
    bullet: str,
) -> str:
    varying = _varying_columns(match)
    parts = [
        "\n".join(bullet + escape(line) for line in _facts(match, varying)),
        draw(_make_table(match, varying)),
        "\n".join(bullet + escape(line) for line in _remarks(match)),
    ]
    for title, groups in (
        (ONLY_BASELINE, match.only_baseline),
        (ONLY_CANDIDATE, match.only_candidate),
    ):
        if groups:
            table = draw(_make_unmatched_table(groups, varying or match.columns))
            parts.append(f"{heading.format(f'{len(groups)} {title}')}\n{table}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _varying_columns(match: Match) -> list[str]:
    """Matched settings that are not the same in every row of the output."""
    shown = [
        *(pair.baseline[0] for pair in match.pairs),
        *(rows[0] for rows in (*match.only_baseline, *match.only_candidate)),
    ]
    return [column for column in match.columns if len({row.get(column) for row in shown}) > 1]


def _facts(match: Match, varying: Sequence[str]) -> list[str]:
    """The lines above the table."""
    lines = [f"baseline: {match.baseline.name}", f"candidate: {match.candidate.name}"]
    # The columns gpu and device have the same value in our own runs.
    columns_of: dict[tuple[str, str], list[str]] = {}
    for column, values in match.compared.items():
        columns_of.setdefault(values, []).append(column)
    lines += [
        f"compared: {', '.join(columns)}: {ours} -> {theirs}"
        for (ours, theirs), columns in columns_of.items()
    ]
    if not match.compared:
        lines.append("compared: no setting differs, only the runs")
    same = [column for column in match.columns if column not in varying]
    if same:
        lines.append(f"the same: {describe_settings(match.pairs[0].baseline[0], same)}")
    for side in (match.baseline, match.candidate):
        missing_on = [column for column, name in match.missing_on.items() if name == side.name]
        if missing_on:
            lines.append(f"not matched on, as {side.name} does not tell: {', '.join(missing_on)}")
    return lines


def _remarks(match: Match) -> list[str]:
    """The lines below the table."""
    num_tested = sum(pair.comparison.interval is not None for pair in match.pairs)
    lines = []
    if num_tested:
        lines.append(
            "Ratio: candidate over baseline, geometric means of the runs; interval: 95 %, Welch "
            "on logs, between runs."
        )
    if num_tested > 1:
        lines.append(f"Verdicts are corrected for {num_tested} tests (Holm); intervals are not.")
    if match.origins:
        differences = [
            f"{name} {ours} -> {theirs}" for name, (ours, theirs) in match.origins.items()
        ]
        lines.append(f"Also different: {'; '.join(differences)}.")
    lines += [
        f"Left out of {side.name}: {side.describe_left_out()}."
        for side in (match.baseline, match.candidate)
        if side.left_out
    ]
    return lines


def _make_table(match: Match, varying: Sequence[str]) -> Table:
    rows = [
        {
            **_setting_cells(pair.baseline[0], varying),
            "n": _num_runs(pair),
            "baseline, images/s": _rate_cell(pair.baseline),
            "candidate, images/s": _rate_cell(pair.candidate),
            **_comparison_cells(pair.comparison, pair),
            "flags": optional_cell(_flags((*pair.baseline, *pair.candidate))),
        }
        for pair in match.pairs
    ]
    if len(rows) > 1:
        empty = dict.fromkeys(rows[0], EMPTY)
        label = {next(iter(empty)): Cell(f"{GEOMETRIC_MEAN} of {len(rows)}", None)}
        rows.append({**empty, **label, **_comparison_cells(match.mean)})
    return make_table(rows).without_empty_columns()


def _make_unmatched_table(groups: Sequence[Sequence[Row]], columns: Sequence[str]) -> Table:
    return make_table(
        {
            **_setting_cells(rows[0], columns),
            "n": str(len(rows)),
            "images/s": _rate_cell(rows),
        }
        for rows in groups
    )


def _setting_cells(row: Row, columns: Iterable[str]) -> dict[str, Cell]:
    return {column: make_cell(row.get(column), num_digits=6) for column in columns}


def _rate_cell(rows: Sequence[Row]) -> Cell:
    return make_cell(float(_rate(rows)), num_digits=5)


def _comparison_cells(comparison: Comparison, pair: Pair | None = None) -> dict[str, Cell]:
    interval, verdict = comparison.interval, comparison.verdict
    if verdict == NOT_TESTED and pair is not None:
        verdict = f"n={_num_runs(pair)}, {NOT_TESTED}"
    return {
        "ratio": Cell(f"{comparison.ratio:.2f}x", comparison.ratio),
        "95 % interval": optional_cell(
            f"{interval.low:.3f} to {interval.high:.3f}" if interval else None
        ),
        "verdict": make_cell(verdict),
    }


def _num_runs(pair: Pair) -> str:
    baseline, candidate = len(pair.baseline), len(pair.candidate)
    return str(baseline) if baseline == candidate else f"{baseline} and {candidate}"


def _rate(rows: Sequence[Row]) -> float:
    return mean_rate([row["images_per_second"] for row in rows])


def _flags(rows: Iterable[Row]) -> str | None:
    flags = dict.fromkeys(flag for row in rows for flag in (row.get("flags") or "").split(";"))
    return ", ".join(flag for flag in flags if flag) or None


def _make_rows(match: Match) -> list[dict[str, Any]]:
    rows = [
        _make_row(match, MATCHED, pair.comparison, baseline=pair.baseline, candidate=pair.candidate)
        for pair in match.pairs
    ]
    rows += [_make_row(match, ONLY_BASELINE, baseline=runs) for runs in match.only_baseline]
    rows += [_make_row(match, ONLY_CANDIDATE, candidate=runs) for runs in match.only_candidate]
    return [*rows, {"row": GEOMETRIC_MEAN, **_comparison_values(match.mean)}]


def _make_row(
    match: Match, title: str, comparison: Comparison | None = None, **sides: Sequence[Row]
) -> dict[str, Any]:
    """A row of the CSV file.

    Args:
        match: The comparison that it is from.
        title: Value of the column ``row``.
        comparison: Of a configuration on both sides.
        sides: Runs of the configuration, for ``baseline``, ``candidate`` or both.
    """
    runs = [run for side in sides.values() for run in side]
    return {
        **{column: runs[0].get(column) for column in match.columns},
        "row": title,
        **{f"{name}_images_per_second": _rate(side) for name, side in sides.items()},
        **{f"num_{name}_runs": len(side) for name, side in sides.items()},
        **(_comparison_values(comparison) if comparison else {}),
        "flags": _flags(runs),
    }


def _comparison_values(comparison: Comparison) -> dict[str, Any]:
    interval = comparison.interval
    return {
        "ratio": comparison.ratio,
        "ratio_low": interval.low if interval else None,
        "ratio_high": interval.high if interval else None,
        "verdict": comparison.verdict,
    }
