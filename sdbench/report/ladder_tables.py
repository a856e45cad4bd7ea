"""What does each speed-up gain, alone and on top of the others?

Gains are ratios of geometric means of the runs' rates. Their interval (95 %, Welch on logs, between
runs) takes two runs on either side.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.report.ladder import Configuration, Ladder, changes, difference, find_ladders
from sdbench.report.ladder_rungs import (
    DEVICES,
    RUNGS,
    describe_effect,
    describe_flags,
    find_rung,
    own_settings,
)
from sdbench.report.tables import Cell, Column, Table, make_cell
from sdbench.report.terminal import format_number, format_rates
from sdbench.report.throughput_table import describe_notes
from sdbench.statistics.intervals import Comparison, compare

NOT_MEASURED = "not measured"
EMPTY = make_cell(None, unknown="")
LADDER_COLUMNS = (
    Column("rung"),
    Column("what it does"),
    Column("alone, images/s", is_number=True),
    Column("alone, over seed", is_number=True),
    Column("with those above, images/s", is_number=True),
    Column("over the one above", is_number=True),
    Column("over seed", is_number=True),
    Column("step p50, s", is_number=True),
    Column("peak memory, GiB", is_number=True),
    Column("from"),
    Column("notes"),
)
PENDING_COLUMNS = (Column("rung"), Column("what it does"), Column("from"), Column("gain"))


def make_ladder_tables(configurations: Sequence[Configuration]) -> list[Table]:
    """One table for each device, track and context in which the preset seed and more was measured.

    Args:
        configurations: All that were measured.
    """
    ladders = find_ladders(configurations)
    return [_ladder_table(f"ladder-{number}", one) for number, one in enumerate(ladders, 1)]


def make_pending_tables(configurations: Sequence[Configuration]) -> list[Table]:
    """The rungs of which no run has been made, by device and by whether they need several ranks.

    Args:
        configurations: All that were measured.
    """
    tables = []
    for device, name in DEVICES.items():
        for has_ranks, who in ((False, "one rank"), (True, "several ranks")):
            climbed = [
                one.added
                for one in configurations
                if one.device_type == device and (one.num_ranks > 1) == has_ranks
            ]
            rows = [
                [*_name_cells(rung.settings), make_cell(rung.origin), make_cell(NOT_MEASURED)]
                for rung in RUNGS
                if device in rung.devices
                and rung.needs_ranks == has_ranks
                and not any(map(rung.is_part_of, climbed))
            ]
            if rows:
                slug = f"pending-{device}-{who.replace(' ', '-')}"
                tables.append(Table(slug, f"{name}, {who}", PENDING_COLUMNS, rows))
    return tables


def ratio_cell(comparison: Comparison) -> Cell:
    """A ratio, with its interval where there are runs enough for one."""
    text, interval = f"{comparison.ratio:.2f}x", comparison.interval
    if interval is not None:
        text += f" ({interval.low:.2f} to {interval.high:.2f})"
    return Cell(text, comparison.ratio)


def _ladder_table(name: str, ladder: Ladder) -> Table:
    base = ladder.base
    steps = list(itertools.pairwise([base, *ladder.chain]))
    climbed = [difference(before, after) for before, after in steps]
    rows = [
        _seed_row(base),
        *(_chain_row(ladder, before, after) for before, after in steps),
    ]
    if ladder.fast is not None:
        rows.append(_fast_row(ladder, ladder.fast))
        rows += [_beyond_row(ladder, ladder.fast, one) for one in ladder.beyond]
    rows += [
        _alone_row(ladder, one) for one in ladder.alone if own_settings(one.added) not in climbed
    ]
    return Table(name, ladder.caption, LADDER_COLUMNS, rows).without_empty_columns()


def _seed_row(base: Configuration) -> list[Cell]:
    rate = rate_cell(base)
    return [
        make_cell("--preset seed"),
        make_cell("the recipe of mosaicml/diffusion-benchmark"),
        rate,
        EMPTY,
        rate,
        EMPTY,
        EMPTY,
        make_cell(base.step_time_s),
        memory_cell(base),
        make_cell("mosaicml/diffusion-benchmark"),
        make_cell(notes_of(base), unknown=""),
    ]


def _chain_row(ladder: Ladder, before: Configuration, after: Configuration) -> list[Cell]:
    rung = difference(before, after)
    alone = next((one for one in ladder.alone if own_settings(one.added) == rung), None)
    return [
        *_name_cells(rung),
        *_alone_cells(ladder, alone),
        rate_cell(after),
        ratio_cell(compare(after.rates, before.rates)),
        ratio_cell(compare(after.rates, ladder.base.rates)),
        *_size_cells(alone, after),
        _origin_cell(rung),
        make_cell(notes_of(*filter(None, (alone, after))), unknown=""),
    ]


def _alone_row(ladder: Ladder, alone: Configuration) -> list[Cell]:
    return [
        *_name_cells(alone.added),
        *_alone_cells(ladder, alone),
        EMPTY,
        EMPTY,
        EMPTY,
        *_size_cells(alone, None),
        _origin_cell(alone.added),
        make_cell(notes_of(alone), unknown=""),
    ]


def _fast_row(ladder: Ladder, fast: Configuration) -> list[Cell]:
    return [
        make_cell("--preset fast"),
        make_cell(f"seed {describe_flags(fast.added)}"),
        EMPTY,
        EMPTY,
        rate_cell(fast),
        EMPTY,
        ratio_cell(compare(fast.rates, ladder.base.rates)),
        make_cell(fast.step_time_s),
        memory_cell(fast),
        make_cell("this suite"),
        make_cell(notes_of(fast), unknown=""),
    ]


def _beyond_row(ladder: Ladder, fast: Configuration, one: Configuration) -> list[Cell]:
    rung = changes(fast, one)
    return [
        make_cell(f"--preset fast {describe_flags(rung)}"),
        make_cell(describe_effect(rung)),
        EMPTY,
        EMPTY,
        rate_cell(one),
        ratio_cell(compare(one.rates, fast.rates)),
        ratio_cell(compare(one.rates, ladder.base.rates)),
        *_size_cells(None, one),
        _origin_cell(rung if find_rung(rung) is not None else changes(one, fast)),
        make_cell(notes_of(one), unknown=""),
    ]


def _name_cells(added: Mapping[str, Any]) -> list[Cell]:
    return [make_cell(describe_flags(added)), make_cell(describe_effect(added))]


def _alone_cells(ladder: Ladder, alone: Configuration | None) -> list[Cell]:
    if alone is None:
        return [make_cell(NOT_MEASURED), EMPTY]
    return [rate_cell(alone), ratio_cell(compare(alone.rates, ladder.base.rates))]


def _size_cells(alone: Configuration | None, together: Configuration | None) -> list[Cell]:
    """Step time and memory: alone, and together with the rungs above."""
    known = [one for one in (alone, together) if one is not None]
    steps_s = [one.step_time_s for one in known]
    peaks_gib = [one.peak_memory_gib for one in known]
    return [
        Cell("; ".join(format_number(step_s) for step_s in steps_s), steps_s[-1]),
        Cell("; ".join(f"{peak_gib:.1f}" for peak_gib in peaks_gib), peaks_gib[-1]),
    ]


def _origin_cell(added: Mapping[str, Any]) -> Cell:
    rung = find_rung(added)
    return make_cell(None if rung is None else rung.origin)


def rate_cell(one: Configuration) -> Cell:
    """Images/s with the interval between runs, or within each where there are fewer than three."""
    text = format_rates([run["summary"] for run in one.runs])
    return Cell(text, statistics.median(one.rates))


def memory_cell(one: Configuration) -> Cell:
    """Peak memory of a rank, in GiB."""
    return Cell(f"{one.peak_memory_gib:.1f}", one.peak_memory_gib)


def notes_of(*configurations: Configuration) -> str | None:
    """What a reader must know before trusting these runs, in words."""
    return describe_notes([run for one in configurations for run in one.runs])
