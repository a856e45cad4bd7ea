"""`Task`: the methods of a task that the runner calls."""

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
    """A run that has begun: its folder, the clock of its start-up, and the ranks' heartbeat."""

    folder: Path
    clock: StartupClock
    heartbeat: Heartbeat


class Task(abc.ABC):
    """One run of a task; its methods are called in the order of their definition.

    Of the last three, `result` is asked of any run that has ended, `write_partial` is called after
    a failure and `conclude` after success.

    Attributes:
        kind: Key of the task in `TASKS` and, where its records have a schema, in
            `store.SCHEMA_FILES`.
        program: The command that starts the task, e.g. ``benchmark.py``.
        record_name: Name of the record's file in the folder of the run.
        folder_flag: The flag that says where the folder of the run is.
        is_distributed: Whether several ranks can share the work.
        imports: Modules that take long to import, and that `check_ahead` does without.
        timeout_s: How long ranks wait for each other.
        resources: Closed when the run is over.
    """

    kind: ClassVar[str]
    program: ClassVar[str]
    record_name: ClassVar[str] = RECORD_NAME
    folder_flag: ClassVar[str] = "--results_dir"
    is_distributed: ClassVar[bool] = True
    imports: ClassVar[tuple[str, ...]] = ()
    timeout_s: float = 24 * 3600.0  # a rank that has done its share waits for the others

    def __init__(self, request: Any, resources: contextlib.ExitStack) -> None:
        self.request = request
        self.resources = resources

    def check_ahead(self, ranks: Any) -> None:
        """Refuse what no machine can run, before one is known; the other methods may not follow.

        `ranks` has the number of ranks, or is unknown (`Unknown`).
        """
        return

    @abc.abstractmethod
    def resolve(self, machine: Machine, ranks: Ranks) -> None:
        """Fill in open settings and check all; on every rank, before the ranks are connected.

        Raises ConfigError for a request that cannot be run here, and RunError for data or models
        that are out of reach.
        """

    def printed_config(self) -> str | None:
        """The text that --print_config or --dry_run prints instead of a run; None for a run."""
        return None

    @abc.abstractmethod
    def make_folder(self) -> Path:
        """Make the folder of the run and open other outputs; on the first rank.

        Raises ConfigError if an output exists already or cannot be written, and RunError if it is
        out of reach.
        """

    @abc.abstractmethod
    def for_person(self) -> str:
        """A few lines that say what is about to run."""

    @abc.abstractmethod
    def for_record(self, *, num_restarts: int) -> dict[str, Any]:
        """The fields of the record that are known before the run."""

    @abc.abstractmethod
    def work(self, run: Run) -> dict[str, Any]:
        """Do the work on every rank; return further fields of the record. Rank 0's are used.

        ``summary`` is among them; mappings are merged into those of `for_record`.
        """

    @classmethod
    def result(cls, content: dict[str, Any]) -> dict[str, Any]:
        """What --json prints of a record of any status; only of a program that has the flag."""
        raise NotImplementedError

    def write_partial(self, folder: Path) -> None:
        """Write what was measured before `work` ended with an error; on the first rank.

        The record has been written, and the other ranks know of the error.
        """
        return

    @abc.abstractmethod
    def conclude(self, content: dict[str, Any], folder: Path) -> str:
        """Write further files after the record, and return its text for the terminal."""
