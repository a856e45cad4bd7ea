"""The command `python -m sdbench compare`: two tables of figures or sets of runs, row by row."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from sdbench.base.errors import ConfigError, RunError
from sdbench.report.compare_match import GUARDED, Match, Pair, match
from sdbench.report.compare_output import FORMATS, describe_settings, varying_columns
from sdbench.report.compare_sides import (
    UNREADABLE,
    NothingToCompareError,
    Row,
    Side,
    check_distinct,
    load_rows,
    make_side,
    split,
)
from sdbench.report.figures import parse_conditions, select_rows, write_out
from sdbench.settings.kinds import PATH, SHARE, SWITCH, TEXT, list_of, one_of
from sdbench.settings.request import parse
from sdbench.settings.setting import REQUIRED, setting
from sdbench.statistics.intervals import NOT_TESTED

DESCRIPTION = """\
Set two tables of figures, or two sets of runs, against each other, row by row.

A and B are tables in CSV or folders with records at any depth; A is the baseline. Rows are matched
on every setting but those that are one value throughout A and another throughout B: these are what
is compared, and they are named. Several runs of one configuration are its replicates. With one
table or folder, --between names the column whose values are the two sides.

A row with two or more runs on each side has a 95 % interval and a verdict: faster or slower only
if the interval excludes 1 and the change exceeds 2 %, corrected for the number of rows (Holm). How
good is that? In 2,000 simulated pairs of sides each (tests/test_statistics_simulated.py), whose
runs differ by 1 % and have 200 steps that differ by 3 %, with a lag-1 correlation of 0.8, and in
brackets 0.5:
  runs on each side                     3             5            10
  the interval covers the truth    97 % (97)     95 % (96)     95 % (96)
  wrongly said to differ          1.0 % (0.6)   0.8 % (0.2)     0 % (0.05)
  a change of 3 % is found         52 % (60)     88 % (92)     97 % (98)
A change of 5 % is found with 5 runs on each side in more than 99 %.

When the runs were made counts. An hour later a machine differs by more than two runs beside each
other do. Where the sides take turns, as under `python -m sdbench repeat N --against`, each run is a
sample. Where they do not, the occasion is: runs with no run of the other side and no pause of more
than an hour between them. With one occasion on a side there is no verdict: measured apart. Nor is
there one where the machine's matrix product differs by more than 5 % beyond chance, or, with the
same settings, software and code, its clock or temperature. Of 2,000 simulated pairs of equal sides,
whose occasions differ by 1, 1.5 and 2 % (tests/test_statistics_occasions.py), are wrongly said to
differ:
  five runs of each, in turn                  0.15 %  0.10 %  0.15 %
  two occasions of each, of three runs        0.95 %  1.25 %  2.50 %
  five occasions of each, of three runs       0.60 %  2.55 %  4.35 %
  five, then five, if each run were a sample    20 %    36 %    49 %
With three samples or more on each side, the change is told that 80 % of comparisons would find if
runs vary as these do (74 to 81 % with 3 to 10 runs in simulations).

