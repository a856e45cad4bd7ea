"""The figures of a profile: sums over the operators of a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from sdbench.measure.phases import PHASES
from sdbench.tasks.profile.roofline import Ceilings, Operator, Row, Timing, group

NO_OPERATOR = "no operator"
# What AdamW must move of a weight: its gradient in bf16 and, in fp32, the weight and both moments
# are read (2 + 3 x 4), and these three and the weight in bf16 written (3 x 4 + 2).
BYTES_PER_UPDATE = 28


@dataclasses.dataclass(frozen=True)
class Profile:
    """The figures of one average step.

    Attributes:
        rows: Of operators that were counted, timed or both; those of the longest time first.
        kernels: Of a GPU, by name; empty on a CPU.
        ceilings: Of the machine.
        step_s: Length of a step as it is, in seconds.
        profiled_step_s: Length of a step under the profiler, which shares refer to.
        num_images: Images of a step.
        model_flop: Operations of the model for these images, nothing computed a second time.
        num_trained: Weights that the optimizer updates.
    """

    rows: Sequence[Row]
    kernels: Mapping[str, Timing]
    ceilings: Ceilings
    step_s: float
    profiled_step_s: float
    num_images: int
    model_flop: float
    num_trained: int

    @property
    def by_phase(self) -> list[Row]:
        """Sums over the operators of each phase, in the order of a step, and what is left of it."""
        phases = group(self.rows, lambda row: row.phase)
        outside = Row.without_work(
            Operator(NO_OPERATOR, "", ()), Timing(calls=0, time_s=self.outside_s)
        )
        return [*sorted(phases, key=lambda row: PHASES.index(row.phase)), outside]

    @property
    def by_operator(self) -> list[Row]:
        """Sums over the shapes of each operator within a phase; the longest time first."""
        operators = group(self.rows, lambda row: (row.phase, row.name))
        return sorted(operators, key=lambda row: -(row.time_s or 0.0))

    @property
    def counted_flop(self) -> int:
        """Operations that the step really does."""
        return sum(row.flop or 0 for row in self.rows)

    @property
    def floor_s(self) -> float:
        """Seconds that the counted operators take at least, one after the other."""
        return math.fsum(row.floor_s or 0.0 for row in self.rows)

    @property
    def main_dtype(self) -> str:
        """The type in which most of the arithmetic is done."""
        rows = group(self.rows, lambda row: row.dtypes)
        return min(max(rows, key=lambda row: row.flop or 0).dtypes)

    @property
    def ideal_floor_s(self) -> float:
        """Seconds that the model's operations take at the arithmetic ceiling of that type."""
        return self.model_flop / (self.ceilings.arithmetic[self.main_dtype].rate * 1e12)

    @property
    def needed_floor_s(self) -> float:
        """Seconds of those operations and, at the memory ceiling, of one pass of AdamW."""
        update_bytes = BYTES_PER_UPDATE * self.num_trained
        return self.ideal_floor_s + update_bytes / (self.ceilings.memory.rate * 1e9)

    @property
    def explained_percent(self) -> float:
        """Share of the profiled step in operators whose work is known."""
        return self.share(_time(row for row in self.rows if row.flop is not None))

    @property
    def unmatched(self) -> list[Row]:
        """Operators and kernels that took time and were not counted; the longest time first."""
        rows = group((row for row in self.rows if row.flop is None), lambda row: row.name)
        return sorted(rows, key=lambda row: -(row.time_s or 0.0))

    @property
    def outside_s(self) -> float:
        """Seconds of the profiled step in which no operator ran."""
        return self.profiled_step_s - _time(self.rows)

    def share(self, time_s: float) -> float:
        """Percent of the profiled step."""
        return 100 * time_s / self.profiled_step_s


def _time(rows: Iterable[Row]) -> float:
    return math.fsum(row.time_s or 0.0 for row in rows)
