"""The least time of an operator on this machine (roofline), and its distance from it.

Williams, Waterman and Patterson, "Roofline" (CACM 52, 4, 2009): an operator ends neither before its
arithmetic is done at the peak rate nor before its bytes have moved at the full bandwidth. Both
ceilings are measured, so that a floor is what this machine reaches at its best and no data sheet's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sdbench.measure.ceilings import Ceiling

ARITHMETIC = "arithmetic"
MEMORY = "memory"


class Operator(NamedTuple):
    """What a counted and a timed call have in common.

    Attributes:
        phase: Phase of the step, a name of sdbench/measure/phases.py.
        name: As the profiler calls it, e.g. ``aten::addmm``.
        shapes: Of its tensors with at least one dimension; tensors in lists are left out.
    """

    phase: str
    name: str
    shapes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class Work:
    """What calls of one operator have to do.

    Attributes:
        calls: How many calls.
        flop: Operations of their matrix products and convolutions, a multiply-add being two.
        num_bytes: Bytes that they read and write.
    """

    calls: int = 0
    flop: int = 0
    num_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this machine reaches at its best.

    Attributes:
        arithmetic: Type of the numbers, e.g. ``bfloat16``, to the fastest kernel, in TFLOP/s.
        memory: The fastest kernel, in GB/s, a GB being 1e9 bytes.
    """

    arithmetic: Mapping[str, Ceiling]
    memory: Ceiling

    def arithmetic_s(self, work: Work, *, dtype: str) -> float:
        """Seconds that the arithmetic takes at least."""
        return work.flop / (self.arithmetic[dtype].rate * 1e12) if work.flop else 0.0

    def memory_s(self, work: Work) -> float:
        """Seconds that the bytes take at least."""
        return work.num_bytes / (self.memory.rate * 1e9)


@dataclasses.dataclass(frozen=True)
class Timing:
    """What the profiler saw of an operator in an average step.

    Attributes:
        calls: How many calls.
        time_s: Their time: of the device, or of the host where the host is the device.
    """

    calls: float
    time_s: float


@dataclasses.dataclass(frozen=True)
class Row:
    """An operator, or several together, in one step.

    Attributes:
        phase: Phase of the step.
        name: Of the operator.
        shapes: Of its tensors; empty in a row of several.
        dtypes: Types that it computes in.
        calls: As the profiler saw them, or as they were counted where it saw none.
        time_s: Measured; None where the profiler saw no such operator.
        flop: Operations; None where the counted step had no such operator.
        num_bytes: Bytes read and written; None likewise.
        arithmetic_s: Floor that the arithmetic sets, summed over calls.
        memory_s: Floor that the bytes set, summed over calls.
        floor_s: Sum over calls of the larger of both; None where nothing was counted.
        calls_differ: Whether the profiler saw another number of calls than were counted, where
            they are work: autograd may make a view more or less.
    """

    phase: str
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: frozenset[str]
    calls: float
    time_s: float | None
    flop: int | None
    num_bytes: int | None
    arithmetic_s: float
    memory_s: float
    floor_s: float | None
    calls_differ: bool = False

    @classmethod
    def without_work(cls, operator: Operator, timing: Timing) -> Row:
        """What took time and was not counted."""
        return cls(
            *operator,
            dtypes=frozenset(),
            calls=timing.calls,
            time_s=timing.time_s,
            flop=None,
            num_bytes=None,
            arithmetic_s=0.0,
            memory_s=0.0,
            floor_s=None,
        )

    @property
    def bound(self) -> str | None:
        """The ceiling that sets most of the floor; None where there is no floor."""
        if not self.floor_s:
            return None
        return ARITHMETIC if self.arithmetic_s > self.memory_s else MEMORY

    @property
    def tflop_per_s(self) -> float | None:
        """Arithmetic done in the measured time."""
        return _ratio(self.flop, self.time_s, 1e12)

    @property
    def gb_per_s(self) -> float | None:
        """Bytes moved in the measured time."""
        return _ratio(self.num_bytes, self.time_s, 1e9)

    @property
    def arithmetic_percent(self) -> float | None:
        """Share of the arithmetic ceiling, in percent."""
        return None if not self.flop else _ratio(self.arithmetic_s, self.time_s, 0.01)

    @property
    def memory_percent(self) -> float | None:
        """Share of the bandwidth ceiling, in percent."""
        return None if not self.num_bytes else _ratio(self.memory_s, self.time_s, 0.01)