A run counts once, however many copies of its record there are, and cannot be on both sides.
"""

EPILOG = """\
examples:
  python -m sdbench repeat 5 --against 'composer benchmark.py' -- composer benchmark.py --use_ema
  python -m sdbench compare runs/repeat_A/baseline runs/repeat_A/candidate --fail_if_slower 5%
  python -m sdbench compare results/quoted/aws_p4de_p5_single_node.csv --between gpu
  python -m sdbench compare results/quoted/mlperf_training_sd2.csv --between gpu \\
      --where submitter=NVIDIA global_batch=256 --baseline H100 --candidate B200
  python -m sdbench compare runs --between preset --baseline seed --candidate fast \\
      --allow precision --format markdown
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """Flags of compare."""

    sides: tuple[Path, ...] = setting(
        PATH,
        REQUIRED,
        "table in CSV, or folder with records",
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
    baseline: str | None = setting(TEXT, None, "value of that column, or its beginning")
    candidate: str | None = setting(TEXT, None, "value of that column, or its beginning")
    where: tuple[str, ...] = setting(
        TEXT,
        (),
        "COLUMN=VALUE: use only the rows with these values, or with the only one that begins so",
        takes_several=True,
    )
    allow: tuple[str, ...] = setting(
        list_of(one_of(*GUARDED)), (), "compare across these settings nevertheless"
    )
    fail_if_slower: float | None = setting(
        SHARE,
        None,
        "exit with 1 if the whole interval of a row, or of the geometric mean, is slower by more "
        "than, e.g., 5%. What has no verdict fails as well: fewer than 2 runs on a side, sides "
        "measured apart, a machine that changed, a row that B has no figure for, no row on both "
        "sides",
    )
    format: str = setting(one_of(*FORMATS), "terminal", "form of the tables")
    all: bool = setting(
        SWITCH,
        False,
        "list every setting that is the same, and the rows that are on one side only (csv and json "
        "always have both)",
    )
    out: Path | None = setting(PATH, None, "write to a file instead of the terminal")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the comparison; exit with 1 if --fail_if_slower finds a slower or an untested row."""
    arguments = _parse(argv)
    loaded = [load_rows(path) for path in arguments.sides]
    try:
        found = _match_sides(arguments, loaded)
    except NothingToCompareError as error:
        if arguments.fail_if_slower is None:
            raise
        raise RunError(f"--fail_if_slower has nothing to judge: {error}") from None
    text = FORMATS[arguments.format](found, lists_all=arguments.all)
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        write_out(arguments.out, text)
    if arguments.fail_if_slower is None:
        return 0
    failures = find_failures(found, threshold=arguments.fail_if_slower)
    failures += [
        f"not judged: {number} x {UNREADABLE} in {path}"
        for path, rows in zip(arguments.sides, loaded, strict=True)
        if (number := sum(row.get("status") == UNREADABLE for row in rows))
    ]
    for failure in failures:
        print(f"--fail_if_slower: {failure}", file=sys.stderr)
    return 1 if failures else 0


def find_failures(match: Match, *, threshold: float) -> list[str]:
    """Find the reasons why the candidate does not pass --fail_if_slower.

    A tested row fails if its whole interval lies below the bound. A row that cannot be tested
    fails, whatever its ratio. So does a configuration without a figure of the candidate, which may
    have crashed.
    """
    shown = [pair.baseline[0] for pair in match.pairs] + [runs[0] for runs in match.only_baseline]
    columns = varying_columns(match, shown)
    rows = [(describe_settings(pair.baseline[0], columns), pair.comparison) for pair in match.pairs]
    rows.append((f"geometric mean of {len(match.pairs)}", match.mean))
    failures = [
        f"slower than allowed: {comparison.ratio:.3f}x "
        f"({comparison.interval.low:.3f} to {comparison.interval.high:.3f}): {name}"
        for name, comparison in rows
        if comparison.interval is not None and comparison.interval.high < 1 - threshold
    ]
    failures += [
        f"{_tell_why_untested(pair)}: {describe_settings(pair.baseline[0], columns)}"
        for pair in match.pairs
        if pair.comparison.interval is None
    ]
    failures += [
        f"no figure of the candidate: {describe_settings(runs[0], columns)}"
        for runs in match.only_baseline
    ]
    return failures


def _tell_why_untested(pair: Pair) -> str:
    if pair.comparison.verdict != NOT_TESTED:
        return pair.comparison.verdict
    num_runs = f"n={len(pair.baseline)} and n={len(pair.candidate)}"
    return f"{NOT_TESTED}: too few runs ({num_runs}; 2 or more on each side are needed)"


def _match_sides(arguments: CompareFlags, loaded: Sequence[list[Row]]) -> Match:
    baseline, candidate = _make_sides(arguments, loaded)
    check_distinct(baseline, candidate)
    return match(
        baseline,
        candidate,
        between=[] if len(arguments.sides) == 1 else arguments.between,
        allow=arguments.allow,
    )


def _make_sides(arguments: CompareFlags, loaded: Sequence[list[Row]]) -> tuple[Side, Side]:
    conditions = parse_conditions(arguments.where, flag="--where")
    loaded = [select_rows(rows, conditions, flag="--where") for rows in loaded]
    if len(loaded) == 2:
        for name in ("baseline", "candidate"):
            if (value := getattr(arguments, name)) is not None:
                raise ConfigError(
                    f"--{name} chooses a side of one table, and two are given",
                    value=value,
                    allowed="one table or folder with --between, or two without it",
                    flag=f"--{name}",
                )
        return tuple(
            make_side(str(path), rows) for path, rows in zip(arguments.sides, loaded, strict=True)
        )
    if len(arguments.between) != 1:
        raise ConfigError(
            "one table or folder has no two sides by itself",
            value=",".join(arguments.between) or "no --between",
            allowed="the column whose values are the sides, e.g. --between gpu, or a second table",
            flag="--between",
        )
    return split(
        loaded[0],
        column=arguments.between[0],
        baseline=arguments.baseline,
        candidate=arguments.candidate,
    )


def _parse(argv: Sequence[str] | None) -> CompareFlags:
    flags = parse(
        CompareFlags,
        argv,
        prog="python -m sdbench compare",
        description=DESCRIPTION,
        epilog=EPILOG,
    ).config
    if len(flags.sides) > 2:
        raise ConfigError(
            "more than two sides are given",
            value=" ".join(map(str, flags.sides)),
            allowed="one table or folder with --between, or two",
            flag="A B",
        )
    return flags
