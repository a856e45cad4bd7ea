"""The least time of an operator on this machine (roofline), and its distance from it.

Williams, Waterman and Patterson, "Roofline" (CACM 52, 4, 2009): an operator ends neither before its
arithmetic is done at the peak rate nor before its bytes have moved at the full bandwidth. Both
ceilings are measured on this machine, not taken from a data sheet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from sdbench.measure.ceilings import Ceiling
from sdbench.measure.phases import PHASES

NO_OPERATOR = "no operator"
# What identifies an operator, and what adds up over several of them.
KEYS = ("phase", "operator", "shapes")
SUMS = ("calls", "time_s", "flop", "num_bytes", "arithmetic_s", "memory_s", "floor_s")
# What AdamW must move of a weight: its gradient in bf16 and, in fp32, the weight and both moments
# are read (2 + 3 x 4), and these three and the weight in bf16 written (3 x 4 + 2).
BYTES_PER_UPDATE = 28


class Operator(NamedTuple):
    """What a counted and a timed call have in common.

    The name is the profiler's, e.g. ``aten::addmm``. The shapes are those of its tensors with at
    least one dimension; tensors in lists are left out.
    """

    phase: str
    name: str
    shapes: tuple[tuple[int, ...], ...]

    def in_words(self) -> tuple[str, str, str]:
        """The values of `KEYS`."""
        shapes = " ".join("x".join(map(str, shape)) for shape in self.shapes)
        return self.phase, self.name, shapes


@dataclasses.dataclass
class Work:
    """What calls of one operator have to do; a multiply-add of a product is two operations."""

    calls: int = 0
    flop: int = 0
    num_bytes: int = 0


class Timing(NamedTuple):
    """Calls of an operator or kernel in an average step, and their time in seconds."""

    calls: float
    time_s: float


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The fastest kernels of this machine: TFLOP/s by type, e.g. ``bfloat16``, and 1e9 bytes/s."""

    arithmetic: Mapping[str, Ceiling]
    memory: Ceiling


def join(
    counted: Mapping[tuple[Operator, str], Work],
    timed: Mapping[Operator, Timing],
    *,
    ceilings: Ceilings,
) -> pd.DataFrame:
    """Set the work of each operator in a step beside its time, the longest time first.

    Work is counted by operator and dtype. Calls with the same key do the same work, so the maximum
    of their summed arithmetic and memory times is their summed floor. NaN is an unknown sum.
    ``calls_differ`` marks an operator that the profiler saw another number of times than counted.
    Operators without work are never marked: autograd may make a view more or less.
    """
    work = pd.DataFrame(
        [
            (*operator.in_words(), dtype, *dataclasses.astuple(work))
            for (operator, dtype), work in counted.items()
        ],
        columns=[*KEYS, "types", "num_counted", "flop", "num_bytes"],
    )
    rates = {dtype: 1e12 * ceiling.rate for dtype, ceiling in ceilings.arithmetic.items()}
    # A type that nothing multiplies in has no ceiling, and needs none.
    work["arithmetic_s"] = (work.flop / work.types.map(rates)).fillna(0.0)
    work["memory_s"] = work.num_bytes / (1e9 * ceilings.memory.rate)
    work["floor_s"] = work[["arithmetic_s", "memory_s"]].max(axis=1)
    work = work.groupby([*KEYS], sort=False, as_index=False).agg(
        {"types": lambda types: " ".join(sorted(types))}
        | {name: "sum" for name in work if name not in (*KEYS, "types")}
    )
    times = pd.DataFrame(
        [(*operator.in_words(), *timing) for operator, timing in timed.items()],
        columns=[*KEYS, "calls", "time_s"],
    ).astype({"calls": float, "time_s": float})  # also if nothing was timed
    rows = work.merge(times, on=[*KEYS], how="outer", sort=False)
    is_timed = rows.calls.notna()
    rows["calls_differ"] = is_timed & (rows.floor_s > 0) & (rows.calls != rows.num_counted)
    rows["calls"] = rows.calls.fillna(rows.num_counted)
    rows["types"] = rows.types.fillna("")
    rows = rows.sort_values(["time_s", "floor_s"], ascending=False, ignore_index=True)
    return rows[[*KEYS, "types", *SUMS, "calls_differ"]]


def add_up(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Add up the rows that agree in some columns; a sum is NaN if it is unknown in all of them."""
    return rows.groupby([*by], sort=False)[[*SUMS]].sum(min_count=1).reset_index()


@dataclasses.dataclass(frozen=True)
class Profile:
    """The figures of one average step.

    Attributes:
        rows: As `join` makes them.
        kernels: Of a GPU, by name; empty on a CPU.
        step_s: Length of a step without the profiler, in seconds.
        profiled_step_s: Length of a step under the profiler, which shares refer to.
        model_flop: Operations of the model for these images, nothing computed a second time.
        num_trained: Weights that the optimizer updates.
    """

    rows: pd.DataFrame
    kernels: Mapping[str, Timing]
    ceilings: Ceilings
    step_s: float
    profiled_step_s: float
    num_images: int
    model_flop: float
    num_trained: int

    @property
    def by_phase(self) -> pd.DataFrame:
        """Sums over the operators of each phase in the order of a step, and the rest of it."""
        phases = add_up(self.rows, ["phase"])
        phases = phases.sort_values("phase", key=lambda names: names.map(PHASES.index))
        outside = {"phase": NO_OPERATOR, "calls": 0.0, "time_s": self.outside_s}
        return pd.concat([phases, pd.DataFrame([outside])], ignore_index=True)

    @property
    def by_operator(self) -> pd.DataFrame:
        """Sums over the shapes of each operator within a phase; the longest time first."""
        return _longest_first(add_up(self.rows, ["phase", "operator"]))

    @property
    def unmatched(self) -> pd.DataFrame:
        """Operators and kernels that took time and were not counted; the longest time first."""
        return _longest_first(add_up(self.rows[self.rows.flop.isna()], ["operator"]))

    @property
    def counted_flop(self) -> float:
        """Operations that the step really does."""
        return float(self.rows.flop.sum())

    @property
    def floor_s(self) -> float:
        """Seconds that the counted operators take at least, one after the other."""
        return float(self.rows.floor_s.sum())

    @property
    def main_dtype(self) -> str:
        """The type in which most of the arithmetic is done."""
        return self.rows.groupby("types").flop.sum().idxmax().split()[0]

    @property
    def ideal_floor_s(self) -> float:
        """Seconds that the model's operations take at the arithmetic ceiling of that type."""
        return self.model_flop / (self.ceilings.arithmetic[self.main_dtype].rate * 1e12)

    @property
    def needed_floor_s(self) -> float:
        """`ideal_floor_s` and the seconds of one pass of AdamW at the memory ceiling."""
        update_bytes = BYTES_PER_UPDATE * self.num_trained
        return self.ideal_floor_s + update_bytes / (self.ceilings.memory.rate * 1e9)

    @property
    def explained_percent(self) -> float:
        """Share of the profiled step in operators whose work is known."""
        return self.share(self.rows.time_s[self.rows.flop.notna()].sum())

    @property
    def outside_s(self) -> float:
        """Seconds of the profiled step in which no operator ran."""
        return float(self.profiled_step_s - self.rows.time_s.sum())

    def share(self, time_s: float) -> float:
        """Percent of the profiled step."""
        return float(100 * time_s / self.profiled_step_s)


def _longest_first(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.sort_values("time_s", ascending=False, kind="stable", ignore_index=True)
