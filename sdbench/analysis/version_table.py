"""The same work on several versions of torch, diffusers and this suite, and what that changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sdbench.analysis.compare_match import compare_rows
from sdbench.analysis.compare_sides import row_of_run
from sdbench.analysis.ladder_tables import comparison_cell
from sdbench.record.configuration import group
from sdbench.report.runs import describe_run, group_runs, notes_cell, rates_cell
from sdbench.report.tables import Cell, Field, Table, tabulate
from sdbench.statistics.intervals import Comparison

# The suite's version is its commit.
PACKAGES = ("torch", "diffusers")


class _Change(NamedTuple):
    """Runs of one configuration before and after a change of versions, which is in words."""

    before: Sequence[dict[str, Any]]
    after: Sequence[dict[str, Any]]
    changed: str
    comparison: Comparison


def make_version_table(records: Iterable[dict[str, Any]]) -> Table:
    """A row for each configuration and change of versions, in the order of the runs."""
    caption = "The same work on several versions, each compared with the one measured before it"
    return tabulate(FIELDS, _find_changes(records), name="versions", caption=caption)


def _find_changes(records: Iterable[dict[str, Any]]) -> Iterator[_Change]:
    in_time = sorted(records, key=lambda record: record["started_utc"])
    for runs in group_runs(in_time):
        by_versions = group(runs, key_of=lambda run: tuple(_versions_of(run).items()))
        for before, after in itertools.pairwise(by_versions.values()):
            old, new = _versions_of(before[0]), _versions_of(after[0])
            changed = ", ".join(
                f"{name} {old[name]} -> {new[name]}" for name in new if old[name] != new[name]
            )
            sides = ([row_of_run(run) for run in some] for some in (before, after))
            yield _Change(before, after, changed, compare_rows(*sides))


def _versions_of(record: dict[str, Any]) -> dict[str, str]:
    versions = {name: record["versions"].get(name) or "not installed" for name in PACKAGES}
    return versions | {"this suite": (record["git"]["commit"] or "unknown")[:7]}


def _ratio_cell(change: _Change) -> Cell:
    return comparison_cell(change.comparison, "{:.3f}".format, unit="x")


FIELDS = (
    Field("configuration", lambda change: describe_run(change.after[0])),
    Field("change", lambda change: change.changed),
    Field("images/s before", lambda change: rates_cell(change.before), is_left=True),
    Field("images/s after", lambda change: rates_cell(change.after), is_left=True),
    Field("after over before", _ratio_cell, is_left=True),
    Field("verdict", lambda change: change.comparison.verdict),
    Field("notes", lambda change: notes_cell([*change.before, *change.after])),
)
