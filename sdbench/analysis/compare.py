"""The command `python -m sdbench compare`: two tables of figures or sets of runs, row by row."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from sdbench.analysis.compare_losses import compare_losses, make_loss_table
from sdbench.analysis.compare_match import (
    APART,
    GUARDED,
    MACHINE_CHANGED,
    MACHINES,
    MATCHED,
    MAX_MACHINE_CHANGE,
    MEAN,
    ONLY_BASELINE,
    ONLY_CANDIDATE,
    Match,
    match,
)
from sdbench.analysis.compare_sides import (
    UNCOMMITTED,
    UNREADABLE,
    Row,
    Side,
    check_distinct,
    load_rows,
    make_side,
    split,
)
from sdbench.base.errors import EXIT_FAILED, EXIT_OK, ConfigError
from sdbench.base.escape import for_markdown, for_terminal
from sdbench.base.output import fit
from sdbench.record.configuration import group
from sdbench.record.row import format_csv
from sdbench.report.figures import ChoiceFlags, as_text, select_rows, write_out
from sdbench.report.tables import Cell, Field, tabulate, to_markdown, to_terminal
from sdbench.settings.kinds import PATH, SHARE, SWITCH, TEXT, list_of, one_of
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting, shared
from sdbench.statistics.intervals import MIN_RUNS, NO_DIFFERENCE, NOT_TESTED
from sdbench.statistics.occasions import PAUSE_S, POWER

DESCRIPTION = """\
Compare two tables of figures, or two sets of runs, row by row.

A and B are CSV tables or folders with records at any depth; A is the baseline. Rows are matched on
every setting. A setting with one value in A and another in B is not matched on, but compared and
named. Several runs of one configuration are its replicates. With one table or folder, --between
names the column whose values are the two sides.

A row with two or more runs on each side has a 95 % interval and a verdict: faster or slower only
if the interval excludes 1 and the change exceeds 2 %, corrected for the number of rows (Holm). In
2,000 simulated comparisons each (tests/test_statistics_simulated.py), runs vary by 1 % and their
200 steps by 3 %, with a lag-1 correlation of 0.8 (in brackets: 0.5):
  runs on each side                     3             5            10
  the interval covers the truth    97 % (97)     95 % (96)     95 % (96)
  wrongly said to differ          1.0 % (0.6)   0.8 % (0.2)     0 % (0.05)
  a change of 3 % is found         52 % (60)     88 % (92)     97 % (98)
With 5 runs on each side, a change of 5 % is found in more than 99 %.

When a run was measured matters: a machine changes more within an hour than between two consecutive
runs. If the sides take turns, as with `python -m sdbench repeat N --against`, each run is a sample.
Otherwise an occasion is one sample: runs without a run of the other side and without a pause of
more than an hour between them. A side with a single occasion gets no verdict (measured apart), nor
does a row if the machine's matrix product changed by more than 5 % and by more than chance. Of
2,000 simulated comparisons of equal sides, whose occasions vary by 1, 1.5 and 2 %
(tests/test_statistics_occasions.py), these are wrongly said to differ:
  five runs of each, in turn                  0.15 %  0.10 %  0.15 %
  two occasions of each, of three runs        0.95 %  1.25 %  2.50 %
  five occasions of each, of three runs       0.60 %  2.55 %  4.35 %
  five, then five, if each run were a sample    20 %    36 %    49 %
With three or more samples on each side, the comparison also states the change that 80 % of
comparisons would find at this variation (74 to 81 % in simulations with 3 to 10 runs).

A run counts once, however many copies of its record there are, and cannot be on both sides.

