"""`TrainingTask`: what the tasks have in common that train as a plan of benchmark.py says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdbench.measure.hardware import Machine
from sdbench.plan import describe
from sdbench.plan.resolve import Plan, resolve
from sdbench.ranks.distributed import Ranks
from sdbench.run.task import Task

if TYPE_CHECKING:
    from sdbench.data.pipeline.loader import CheckedLoader

# What Ray Data tells of its stages.
RAY_DATA_NAME = "ray_data.txt"


class TrainingTask(Task):
    """A task that trains; its request is one of `BenchmarkConfig`.

    Attributes:
        plan: Of the run.
    """

    plan: Plan

    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Make the plan."""
        self.plan = resolve(self.request, machine=machine, ranks=ranks)

    def printed_config(self) -> str | None:
        """The plan as a config file."""
        return describe.as_yaml(self.plan, self.request) if self.request.print_config else None

    def _end_loading(self, loader: CheckedLoader, folder: Path) -> None:
        """Keep what the processes that load have to tell, and end them."""
        told = loader.describe_stream() if self.plan.ranks.rank == 0 else None
        if told is not None:
            (folder / RAY_DATA_NAME).write_text(told, encoding="utf-8")
        loader.close()

    def for_person(self) -> str:
        """The plan in words."""
        return describe.for_person(self.plan)

    def for_record(self, *, num_restarts: int) -> dict[str, Any]:
        """The plan as a record has it."""
        return describe.for_record(self.plan, self.request, num_restarts=num_restarts)
