"""A comparison as text for a terminal, markdown, CSV and JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sdbench.base.escape import for_markdown, for_terminal
from sdbench.base.output import PLAIN_WIDTH, terminal_width
from sdbench.record.row import format_csv
from sdbench.report.compare_match import (
    APART,
    MACHINE_CHANGED,
    MACHINES,
    MAX_MACHINE_CHANGE,
    Match,
    Pair,
)
from sdbench.report.compare_sides import MACHINE_FIGURES, UNCOMMITTED, Row
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
from sdbench.statistics.intervals import MIN_RUNS, Comparison, mean_rate
from sdbench.statistics.occasions import PAUSE_S, POWER

FIGURE_COLUMNS = (
    "row",
    "baseline_images_per_second",
    "candidate_images_per_second",
    "num_baseline_runs",
    "num_candidate_runs",
    "num_baseline_occasions",
    "num_candidate_occasions",
    "ratio",
    "ratio_low",
    "ratio_high",
    "verdict",
    "detectable_percent",
    "machine_figures",
    "flags",
)
MATCHED = "matched"
ONLY_BASELINE = "only in the baseline"
ONLY_CANDIDATE = "only in the candidate"
GEOMETRIC_MEAN = "geometric mean"
FLAGS = "flags"
# Settings that are told first.
FIRST = (
    *("model", "image_size", "latents", "precision", "preset", "engine", "ema"),
    *("global_batch", "micro_batch", "gpu", "device", "num_gpus", "num_devices"),
)
BULLET = "  "

# Cells by heading.
Cells = Mapping[str, Cell]


def to_text(match: Match, *, lists_all: bool) -> str:
    """The comparison for a terminal, as wide as that is."""
    return _compose(
        match, _Form(for_terminal, to_terminal, BULLET, terminal_width()), lists_all=lists_all
    )


def to_markdown_text(match: Match, *, lists_all: bool) -> str:
    """The comparison in markdown."""
    return _compose(match, _Form(for_markdown, to_markdown, "- ", None), lists_all=lists_all)


def to_csv_text(match: Match, *, lists_all: bool) -> str:
    """One row for each configuration, also those on one side only, and one for the mean ratio."""
    return format_csv(_make_rows(match), columns=(*match.columns, *FIGURE_COLUMNS))


def to_json_text(match: Match, *, lists_all: bool) -> str:
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


# Each takes a comparison, and whether to list all settings and rows, as CSV and JSON always do.
FORMATS: dict[str, Callable[..., str]] = {
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


class _Form(NamedTuple):
    """A form of text.

    Attributes:
        escape: Makes a value one line of plain text.
        draw: Makes a table.
        bullet: Prefix of a line outside of tables.
        width: Width of a line in characters; None is unlimited.
    """

    escape: Callable[[Any], str]
    draw: Callable[[Table], str]
    bullet: str
    width: int | None

    @property
    def table_width(self) -> int:
        """The widest table that can be read, in characters."""
        return self.width or PLAIN_WIDTH

    def lines(self, texts: Iterable[str]) -> str:
        """Each text as a line, wrapped to the width."""
        lines = [self.bullet + self.escape(text) for text in texts]
        if self.width is not None:
            indent = " " * (len(self.bullet) + 2)
            lines = [
                part
                for line in lines
                for part in textwrap.wrap(
                    line,
                    self.width,
                    subsequent_indent=indent,
                    break_on_hyphens=False,
                    break_long_words=False,  # a path can be copied
                )
            ]
        return "\n".join(lines)

    def table(self, rows: Sequence[tuple[Cells, Cells]], *, beside: Cells | None = None) -> str:
        """A table; if it is too wide, the settings are listed below it by row number.

        Those that are the same in `beside` are left out there.
        """
        table = _make_table({**settings, **figures} for settings, figures in rows)
        if max(map(len, to_terminal(table).splitlines())) <= self.table_width:
            return self.draw(table)
        numbered, told = [], []
        for number, (settings, figures) in enumerate(rows, start=1):
            brief = {"row": make_cell(number), **figures}
            cells = {**settings, FLAGS: brief.pop(FLAGS, EMPTY)}
            numbered.append(brief)
            told.append(f"row {number}: {_tell_settings(cells, beside or {})}")
        return f"{self.draw(_make_table(numbered))}\n\n{self.lines(told)}"


def _compose(match: Match, form: _Form, *, lists_all: bool) -> str:
    matched = [pair.baseline[0] for pair in match.pairs]
    only = {ONLY_BASELINE: match.only_baseline, ONLY_CANDIDATE: match.only_candidate}
    varying = varying_columns(match, matched)
    parts = [
        form.lines(_facts(match, varying, width=None if lists_all else form.table_width)),
        form.table([_matched_row(pair, varying) for pair in match.pairs]),
        form.lines(_remarks(match)),
    ]
    counts = [f"{len(groups)} {title}" for title, groups in only.items() if groups]
    if counts and not lists_all:
        parts.append(form.lines([f"Not compared: {', '.join(counts)}; --all lists them."]))
    for title, groups in only.items() if lists_all else ():
        if groups:
            columns = varying_columns(match, [*matched, *(runs[0] for runs in groups)])
            rows = [_unmatched_row(runs, columns) for runs in groups]
            head = f"{len(groups)} {title} (settings: what is not as in the first row above):"
            table = form.table(rows, beside=_setting_cells(matched[0], columns))
            parts.append(f"{form.lines([head])}\n\n{table}")
    return "\n\n".join(part for part in parts if part) + "\n"


def varying_columns(match: Match, rows: Sequence[Row]) -> list[str]:
    """Matched settings that are not the same in all of these rows."""
    return _in_order(name for name in match.columns if len({row.get(name) for row in rows}) > 1)


def _in_order(columns: Iterable[str]) -> list[str]:
    """Settings with those of `FIRST` before the others."""
    return sorted(columns, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def _facts(match: Match, varying: Sequence[str], *, width: int | None) -> list[str]:
    """The lines above the table; `width` limits the line of settings that are the same."""
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
    same = _in_order(column for column in match.columns if column not in varying)
    if same:
        lines.append(_tell_same(match.pairs[0].baseline[0], same, width=width))
    for side in (match.baseline, match.candidate):
        missing_on = [column for column, name in match.missing_on.items() if name == side.name]
        if missing_on:
            lines.append(f"not matched on, as {side.name} does not tell: {', '.join(missing_on)}")
    return lines


def _tell_settings(cells: Cells, beside: Cells) -> str:
    """Settings that differ from `beside`, unknown ones last."""
    told = {name: cell for name, cell in cells.items() if cell != beside.get(name, EMPTY)}
    unknown = [name for name, cell in told.items() if cell.value is None]
    lists = [f"{name} {cell.text}" for name, cell in told.items() if cell.value is not None]
    if unknown:
        lists.append(f"not told: {' '.join(unknown)}")
    return ", ".join(lists) or "the same settings"


def _tell_same(row: Row, columns: Sequence[str], *, width: int | None) -> str:
    """The settings that all rows share, as many as fit into one line."""
    told = [f"{name} {as_text(row[name])}" for name in columns if row.get(name) is not None]
    line = "the same: " + (", ".join(told) or "the only configuration")
    num_told = len(told)
    while width is not None and len(BULLET) + len(line) > width and num_told > 1:
        num_told -= 1
        line = f"the same: {', '.join(told[:num_told])} and {len(told) - num_told} more (--all)"
    return line


def _remarks(match: Match) -> list[str]:
    """The lines below the table."""
    num_tested = sum(pair.comparison.interval is not None for pair in match.pairs)
    lines = []
    if len(match.pairs) > 1:
        lines.append(f"{GEOMETRIC_MEAN} of {len(match.pairs)}: {_tell(match.mean)}")
    lines.append("Baseline and candidate are in images/s, the ratio is candidate over baseline.")
    if num_tested:
        lines.append(
            "Rates are geometric means of the runs; interval: 95 %, Welch on logs, between runs."
        )
    if num_tested > 1:
        lines.append(f"Verdicts are corrected for {num_tested} tests (Holm); intervals are not.")
    lines += _remarks_on_occasions(match)
    if match.origins:
        differences = [
            f"{name} {ours} -> {theirs}" for name, (ours, theirs) in match.origins.items()
        ]
        lines.append(f"Also different: {'; '.join(differences)}.")
    if UNCOMMITTED not in match.origins and match.pairs[0].baseline[0].get(UNCOMMITTED):
        lines.append("Both sides had uncommitted changes, which may not be the same.")
    lines += [
        f"Left out of {side.name}: {side.describe_left_out()}."
        for side in (match.baseline, match.candidate)
        if side.left_out
    ]
    return lines


def _remarks_on_occasions(match: Match) -> list[str]:
    """Lines on how far times of the runs, changes of the machine and variation allow a verdict."""
    lines = []
    changes = [pair.detectable_change for pair in match.pairs if pair.detectable_change is not None]
    if changes:
        sizes = dict.fromkeys(f"{100 * change:.1f}" for change in (min(changes), max(changes)))
        lines.append(
            f"With this variation a change of {' to '.join(sizes)} % would be found in "
            f"{100 * POWER:g} % of comparisons."
        )
    elif any(pair.comparison.interval is not None for pair in match.pairs):
        lines.append(f"What change would be found, {MIN_RUNS} runs or more on each side can tell.")
    if (apart := _tell_verdict(match, APART)) is not None:
        pause = f"pauses of more than {PAUSE_S / 3600:g} h"
        remedy = "measure each side on several occasions, with"
        if MACHINES.isdisjoint(match.compared):
            why = "the sides did not take turns, and one of them has a single occasion"
            remedy = f"let them take turns (python -m sdbench repeat N --against), or {remedy}"
        else:
            why = "one of the two machines has a single occasion"
        lines.append(
            f"{apart}: {why}, or does not tell its times. One setting differs between occasions as "
            f"well: {remedy} {pause} between them."
        )
    if (changed := _tell_verdict(match, MACHINE_CHANGED)) is not None:
        lines.append(
            f"{changed}: by more than {100 * MAX_MACHINE_CHANGE:g} %, and nothing that "
            "is compared explains it."
        )
    for number, pair in enumerate(match.pairs, start=1):
        row = f", row {number}" if len(match.pairs) > 1 else ""
        if pair.machine:
            lines.append(f"Figures of the machine differ{row}: {_tell_machine(pair)}.")
        if pair.has_samples_of_several_runs and max(pair.num_occasions) > 1:
            lines.append(
                f"Runs of one occasion are one sample{row}: {len(pair.baseline)} and "
                f"{len(pair.candidate)} runs on {' and '.join(map(str, pair.num_occasions))} "
                "occasions; the ratio is that of the occasions."
            )
    return lines


def _tell_verdict(match: Match, verdict: str) -> str | None:
    """A verdict with the numbers of its rows, e.g. ``not tested (row 1, 3)``; None without any."""
    numbers = [
        str(number)
        for number, pair in enumerate(match.pairs, start=1)
        if pair.comparison.verdict == verdict
    ]
    if not numbers or len(match.pairs) == 1:
        return verdict if numbers else None
    return f"{verdict} (row {', '.join(numbers)})"


def _tell_machine(pair: Pair) -> str:
    """E.g. ``matrix product 0.375 -> 0.297 TFLOP/s, 0.79x``."""
    told = []
    for name, ratio in pair.machine.items():
        what, unit = MACHINE_FIGURES[name]
        means = [mean_rate([row[name] for row in side]) for side in (pair.baseline, pair.candidate)]
        ours, theirs = (f"{mean:.4g}" for mean in means)
        told.append(f"{what} {ours} -> {theirs} {unit}, {ratio:.2f}x")
    return "; ".join(told)


def _make_table(rows: Iterable[Cells]) -> Table:
    return make_table(rows).without_empty_columns()


def _matched_row(pair: Pair, columns: Sequence[str]) -> tuple[Cells, Cells]:
    """Settings and figures of a configuration on both sides."""
    figures = {
        "n": make_cell(_num_runs(pair)),
        "baseline": _rate_cell(pair.baseline),
        "candidate": _rate_cell(pair.candidate),
        **_comparison_cells(pair.comparison),
        FLAGS: optional_cell(_flags((*pair.baseline, *pair.candidate))),
    }
    return _setting_cells(pair.baseline[0], columns), figures


def _unmatched_row(runs: Sequence[Row], columns: Sequence[str]) -> tuple[Cells, Cells]:
    """Settings and figures of a configuration on one side."""
    figures = {"n": make_cell(str(len(runs))), "images/s": _rate_cell(runs)}
    return _setting_cells(runs[0], columns), figures


def _setting_cells(row: Row, columns: Iterable[str]) -> dict[str, Cell]:
    return {column: make_cell(row.get(column), num_digits=6) for column in columns}


def _rate_cell(rows: Sequence[Row]) -> Cell:
    return make_cell(float(_rate(rows)), num_digits=5)


def _comparison_cells(comparison: Comparison) -> dict[str, Cell]:
    interval = comparison.interval
    return {
        "ratio": Cell(f"{comparison.ratio:.2f}x", comparison.ratio),
        "95 % interval": optional_cell(
            f"{interval.low:.3f} to {interval.high:.3f}" if interval else None
        ),
        # The reason is told below the table.
        "verdict": make_cell(comparison.verdict.partition(":")[0]),
    }


def _tell(comparison: Comparison) -> str:
    cells = _comparison_cells(comparison).values()
    return ", ".join(cell.text for cell in cells if cell.text)


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
        {
            **_make_row(match, MATCHED, baseline=pair.baseline, candidate=pair.candidate),
            **_comparison_values(pair.comparison),
            "num_baseline_occasions": pair.num_occasions[0],
            "num_candidate_occasions": pair.num_occasions[1],
            "detectable_percent": None
            if pair.detectable_change is None
            else 100 * pair.detectable_change,
            "machine_figures": _tell_machine(pair) or None,
        }
        for pair in match.pairs
    ]
    rows += [_make_row(match, ONLY_BASELINE, baseline=runs) for runs in match.only_baseline]
    rows += [_make_row(match, ONLY_CANDIDATE, candidate=runs) for runs in match.only_candidate]
    return [*rows, {"row": GEOMETRIC_MEAN, **_comparison_values(match.mean)}]


def _make_row(match: Match, title: str, **sides: Sequence[Row]) -> dict[str, Any]:
    """A CSV row of a configuration, with its runs as ``baseline``, ``candidate`` or both."""
    runs = [run for side in sides.values() for run in side]
    return {
        **{column: runs[0].get(column) for column in match.columns},
        "row": title,
        **{f"{name}_images_per_second": _rate(side) for name, side in sides.items()},
        **{f"num_{name}_runs": len(side) for name, side in sides.items()},
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
