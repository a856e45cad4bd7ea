"""Tables of the gain of each speed-up, alone and on top of the others.

A gain is the result of `python -m sdbench compare` for the runs of both configurations: a ratio of
geometric means with a 95 % interval, or the reason why there is no interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sdbench.analysis.compare_match import APART, MACHINE_CHANGED, compare_rows
from sdbench.analysis.ladder import Configuration, Ladder, changes, difference, find_ladders
from sdbench.analysis.ladder_rungs import (
    DEVICES,
    RUNGS,
    describe_effect,
    describe_flags,
    find_rung,
    own_settings,
)
from sdbench.report.runs import notes_cell, peak_memory_cell, rates_cell, summary_cell
from sdbench.report.tables import EMPTY, Cell, Table, make_table
from sdbench.statistics.intervals import Comparison

NOT_MEASURED = Cell("not measured", None)
SEED_ORIGIN = "mosaicml/diffusion-benchmark"


def make_ladder_tables(configurations: Sequence[Configuration]) -> list[Table]:
    """A table for each context in which the preset seed and a speed-up were measured."""
    return [
        make_table(
            _ladder_rows(ladder), name=f"ladder-{number}", caption=ladder.caption
        ).without_empty_columns()
        for number, ladder in enumerate(find_ladders(configurations), 1)
    ]


def make_pending_tables(configurations: Sequence[Configuration]) -> list[Table]:
    """The rungs without a run, by device and by whether they need several ranks."""
    tables = []
    for device, has_ranks in itertools.product(DEVICES, (False, True)):
        measured = [
            one.added
            for one in configurations
            if one.device_type == device and (one.num_ranks > 1) == has_ranks
        ]
        rows = [
            {
                "rung": describe_flags(rung.settings),
                "what it does": describe_effect(rung.settings),
                "from": rung.origin,
                "gain": "not measured",
            }
            for rung in RUNGS
            if device in rung.devices
            and rung.needs_ranks == has_ranks
            and not any(map(rung.is_part_of, measured))
        ]
        if rows:
            ranks = "several ranks" if has_ranks else "one rank"
            name = f"pending-{device}-{ranks.replace(' ', '-')}"
            tables.append(make_table(rows, name=name, caption=f"{DEVICES[device]}, {ranks}"))
    return tables


def _ladder_rows(ladder: Ladder) -> Iterable[dict[str, Any]]:
    base, fast = ladder.base, ladder.fast
    yield {
        "rung": "--preset seed",
        "what it does": f"the recipe of {SEED_ORIGIN}",
        **_figures(base, together=base),
        "alone, images/s": rates_cell(base.runs),
        "from": SEED_ORIGIN,
        "notes": notes_cell(base.runs),
    }
    climbed = []
    for above, after in itertools.pairwise([base, *ladder.chain]):
        rung = difference(above, after)
        climbed.append(rung)
        alone = next((one for one in ladder.alone if own_settings(one.added) == rung), None)
        row = _rung_row(rung, base, alone=alone, together=after, above=above)
        yield row if alone is not None else {**row, "alone, images/s": NOT_MEASURED}
    if fast is not None:
        yield {
            "rung": "--preset fast",
            "what it does": f"seed {describe_flags(fast.added)}",
            **_figures(base, together=fast),
            "from": "this suite",
            "notes": notes_cell(fast.runs),
        }
        for one in ladder.beyond:
            rung = changes(fast, one)
            row = _rung_row(rung, base, together=one, above=fast)
            row["rung"] = f"--preset fast {row['rung']}"
            if find_rung(rung) is None:
                row["from"] = _origin(changes(one, fast))
            yield row
    for alone in ladder.alone:
        if own_settings(alone.added) not in climbed:
            yield _rung_row(alone.added, base, alone=alone)


def _rung_row(
    rung: Mapping[str, Any],
    base: Configuration,
    *,
    alone: Configuration | None = None,
    together: Configuration | None = None,
    above: Configuration | None = None,
) -> dict[str, Any]:
    return {
        "rung": describe_flags(rung),
        "what it does": describe_effect(rung),
        **_figures(base, alone=alone, together=together, above=above),
        "from": _origin(rung),
        "notes": notes_cell([run for one in (alone, together) if one for run in one.runs]),
    }


def _figures(
    base: Configuration,
    *,
    alone: Configuration | None = None,
    together: Configuration | None = None,
    above: Configuration | None = None,
) -> dict[str, Cell]:
    """Rates, gains, step times and memory of a rung on the preset seed, and on those above it."""
    known = [one.runs for one in (alone, together) if one is not None]
    return {
        "alone, images/s": rates_cell(alone.runs) if alone else EMPTY,
        "alone, over seed": ratio_cell(alone, base),
        "with those above, images/s": rates_cell(together.runs) if together else EMPTY,
        "over the one above": ratio_cell(together, above),
        "over seed": ratio_cell(together, base),
        "step p50, s": _join([summary_cell(runs, "step_time_p50_s") for runs in known]),
        "peak memory, GiB": _join([peak_memory_cell(runs) for runs in known]),
    }


def _join(cells: Sequence[Cell]) -> Cell:
    return Cell("; ".join(cell.text for cell in cells), cells[-1].value)


def _origin(rung: Mapping[str, Any]) -> str | None:
    found = find_rung(rung)
    return None if found is None else found.origin


def ratio_cell(one: Configuration | None, baseline: Configuration | None) -> Cell:
    """Rate over that of a baseline, with how sure that is.

    Empty if one of the two is missing, and for the baseline itself.
    """
    if one is None or baseline is None or one is baseline:
        return EMPTY
    comparison = compare_rows(baseline.rows, one.rows)
    sure = how_sure(comparison, lambda ratio: f"{ratio:.2f}")
    return Cell(f"{comparison.ratio:.2f}x{sure}", comparison.ratio)


def how_sure(comparison: Comparison, form: Callable[[float], str]) -> str:
    """The interval, or the reason why there is none, in brackets; empty for single runs."""
    if comparison.interval is not None:
        return f" ({form(comparison.interval.low)} to {form(comparison.interval.high)})"
    if comparison.verdict in (APART, MACHINE_CHANGED):
        return f" ({comparison.verdict.partition(': ')[2]})"
    return ""