With --losses, losses are compared instead: the mean of the last fifth of the steps, also that of
the run furthest out, each tenth, and the shape of the curve, each against the band that the spread
between seeds explains. The exit code is 1 if one is outside, or if a run failed or stopped early.
A is a folder of three runs or more with different seeds, better five; B of one or more: records, or
tables of another trainer, each with a column loss (and step). If all runs of B have the seeds of
runs of A (tables: the same names), pairs are compared, which finds much smaller changes. Equal
recipes are said to differ in at most 1 % of comparisons: in 10 of 1,800 that were simulated
(tests/report/test_compare_losses.py).
"""

EPILOG = """\
examples:
  python -m sdbench compare --losses runs/before runs/after
  python -m sdbench repeat 5 --against 'composer benchmark.py' -- composer benchmark.py --use_ema
  python -m sdbench compare runs/repeat_A/baseline runs/repeat_A/candidate --fail_if_slower 5%
  python -m sdbench compare results/quoted/aws_p4de_p5_single_node.csv --between gpu
  python -m sdbench compare results/quoted/mlperf_training_sd2.csv --between gpu \\
      --where submitter=NVIDIA global_batch=256 --baseline H100 --candidate B200
  python -m sdbench compare runs --between preset --baseline seed --candidate fast \\
      --allow precision --format markdown
"""

DIFFER = "the losses differ, or a run cannot be judged"
# Flags of a comparison of rates.
OF_RATES = ("between", "baseline", "candidate", "where", "allow", "fail_if_slower", "all")
# Settings that are listed first.
FIRST = (
    *("model", "image_size", "latents", "precision", "preset", "engine", "ema"),
    *("global_batch", "micro_batch", "gpu", "device", "num_gpus", "num_devices"),
)
# Shared settings that are listed without --all.
MAX_SAME = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """Flags of compare."""

    sides: tuple[Path, ...] = setting(
        PATH,
        REQUIRED,
        "table in CSV, name of one in results/quoted, or folder with records",
        is_positional=True,
        takes_several=True,
        spelling="A [B]",
    )
    between: tuple[str, ...] = setting(
        list_of(TEXT),
        (),
        "with A alone: the column whose values are the sides; with A and B: settings to compare "
        "across",
    )
    baseline: str | None = setting(TEXT, None, "value in the --between column, or its beginning")
    candidate: str | None = setting(TEXT, None, "value in the --between column, or its beginning")
    where: tuple[str, ...] = shared(ChoiceFlags, "where")
    allow: tuple[str, ...] = setting(
        list_of(one_of(*GUARDED)), (), "compare even if the sides differ in these settings"
    )
    fail_if_slower: float | None = setting(
        SHARE,
        None,
        "exit with 1 if the whole interval of a row, or of the geometric mean, is slower by more "
        "than this, e.g. 5%, or if a row has no verdict: fewer than 2 runs on a side, sides "
        "measured apart, a machine that changed, or no figure in B",
    )
    losses: bool = setting(
        SWITCH, False, "compare the losses of A and B; exit with 1 if they differ"
    )
    tolerance: float = setting(
        SHARE, 0.0, "with --losses: a difference up to this share of the loss is inside, e.g. 0.5%"
    )
    format: str = setting(
        one_of("terminal", "markdown", "csv", "json"), "terminal", "form of the tables"
    )
    all: bool = setting(
        SWITCH,
        False,
        "list all shared settings, and the rows that only one side has (csv and json always do)",
    )
    out: Path | None = setting(PATH, None, "write to a file instead of the terminal")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the comparison; exit with 1 if --fail_if_slower finds a slower or an untested row."""
    request = parse(
        CompareFlags, argv, prog="python -m sdbench compare", description=DESCRIPTION, epilog=EPILOG
    )
    flags = request.config
    unused = OF_RATES if flags.losses else ("tolerance",)
    for name in filter(request.is_users, unused):
        raise ConfigError(
            "this flag is not for losses" if flags.losses else "this flag needs --losses",
            value=f"--{name}",
            allowed="--losses A B [--tolerance 0.5%] [--format F] [--out FILE]",
            flag="--losses",
        )
    if flags.losses:
        return _compare_losses(flags)
    loaded = [load_rows(path) for path in flags.sides]
    baseline, candidate = _make_sides(flags, loaded)
    check_distinct(baseline, candidate)
    between = flags.between if len(flags.sides) == 2 else ()
    found = match(baseline, candidate, between=between, allow=flags.allow)
    if flags.format == "csv":
        text = format_csv(found.rows, columns=list(found.rows[0]))
    elif flags.format == "json":
        text = _to_json(found)
    else:
        text = _to_text(found, lists_all=flags.all, in_markdown=flags.format == "markdown")
    if flags.out is None:
        sys.stdout.write(text)
    else:
        write_out(flags.out, text)
    if flags.fail_if_slower is None:
        return EXIT_OK
    failures = _find_failures(found, threshold=flags.fail_if_slower)
    for path, rows in zip(flags.sides, loaded, strict=True):
        if number := sum(row.get("status") == UNREADABLE for row in rows):
            failures.append(f"not judged: {number} x {UNREADABLE} in {path}")
    for failure in failures:
        print(f"--fail_if_slower: {failure}", file=sys.stderr)
    return EXIT_FAILED if failures else EXIT_OK


