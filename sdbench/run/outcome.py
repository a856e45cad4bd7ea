"""`RunRecord` writes the record of a run from start to end; `explain` gives the reason of its end.

When the disk fills up during a run, the run is still `ok` with exit code 0 once its figures are
measured: space for the record is reserved at the start, and it is written first. Other files that
do not fit (the log, steps.csv, runs.csv) are left out with a warning. A full disk that stops the
work itself, or leaves no space for the record, is a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from sdbench.base.cause import LOST
from sdbench.base.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigError,
    RunError,
    remark_of,
)
from sdbench.base.files import refused_unless_written
from sdbench.base.secrets import redact
from sdbench.base.stop import Terminated, ignore_terminations
from sdbench.ranks.distributed import is_about_connections
from sdbench.ranks.heartbeat import Heartbeat
from sdbench.record import provenance, store
from sdbench.record.store import RunFolder

if TYPE_CHECKING:
    from sdbench.run.task import Task

TERMINATION_REASONS = {
    signal.SIGTERM: "a scheduler stopped the run, or its launcher ended or lost another rank",
    signal.SIGHUP: "the terminal was closed; a run under nohup goes on",
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """A bad end: status and reason of the record, exit code, and cause for `report_cause`."""

    status: str
    reason: str
    exit_code: int
    cause: str


class RunRecord:
    """The record of a run of any task, from its start to its end."""

    def __init__(
        self,
        task: Task,
        folder: Path,
        *,
        command: Sequence[str],
        num_restarts: int,
        show: Callable[[str], None] | None = None,
    ) -> None:
        """Begin a record, which is not written yet; `command` are the program's arguments.

        `show` prints the result as JSON, however the run ends; None: nobody has asked for it.
        """
        self._task = task
        self._show = show
        self._folder = RunFolder(folder, record_name=task.record_name)
        self._folder_flag = task.folder_flag
        self._started_s = time.perf_counter()
        self._content = {
            "schema_version": store.SCHEMA_VERSION,
            **({} if task.kind == store.BENCHMARK else {"kind": task.kind}),
            "run_id": folder.name,
            "status": store.FAILED,
            "reason": store.UNFINISHED_REASON,
            "started_utc": store.utc_now(),
            "duration_s": None,
            "command": [*task.program.split(), *command],
            **task.for_record(num_restarts=num_restarts),
            "versions": provenance.package_versions(),
            "other_versions": None,
            "git": provenance.git_state(),
            "environment": provenance.speed_environment(),
            "summary": None,
        }

    def write_unfinished(self) -> None:
        """Reserve space for the last version, and write the record that a killed run leaves."""
        with refused_unless_written(self._folder.path, flag=self._folder_flag):
            self._folder.reserve_space()
            self._folder.write_record(self._content)
        if self._content["git"]["commit"] is None:
            print(f"warning: {provenance.NO_COMMIT}", file=sys.stderr)

    def end_well(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return the record of a run that has succeeded, without secrets.

        Mappings in `fields` are merged into existing ones. A record that cannot be written is a
        RunError.
        """
        merged = dict(fields)
        for name, value in fields.items():
            known = self._content.get(name)
            if isinstance(known, dict):
                merged[name] = known | value
        # Read at the end: it would lengthen the start-up by 0.4 s.
        merged["other_versions"] = provenance.other_versions()
        content = self._end(status=store.OK, reason=None, **merged)
        self._tell(content)
        return content

    def end_badly(self, failure: Failure) -> None:
        """Write status and reason, unless another rank has: the first rank to fail knows why."""
        if self._folder.claim_failure():
            try:
                self._end(status=failure.status, reason=failure.reason)
            except RunError as error:
                print(f"error: {error}", file=sys.stderr)
        self._tell({**self._content, "status": failure.status, "reason": failure.reason})

    def _tell(self, content: dict[str, Any]) -> None:
        if self._show is not None:
            self._show(format_result(type(self._task), content, self._folder.path))

    def _end(self, **ended: Any) -> dict[str, Any]:
        duration_s = time.perf_counter() - self._started_s
        self._content = {**self._content, **ended, "duration_s": duration_s}
        try:
            return self._folder.write_record(self._content, is_last=True)
        except OSError as error:
            raise RunError(
                f"the record cannot be written to {self._folder.path} ({error.strerror}): free "
                f"space there, or choose another folder with {self._folder_flag}"
            ) from None


