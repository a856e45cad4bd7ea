"""What became of a measuring command that ran in a process of its own?"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.errors import ConfigError
from sdbench.measure.record import (
    FAILED,
    INTERRUPTED,
    OK,
    RECORD_NAME,
    TIMEOUT,
    UNFINISHED_REASON,
    load_record,
)

OUTPUT_NAME = "output.log"
GUARD = Path(__file__).with_name("guard.py")
# A rank that is asked to end writes its record first.
GRACE_S = 20.0
NUM_TAIL_LINES = 12
MAX_REASON_LENGTH = 300
KILLED = 128 + signal.SIGKILL


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        status: One of the statuses of a record.
        reason: Why, in a sentence; None for ok.
        exit_code: Of the command; one that a signal ended has 128 plus its number.
        duration_s: From its start to its end.
        run_folder: The folder of its record, or None if it left none.
        record: The record, or None.
    """

    status: str
    reason: str | None
    exit_code: int
    duration_s: float
    run_folder: Path | None
    record: dict[str, Any] | None


def find_program(command: Sequence[str]) -> list[str]:
    """The command with its program as a path: beside this Python, or on PATH.

    Raises:
        ConfigError: There is no command, it names a results folder, or its program is not there.
    """
    if not command:
        raise ConfigError(
            "there is no command to run",
            value="",
            allowed="a command behind --, e.g. -- composer benchmark.py --use_synth_data",
            flag="COMMAND",
        )
    if any(argument.split("=")[0] == "--results_dir" for argument in command):
        raise ConfigError(
            "each run gets a folder of its own",
            value="--results_dir",
            allowed="a command without it",
            flag="COMMAND",
        )
    beside = Path(sys.executable).with_name(command[0])
    program = str(beside) if beside.is_file() else shutil.which(command[0])
    if program is None:
        raise ConfigError(
            "this program is not installed",
            value=command[0],
            allowed="composer, torchrun, python or another one on PATH",
            flag="COMMAND",
        )
    return [program, *command[1:]]


def run_child(command: Sequence[str], *, folder: Path, timeout_s: float | None = None) -> Outcome:
    """Run a command in a process of its own to its end.

    It, and all that it has started, end with this process, however this one ends.

    Args:
        command: Program and arguments; ``--results_dir FOLDER`` is added.
        folder: Gets the run's folder and output.log.
        timeout_s: The command is ended after so many seconds; None waits.

    Returns:
        How it ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started_s = time.perf_counter()
    with (folder / OUTPUT_NAME).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(GUARD), str(GRACE_S), *command, "--results_dir", str(folder)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process, which ends the command itself
        )
        assert process.stdin is not None
        has_timed_out = False
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            has_timed_out = True
            process.stdin.close()
            exit_code = process.wait()
        except BaseException:  # Ctrl-C or SIGTERM: no rank may outlive the program
            process.stdin.close()
            process.wait()
            raise
    duration_s = time.perf_counter() - started_s
    if has_timed_out:
        reason = f"it did not end within {timeout_s:g} s"
        return _explain(folder, exit_code, duration_s, status=TIMEOUT, reason=reason)
    return _explain(folder, exit_code, duration_s)


def tail(folder: Path) -> str:
    """The last lines that the command printed."""
    text = (folder / OUTPUT_NAME).read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.rstrip().splitlines()[-NUM_TAIL_LINES:])


def _explain(
    folder: Path,
    exit_code: int,
    duration_s: float,
    *,
    status: str | None = None,
    reason: str | None = None,
) -> Outcome:
    """Put together what the record says and how the process ended."""
    paths = sorted(folder.glob(f"*/{RECORD_NAME}"))
    record = load_record(paths[-1]) if paths else None
    if status is None and record is not None and record["reason"] != UNFINISHED_REASON:
        status, reason = record["status"], record["reason"]
        if (status == OK) != (exit_code == 0) or status == INTERRUPTED:
            # Nobody has stopped this run, so that one of its ranks must have ended otherwise.
            status = FAILED
            reason = f"{_describe_exit(exit_code)}; the record says: {reason or 'ok'}"
    elif status is None:
        last_line = tail(folder).splitlines()[-1:] or ["no output"]
        status, reason = FAILED, f"{_describe_exit(exit_code)}: {last_line[0]}"
        if exit_code == KILLED:
            reason = f"{_describe_exit(exit_code)}, as the out-of-memory killer does"
    return Outcome(
        status=status,
        reason=None if reason is None else reason[:MAX_REASON_LENGTH],
        exit_code=exit_code,
        duration_s=duration_s,
        run_folder=paths[-1].parent if paths else None,
        record=record,
    )


def _describe_exit(exit_code: int) -> str:
    if exit_code > 128:
        return f"it was ended by signal {exit_code - 128} ({_signal_name(exit_code - 128)})"
    return f"it ended with exit code {exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