def _compare_losses(flags: CompareFlags) -> int:
    """Write the comparison of losses; exit with 1 if they differ."""
    if len(flags.sides) != 2:
        raise ConfigError(
            "losses of two sides are compared",
            value=" ".join(map(str, flags.sides)),
            allowed="two folders of runs",
            flag="A B",
        )
    found = compare_losses(*flags.sides, tolerance=flags.tolerance)
    checks = [
        {
            **{
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in check._asdict().items()
            },
            "is_inside": check.is_inside,
        }
        for check in found.checks
    ]
    if flags.format == "json":
        content = {"facts": found.facts, "checks": checks, "failures": found.failures}
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    elif flags.format == "csv":
        text = format_csv(checks, columns=list(checks[0]))
    else:
        in_markdown = flags.format == "markdown"
        draw, in_lines = (to_markdown, _as_list) if in_markdown else (to_terminal, _as_paragraphs)
        table = draw(make_loss_table(found.checks))
        verdict = in_lines([DIFFER if found.failures else NO_DIFFERENCE])
        text = "\n\n".join([in_lines(found.facts), table, verdict]) + "\n"
    if flags.out is None:
        sys.stdout.write(text)
    else:
        write_out(flags.out, text)
    for failure in found.failures:
        print(f"--losses: {failure}", file=sys.stderr)
    return EXIT_FAILED if found.failures else EXIT_OK


def _find_failures(match: Match, *, threshold: float) -> list[str]:
    """Why the candidate fails --fail_if_slower; a missing figure does: its run may have crashed."""
    judged = [row for row in match.rows if row["row"] != ONLY_CANDIDATE]
    columns = _varying_columns(match, judged[:-1])
    failures = []
    for row in judged:
        name = MEAN
        if row["row"] != MEAN:
            name = _describe_settings(row, columns) or "the only row"
        if row["row"] == ONLY_BASELINE:
            failures.append(f"no figure of the candidate: {name}")
        elif row["ratio_high"] is not None and row["ratio_high"] < 1 - threshold:
            failures.append(f"slower than allowed: {row['ratio']:.3f}x ({_interval(row)}): {name}")
        elif row["ratio_high"] is None and row["row"] == MATCHED:
            numbers = f"n={row['num_baseline_runs']} and n={row['num_candidate_runs']}"
            failures.append(f"{row['verdict']}: {name} ({numbers})")
    return failures


def _make_sides(flags: CompareFlags, loaded: Sequence[list[Row]]) -> tuple[Side, Side]:
    loaded = [select_rows(rows, flags.where) for rows in loaded]
    if len(loaded) == 1 and len(flags.between) == 1:
        return split(
            loaded[0], column=flags.between[0], baseline=flags.baseline, candidate=flags.candidate
        )
    if len(loaded) == 2 and flags.baseline is None and flags.candidate is None:
        return tuple(map(make_side, map(str, flags.sides), loaded))
    raise ConfigError(
        "the two sides are not clear",
        value=" ".join(map(str, flags.sides)),
        allowed="two tables or folders, or one with --between and the column whose values are the "
        "sides, e.g. --between gpu --baseline A100 --candidate H100",
        flag="A B or --between",
    )