def join(
    counted: Mapping[tuple[Operator, str], Work],
    timed: Mapping[Operator, Timing],
    *,
    ceilings: Ceilings,
) -> list[Row]:
    """Set the work of each operator beside its time.

    Args:
        counted: Operator and type of its numbers to the work of a step. All calls that share a key
            do the same work, so the larger of their sums is the sum of the larger ones.
        timed: Operator to its time in a step.
        ceilings: Of the machine.

    Returns:
        A row for each operator that was counted or timed, those of the longest time first.
    """
    rows = [_counted_row(key, work, ceilings=ceilings) for key, work in counted.items()]
    by_operator: dict[Operator, Row | None] = dict.fromkeys(timed)
    by_operator |= {_operator(row): row for row in group(rows, _operator)}
    joined = [
        _with_timing(operator, row, timed.get(operator)) for operator, row in by_operator.items()
    ]
    return sorted(joined, key=lambda row: (-(row.time_s or 0.0), -(row.floor_s or 0.0)))


def group(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[Row]:
    """Add up rows that have the same key; what they differ in is blank, in the order of the first.

    Args:
        rows: Each of one operator or of several.
        key: What the rows of one group share.
    """
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [_add(members) for members in groups.values()]


def _operator(row: Row) -> Operator:
    return Operator(row.phase, row.name, row.shapes)


def _counted_row(key: tuple[Operator, str], work: Work, *, ceilings: Ceilings) -> Row:
    operator, dtype = key
    arithmetic_s, memory_s = ceilings.arithmetic_s(work, dtype=dtype), ceilings.memory_s(work)
    return Row(
        *operator,
        dtypes=frozenset([dtype]),
        calls=work.calls,
        time_s=None,
        flop=work.flop,
        num_bytes=work.num_bytes,
        arithmetic_s=arithmetic_s,
        memory_s=memory_s,
        floor_s=max(arithmetic_s, memory_s),
    )


def _with_timing(operator: Operator, row: Row | None, timing: Timing | None) -> Row:
    if row is None:
        assert timing is not None
        return Row.without_work(operator, timing)
    if timing is None:
        return row
    return dataclasses.replace(
        row,
        calls=timing.calls,
        time_s=timing.time_s,
        calls_differ=bool(row.floor_s) and timing.calls != row.calls,
    )


def _add(rows: list[Row]) -> Row:
    return Row(
        phase=_common([row.phase for row in rows], ""),
        name=_common([row.name for row in rows], ""),
        shapes=_common([row.shapes for row in rows], ()),
        dtypes=frozenset().union(*(row.dtypes for row in rows)),
        calls=sum(row.calls for row in rows),
        time_s=_sum_known([row.time_s for row in rows]),
        flop=_sum_known([row.flop for row in rows]),
        num_bytes=_sum_known([row.num_bytes for row in rows]),
        arithmetic_s=math.fsum(row.arithmetic_s for row in rows),
        memory_s=math.fsum(row.memory_s for row in rows),
        floor_s=_sum_known([row.floor_s for row in rows]),
        calls_differ=any(row.calls_differ for row in rows),
    )


def _common(values: Sequence[Any], blank: Any) -> Any:
    return values[0] if all(value == values[0] for value in values) else blank


def _sum_known(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratio(amount: float | None, time_s: float | None, unit: float) -> float | None:
    return None if amount is None or not time_s else amount / time_s / unit
