"""What the runner asks of a task."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sdbench.measure.startup import StartupClock
from sdbench.ranks.distributed import Ranks
from sdbench.ranks.heartbeat import Heartbeat
from sdbench.record.store import RECORD_NAME

if TYPE_CHECKING:
    from sdbench.measure.hardware import Machine


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose record has begun.

    Attributes:
        folder: Of the run, the same on every rank.
        clock: Splits the start-up into phases.
        heartbeat: Wants to be told of every training step.
    """

    folder: Path
    clock: StartupClock
    heartbeat: Heartbeat


class Task(abc.ABC):
    """One run of a task. The methods are called in the order in which they stand here.

    Attributes:
        kind: Key of the task in `TASKS` and, where its records have a schema, in
            `store.SCHEMA_FILES`.
        program: What starts the task, as one types it.
        record_name: File name of its record.
        is_distributed: Whether several ranks can share the work.
        timeout_s: How long these wait for each other.
        request: What was asked for.
        resources: Is closed when the run is over.
    """

    kind: ClassVar[str]
    program: ClassVar[str]
    record_name: ClassVar[str] = RECORD_NAME
    is_distributed: ClassVar[bool] = True
    timeout_s: float = 0.0

    def __init__(self, request: Any, resources: contextlib.ExitStack) -> None:
        self.request = request
        self.resources = resources

    @abc.abstractmethod
    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Decide what was left open and check all of it; on every rank, before they are connected.

        Raises:
            ConfigError: The request cannot be run here.
            RunError: What it needs cannot be reached.
        """

    def printed_config(self) -> str | None:
        """What --print_config prints instead of a run; None for a run."""
        return None

    @abc.abstractmethod
    def make_folder(self) -> Path:
        """Make the folder of the run, and open what else it writes to; on the first rank.

        Raises:
            ConfigError: It is taken, or cannot be written.
            RunError: It cannot be reached.
        """

    @abc.abstractmethod
    def for_person(self) -> str:
        """What is about to run, in a few lines."""

    @abc.abstractmethod
    def for_record(self, *, num_restarts: int) -> dict[str, Any]:
        """The fields of the record that are known before the run.

        Args:
            num_restarts: How often the run has been started again.
        """

    @abc.abstractmethod
    def work(self, run: Run) -> dict[str, Any]:
        """Do the work; on every rank.

        Returns:
            The fields of the record that are known now, ``summary`` among them; mappings are merged
            into those of `for_record`. Read on the first rank.
        """

    @abc.abstractmethod
    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """Write further files when the record is written; on the first rank.

        Args:
            content: The record.
            folder: Of the run.

        Returns:
            The result for a person.
        """