def _to_text(match: Match, *, lists_all: bool, in_markdown: bool) -> str:
    """The comparison for a terminal, or in Markdown."""
    draw, in_lines = (to_markdown, _as_list) if in_markdown else (to_terminal, _as_paragraphs)

    def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
        shown = [row | {"settings": _describe_settings(row, columns)} for row in rows]
        return draw(tabulate(FIELDS, shown).without_empty_columns())

    matched = match.of_kind(MATCHED)
    varying = _varying_columns(match, matched)
    parts = [
        in_lines(_facts(match, matched[0], varying, lists_all=lists_all)),
        table(matched, varying),
        in_lines(_remarks(match)),
    ]
    only = {kind: match.of_kind(kind) for kind in (ONLY_BASELINE, ONLY_CANDIDATE)}
    counts = {kind: f"{len(rows)} {kind}" for kind, rows in only.items() if rows}
    if counts and not lists_all:
        parts.append(in_lines([f"Not compared: {', '.join(counts.values())}; --all lists them."]))
    for kind, count in counts.items() if lists_all else ():
        columns = _varying_columns(match, [*matched, *only[kind]])
        parts += [in_lines([f"{count}:"]), table(only[kind], columns)]
    return "\n\n".join(parts) + "\n"


def _as_list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {for_markdown(text)}" for text in texts)


def _as_paragraphs(texts: Iterable[str]) -> str:
    return "\n".join(fit(f"  {for_terminal(text)}", hanging=4) for text in texts)


def _both(row: Row, what: str) -> str:
    """The numbers of both sides; a single one if they are equal or only one side has it."""
    numbers = (row.get(f"num_{side}_{what}") for side in ("baseline", "candidate"))
    return " and ".join(map(str, dict.fromkeys(filter(None, numbers))))


def _occasions(row: Row) -> Cell:
    """The numbers of occasions; empty if each run is an occasion."""
    text = "" if _both(row, "occasions") == _both(row, "runs") else _both(row, "occasions")
    return Cell(text, text or None)


def _times(ratio: float | None) -> Cell:
    return Cell("" if ratio is None else f"{ratio:.2f}x", ratio)


def _interval(row: Row) -> str | None:
    low, high = row.get("ratio_low"), row.get("ratio_high")
    return None if low is None else f"{low:.3f} to {high:.3f}"


def _has_too_few(row: Row) -> bool:
    """Whether two runs on a side make an interval so wide that it says nothing."""
    has_interval = row.get("ratio_low") is not None
    return has_interval and row["detectable_percent"] is None and row["verdict"] == NO_DIFFERENCE


FIELDS = (
    Field("n", lambda row: _both(row, "runs")),
    Field("occasions", _occasions),
    Field("baseline", "baseline_images_per_second", digits=5),
    Field("candidate", "candidate_images_per_second", digits=5),
    Field("ratio", lambda row: _times(row.get("ratio"))),
    Field(
        "95 % interval",
        lambda row: "too few runs" if _has_too_few(row) else _interval(row),
        unknown="",
    ),
    Field("verdict", "verdict"),
    Field("matrix product", lambda row: _times(row.get("matrix_product_ratio"))),
    Field("flags", "flags", unknown=""),
    Field("settings", "settings", unknown=""),
)


def _varying_columns(match: Match, rows: Sequence[Row]) -> list[str]:
    """The matched settings that are not the same in all of these rows."""
    return _in_order(name for name in match.columns if len({row[name] for row in rows}) > 1)


