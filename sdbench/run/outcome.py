"""The record of a run, from its first moment to its end, and what ended it.

A run whose figures were measured is `ok`, with an exit code of 0, also when the disk has filled up
by then: its record has had space since the start and is written first. What does not fit besides
(the log, steps.csv, runs.csv) is missing, with a warning on the terminal. A full disk that stops
the work itself, or cannot take the record, is a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.secrets import redact
from sdbench.base.stop import Terminated, ignore_terminations
from sdbench.ranks.distributed import is_about_connections
from sdbench.ranks.heartbeat import Heartbeat
from sdbench.record import provenance, store
from sdbench.record.store import RunFolder

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130
TERMINATION_REASONS = {
    signal.SIGTERM: "a scheduler stopped the run, or its launcher did as another rank ended",
    signal.SIGHUP: "the terminal was closed; a run under nohup goes on",
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """A bad end: the record's status and reason, and the program's exit code."""

    status: str
    reason: str
    exit_code: int


class RunRecord:
    """The record of a run of any kind from its first moment to its end."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        command: Sequence[str],
        described: Mapping[str, Any],
        program: str,
        kind: str,
    ) -> None:
        """Begin: not written yet.

        Args:
            folder: Where it goes.
            command: Arguments of the program.
            described: What is known before the run: its config, the machine and, by the kind's
                schema, more.
            program: What was started, as one types it.
            kind: Of the task.
        """
        self._folder = folder
        self._started_s = time.perf_counter()
        self._content = {
            "schema_version": store.SCHEMA_VERSION,
            **({} if kind == store.BENCHMARK else {"kind": kind}),
            "run_id": folder.path.name,
            "status": store.FAILED,
            "reason": store.UNFINISHED_REASON,
            "started_utc": store.utc_now(),
            "duration_s": None,
            "command": [*program.split(), *command],
            **described,
            "versions": provenance.package_versions(),
            "git": provenance.git_state(),
            "environment": provenance.speed_environment(),
            "summary": None,
        }

    def write_unfinished(self) -> None:
        """Leave a record that holds if the process is killed, and keep space for the last one.

        Raises:
            ConfigError: The disk is full.
        """
        try:
            self._folder.reserve_space()
            self._folder.write_record(self._content)
        except OSError as error:
            raise ConfigError(
                f"the results folder cannot be written ({error.strerror})",
                value=str(self._folder.path.parent),
                allowed="a folder on a disk with space",
                flag="--results_dir",
            ) from None

    def end_well(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Write the result.

        Args:
            fields: Of the record, known only now; mappings are merged into those that are there.

        Returns:
            The whole record, without secrets.

        Raises:
            RunError: It cannot be written.
        """
        merged = dict(fields)
        for name, value in fields.items():
            known = self._content.get(name)
            if isinstance(known, dict):
                merged[name] = known | value
        return self._end(status=store.OK, reason=None, **merged)

    def end_badly(self, failure: Failure) -> None:
        """Write why, unless another rank has done so: the first one knows the cause."""
        if self._folder.claim_failure():
            try:
                self._end(status=failure.status, reason=failure.reason)
            except RunError as error:
                print(f"error: {error}", file=sys.stderr)

    def _end(self, **ended: Any) -> dict[str, Any]:
        duration_s = time.perf_counter() - self._started_s
        self._content = {**self._content, **ended, "duration_s": duration_s}
        try:
            return self._folder.write_last_record(self._content)
        except OSError as error:
            raise RunError(
                f"the record cannot be written to {self._folder.path} ({error.strerror}): free "
                "space there, or choose another folder with --results_dir"
            ) from None


@contextlib.contextmanager
def warn_if_not_written(name: str) -> Iterator[None]:
    """Go on without a file that the figures, which are in the record by now, do not depend on."""
    try:
        yield
    except OSError as error:
        print(f"warning: {name} could not be written: {error.strerror}", file=sys.stderr)


def explain(error: BaseException, *, rank: int | None = None) -> Failure:
    """What a run ended with, to be called as soon as it has.

    Prints the traceback of an error that nobody foresaw. From now on terminations are ignored.

    Args:
        error: What was raised.
        rank: The rank that it was raised on; None where a run has no ranks.
    """
    ignore_terminations()
    exit_code = EXIT_FAILED
    if isinstance(error, KeyboardInterrupt):
        status, reason, exit_code = store.INTERRUPTED, "Ctrl-C", EXIT_INTERRUPTED
    elif isinstance(error, Terminated):
        status = store.INTERRUPTED
        reason = f"{error.number.name}: {TERMINATION_REASONS[error.number]}"
    elif isinstance(error, RunError):
        status, reason = error.status, str(error)
    elif isinstance(error, ConfigError):  # one that only the work itself could bring to light
        status, reason, exit_code = store.FAILED, str(error), EXIT_BAD_INPUT
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        status = store.FAILED
        reason = (
            f"no space is left on the disk of {error.filename or 'a file that was being written'} "
            f"({error.strerror}): free some, or choose another folder"
        )
    else:
        traceback.print_exception(error)
        reason = f"{type(error).__name__}: {error}"
        status = store.OOM if _is_out_of_memory(error) else store.FAILED
    reason = redact(reason if rank is None else f"rank {rank}: {reason}")
    return Failure(status, reason, exit_code)


def explain_among_ranks(error: BaseException, *, heartbeat: Heartbeat, rank: int) -> Failure:
    """What a run of several ranks ended with: an error that another rank caused names that one.

    Args:
        error: What was raised.
        heartbeat: Has listened for the other ranks.
        rank: The rank that it was raised on.
    """
    failure = explain(error, rank=rank)
    # A launcher ends ranks by SIGTERM as another one is lost, and never by SIGHUP.
    is_terminated = isinstance(error, Terminated) and error.number == signal.SIGTERM
    if not is_terminated and not is_about_connections(error):
        return failure
    lost = heartbeat.find_lost()
    if lost is not None:
        status = store.TIMEOUT if "Timed out" in failure.reason else store.FAILED
        return Failure(status, f"{lost}; {failure.reason}", EXIT_FAILED)
    elsewhere = heartbeat.failed_elsewhere()
    return failure if elsewhere is None else Failure(*elsewhere, EXIT_FAILED)


def _is_out_of_memory(error: BaseException) -> bool:
    """Torch says "CUDA out of memory" on a GPU and "can't allocate memory" on a CPU."""
    message = str(error)
    return (
        isinstance(error, MemoryError)
        or "out of memory" in message
        or "can't allocate memory" in message
    )