def format_result(task_class: type[Task], content: dict[str, Any], folder: Path) -> str:
    """What --json prints of a record: the result, and the folder that has all of it."""
    result = {**task_class.result(content), "record": str(folder)}
    return json.dumps(result, indent=2, allow_nan=False)


@contextlib.contextmanager
def warn_if_not_written(name: str) -> Iterator[None]:
    """Turn an error of writing into a warning, for files beside the record."""
    try:
        yield
    except OSError as error:
        print(f"warning: {name} could not be written: {error.strerror}", file=sys.stderr)


def explain(
    error: BaseException, *, rank: int | None = None, heartbeat: Heartbeat | None = None
) -> Failure:
    """Turn the error that ended a run, on this rank if one is given, into a status and a reason.

    Prints the traceback of an unexpected error. From now on SIGTERM and SIGHUP are ignored. The
    heartbeat, which watches the other ranks, names a rank that caused the error.
    """
    failure = _classify(error, rank=rank)
    # A launcher ends ranks by SIGTERM when another one is lost, and never by SIGHUP.
    is_terminated = isinstance(error, Terminated) and error.number == signal.SIGTERM
    if heartbeat is not None and (is_terminated or is_about_connections(error)):
        # Asked first: looking for lost ranks takes a while.
        has_timed_out = not is_terminated and heartbeat.has_step_timed_out()
        caused = dataclasses.replace(failure, exit_code=EXIT_FAILED)
        lost = heartbeat.find_lost()
        if lost is not None:
            reason = f"{lost}; {failure.reason}"
            if has_timed_out:
                return dataclasses.replace(caused, status=store.TIMEOUT, reason=reason)
            return dataclasses.replace(caused, status=store.FAILED, reason=reason, cause=LOST)
        elsewhere = heartbeat.failed_elsewhere()
        if elsewhere is not None:
            return dataclasses.replace(caused, status=elsewhere[0], reason=elsewhere[1])
    # A stop and an error with a sentence of its own need no traceback.
    is_expected = not isinstance(error, Exception) or isinstance(error, (RunError, ConfigError))
    if not is_expected and not _is_full_disk(error):
        traceback.print_exception(error)
    return failure


def _classify(error: BaseException, *, rank: int | None) -> Failure:
    ignore_terminations()
    exit_code = EXIT_FAILED
    if isinstance(error, KeyboardInterrupt):
        status, reason, exit_code = store.INTERRUPTED, "Ctrl-C", EXIT_INTERRUPTED
    elif isinstance(error, Terminated):
        status, exit_code = store.INTERRUPTED, EXIT_INTERRUPTED
        reason = f"{error.number.name}: {TERMINATION_REASONS[error.number]}"
    elif isinstance(error, RunError):
        status, reason = error.status, str(error)
    elif isinstance(error, ConfigError):  # bad input that only the work itself could find
        status, reason, exit_code = store.FAILED, str(error), EXIT_BAD_INPUT
    elif _is_full_disk(error):
        status = store.FAILED
        reason = (
            f"no space is left on the disk of {error.filename or 'a file that was being written'} "
            f"({error.strerror}): free some, or choose another folder"
        )
    else:
        reason = f"{type(error).__name__}: {error}"
        # torch's messages for a GPU and for a CPU.
        said = any(part in reason for part in ("out of memory", "can't allocate memory"))
        status = store.OOM if said or isinstance(error, MemoryError) else store.FAILED
    reason += remark_of(error)
    reason = redact(reason if rank is None else f"rank {rank}: {reason}")
    return Failure(status, reason, exit_code, cause=type(error).__name__)


def _is_full_disk(error: BaseException) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