def _in_order(columns: Iterable[str]) -> list[str]:
    """The settings, with `FIRST` before the others."""
    return sorted(columns, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def _describe_settings(row: Row, columns: Iterable[str]) -> str | None:
    """The known settings of a row, e.g. ``micro_batch 4, ema true``; None without any."""
    known = [f"{name} {as_text(row[name])}" for name in columns if row.get(name) is not None]
    return ", ".join(known) or None


def _facts(match: Match, row: Row, varying: Sequence[str], *, lists_all: bool) -> list[str]:
    """The lines above the table; `row` is one of its rows."""
    lines = [f"baseline: {match.baseline.name}", f"candidate: {match.candidate.name}"]
    # Columns that change alike are named together: gpu and device are equal in runs of this suite.
    columns_of = group(match.compared, key_of=match.compared.__getitem__)
    lines += [
        f"compared: {', '.join(columns)}: {ours} -> {theirs}"
        for (ours, theirs), columns in columns_of.items()
    ] or ["compared: no setting differs, only the runs"]
    same = _in_order(
        name for name in match.columns if name not in varying and row[name] is not None
    )
    told = same if lists_all else same[:MAX_SAME]
    if same:
        more = f", and {len(same) - len(told)} more (--all)" if len(told) < len(same) else ""
        lines.append(f"the same: {_describe_settings(row, told)}{more}")
    lines += [
        f"not matched on, as {name} lacks them: {', '.join(columns)}"
        for name, columns in match.missing_on.items()
    ]
    return lines


def _remarks(match: Match) -> list[str]:
    """The lines below the table."""
    mean, matched = match.rows[-1], match.of_kind(MATCHED)
    verdicts = [row["verdict"] for row in matched]
    num_tested = sum(row["ratio_low"] is not None for row in matched)
    lines = []
    if len(matched) > 1:
        parts = (f"{mean['ratio']:.2f}x", _interval(mean), mean["verdict"])
        lines.append(f"{MEAN} of {len(matched)}: {', '.join(filter(None, parts))}")
    lines.append("Baseline and candidate are in images/s, the ratio is candidate over baseline.")
    if any(_occasions(row).text for row in matched):
        lines.append("Runs of one occasion are one sample; the ratio is that of the occasions.")
    if num_tested:
        lines += [
            "Rates are geometric means of the runs; interval: 95 %, Welch on logs, between runs.",
            _describe_detectable([row["detectable_percent"] for row in matched]),
        ]
    if any(map(_has_too_few, matched)):
        lines.append(
            "Too few runs: two on a side hardly tell how much runs vary, so their interval is too "
            f"wide to use. {MIN_RUNS - 2} more on each side makes it useful; --format json has "
            "it as it is."
        )
    if num_tested > 1:
        lines.append(f"Verdicts are corrected for {num_tested} tests (Holm); intervals are not.")
    if NOT_TESTED in verdicts:
        lines.append("Not tested: a side has a single figure; a verdict takes two on each side.")
    if APART in verdicts:
        in_turn = "let the sides take turns (python -m sdbench repeat N --against), or "
        lines.append(
            "Measured apart: a side has a single occasion or no start times, and occasions differ "
            "in more than the settings. To compare, "
            f"{in_turn if MACHINES.isdisjoint(match.compared) else ''}"
            f"measure each side on several occasions, {PAUSE_S / 3600:g} h or more apart."
        )
    if MACHINE_CHANGED in verdicts:
        lines.append(
            f"The machine changed: its matrix product differs by more than "
            f"{100 * MAX_MACHINE_CHANGE:g} %, and nothing that is compared explains it."
        )
    if match.origins:
        differences = [f"{name} {' -> '.join(texts)}" for name, texts in match.origins.items()]
        lines.append(f"Also different: {'; '.join(differences)}.")
    if UNCOMMITTED not in match.origins and any(
        row.get(UNCOMMITTED) for row in match.baseline.rows
    ):
        lines.append("Both sides had uncommitted changes, which may not be the same.")
    lines += [
        f"Left out of {side.name}: {side.describe_left_out()}."
        for side in (match.baseline, match.candidate)
        if side.left_out
    ]
    return lines


def _describe_detectable(changes: Iterable[float | None]) -> str:
    known = [change for change in changes if change]
    if not known:
        return f"{MIN_RUNS} runs or more on each side can tell what change would be found."
    sizes = dict.fromkeys(f"{change:.1f}" for change in (min(known), max(known)))
    return (
        f"With this variation a change of {' to '.join(sizes)} % would be found in "
        f"{100 * POWER:g} % of comparisons."
    )


def _to_json(match: Match) -> str:
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
        "rows": match.rows,
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
