"""`run_child` runs a measuring command in a process of its own and says how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from sdbench.base.cause import KILLED, VARIABLE, read_cause
from sdbench.base.errors import EXIT_INTERRUPTED, ConfigError
from sdbench.base.escape import for_terminal
from sdbench.base.files import refused_unless_written, replace_file
from sdbench.base.secrets import redact
from sdbench.base.stop import STOPS, signal_of
from sdbench.record.store import FAILED, INTERRUPTED, OK, RECORD_NAME, TIMEOUT, load_record
from sdbench.report.terminal import format_number, format_rate
from sdbench.run.recorded import parse_recorded
from sdbench.settings.rules import check

OUTPUT_NAME = "output.log"
CAUSE_NAME = "cause.json"
LOCK_NAME = ".measuring"
ROOT = Path(__file__).resolve().parents[2]
# Programs of the suite that measure, which are commands of `python -m sdbench` too, and the
# kind of their records.
MEASURING = {"benchmark": "benchmark", "data": "feed"}
GUARD = Path(__file__).with_name("guard.py")
# A rank that is asked to end writes its record first.
GRACE_S = 20.0
NUM_TAIL_LINES = 12
MAX_TAIL_BYTES = 64 * 1024
MAX_REASON_LENGTH = 300


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a measuring command ended."""

    status: str  # as in a record
    reason: str | None  # None for ok
    exit_code: int  # as of `End`
    duration_s: float
    # Class of the error that ended it; `KILLED` if SIGKILL did; `LOST` if one of its ranks ended
    # without a word; None if it is not known.
    cause: str | None
    run: str | None  # name of the folder of its record
    record: dict[str, Any] | None

    @property
    def summary(self) -> dict[str, Any]:
        """The record's summary; empty unless the status is ok."""
        return self.record["summary"] if self.status == OK and self.record else {}

    @property
    def described(self) -> str:
        """Status and result in a line."""
        result = for_terminal(self.reason or "")
        if self.summary:
            result = f"{format_rate(self.summary)} images/s"
            if self.summary.get("peak_memory_gib") is not None:
                result += f", {format_number(self.summary['peak_memory_gib'], num_digits=3)} GiB"
        return f"{self.status}, {result} ({self.duration_s:.0f} s)"


def split_words(text: str, *, flag: str) -> list[str]:
    """The words of a text, as a shell splits it; refuses a quote that is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"this text cannot be split into words ({error})",
            value=text,
            allowed="words as in a shell, each quote closed",
            flag=flag,
        ) from None


def values_of(arguments: Sequence[str], flag: str) -> list[str]:
    """The values that arguments give a flag, as ``--flag value`` or as ``--flag=value``."""
    values = []
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        if name == flag:
            values.append(value if equals else following)
    return values


def refuse_flag(name: str, arguments: Sequence[str], *, why: str, flag: str) -> None:
    """Refuse arguments with the flag `name`, which the command sets itself."""
    if values_of(arguments, name):
        raise ConfigError(why, value=name, allowed=f"arguments without {name}", flag=flag)


def measuring_command(command: Sequence[str]) -> list[str]:
    """A user's command for `run_child`: with the path of its program, and without --results_dir.

    What benchmark.py or data.py would refuse on whatever machine is refused here: each start of
    them takes seconds. Programs of another checkout are not checked.
    """
    refuse_flag("--results_dir", command, why="each run gets a folder of its own", flag="COMMAND")
    for number, (before, word) in enumerate(itertools.pairwise(["", *command]), start=1):
        name = word if Path(before).name == "sdbench" else Path(word).stem
        if name in MEASURING and (name == word or Path(word).resolve() == ROOT / f"{name}.py"):
            kind, rest = MEASURING[name], command[number:]
            check(parse_recorded(kind, rest, description="", epilog="", prog=word))
            break
    return find_program(command)


def find_program(command: Sequence[str]) -> list[str]:
    """The command with the path of its program: this Python, one beside it, or one on PATH."""
    name, *arguments = command or ("",)
    if name in ("python", "python3"):  # not one with other packages
        return [sys.executable, *arguments]
    is_name = os.path.basename(name) == name != ""
    beside = Path(sys.executable).parent / name
    program = str(beside) if is_name and beside.is_file() else shutil.which(name)
    if program is None:
        raise ConfigError(
            "there is no command, or its program is not installed",
            value=name,
            allowed="composer, torchrun, python or a program on PATH, after --",
            flag="COMMAND",
        )
    return [program, *arguments]


@contextlib.contextmanager
def only_one_in(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other programs out of it during the block.

    Processes that the block starts by `run_guarded` hold the lock, too: after a kill of this
    process the folder is free when all of them have ended.
    """
    with refused_unless_written(folder, what="the output folder", flag="--folder"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_NAME).open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "another command is at work in this folder, or what it started is still ending",
                value=str(folder),
                allowed="one command at a time",
                flag="--folder",
            ) from None
        os.set_inheritable(file.fileno(), True)
        yield


class End(NamedTuple):
    """How a process ended; its exit code is 128 plus the number of a signal that ended it."""

    exit_code: int
    duration_s: float
    has_timed_out: bool


def run_guarded(
    command: Sequence[str],
    *,
    folder: Path,
    output: IO[bytes] | None = None,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> End:
    """Run a command in a process of its own to its end, or for `timeout_s`.

    The command and its descendants end with this process, however that ends, within `grace_s`. The
    command writes the cause of a failure into the folder. Without an `output` it prints where this
    process does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cause_file = (folder / CAUSE_NAME).absolute()
    cause_file.unlink(missing_ok=True)
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(GUARD), str(grace_s), *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env={**os.environ, VARIABLE: str(cause_file)},
        close_fds=False,  # the guard's copy keeps the lock of `only_one_in` until it ends
        # Ctrl-C reaches this process only, which ends the command itself.
        start_new_session=True,
    )
    assert process.stdin is not None
    has_timed_out = False
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        has_timed_out = True
    except STOPS as stop:
        with contextlib.suppress(BrokenPipeError):  # the guard may have ended just now
            os.write(process.stdin.fileno(), bytes([signal_of(stop)]))
        raise
    finally:  # at Ctrl-C or SIGTERM, too: no rank may outlive the program
        process.stdin.close()
        exit_code = process.wait()
    return End(exit_code, time.perf_counter() - started_s, has_timed_out)


def run_in_terminal(command: Sequence[str], *, folder: Path, grace_s: float = GRACE_S) -> int:
    """Run a command as `run_guarded`; returns its exit code."""
    end = run_guarded(find_program(command), folder=folder, grace_s=grace_s)
    if end.exit_code != 0 and read_cause(folder / CAUSE_NAME) is None:  # else it printed the cause
        print(f"error: {shlex.join(command)} {describe_exit(end.exit_code)}", file=sys.stderr)
    return end.exit_code


def check_suite_is_here(*names: str, folder: Path = Path()) -> None:
    """Refuse to go on without these files of a checkout in a folder (default: the working one)."""
    for name in names:
        if not (folder / name).is_file():
            where = "is not here" if (ROOT / name).is_file() else "no installed package has"
            raise ConfigError(
                f"this command needs {name} of a checkout of the suite, which {where}",
                value=str(folder.absolute()),
                allowed="`python -m sdbench` in the folder that holds a checkout",
                flag="cd",
            )


def run_child(command: Sequence[str], *, folder: Path, timeout_s: float | None = None) -> Outcome:
    """Run a measuring command, with ``--results_dir FOLDER``, a new folder, as `run_guarded`."""
    folder.mkdir(parents=True)
    log = folder / OUTPUT_NAME
    try:
        with log.open("wb") as output:
            command = [*command, "--results_dir", str(folder)]
            end = run_guarded(command, folder=folder, output=output, timeout_s=timeout_s)
    finally:  # a run that is stopped keeps its output, too
        replace_file(log, redact(log.read_text(encoding="utf-8", errors="replace")))
    return _explain(folder, end, timeout_s=timeout_s)


def tail(folder: Path) -> str:
    """The last lines that the command printed, as plain text."""
    lines = _read_tail(folder).rstrip().splitlines()
    return "\n".join(map(for_terminal, lines[-NUM_TAIL_LINES:]))


def _read_tail(folder: Path) -> str:
    content = (folder / OUTPUT_NAME).read_bytes()[-MAX_TAIL_BYTES:]
    return redact(content.decode(encoding="utf-8", errors="replace"))


def _first_error(folder: Path) -> str | None:
    """The error of the first traceback in the output; a launcher prints its own one later."""
    found = re.search(r"^Traceback .*\n(?: .*\n)+(\S.*)", _read_tail(folder), flags=re.MULTILINE)
    return for_terminal(found[1]) if found else None


def _explain(folder: Path, end: End, *, timeout_s: float | None) -> Outcome:
    record, run, complaint = None, None, None
    for path in folder.glob(f"*/{RECORD_NAME}"):  # the folder is new: there is at most one
        run = path.parent.name
        try:
            record = load_record(path)
        except (OSError, ValueError) as error:
            complaint = f"its record cannot be read ({error})"
    reported = read_cause(folder / CAUSE_NAME) or {}
    cause = reported.get("error")
    if _signal_of(end.exit_code) == signal.SIGKILL:
        cause = KILLED
    ended = f"it {describe_exit(end.exit_code)}"
    if end.has_timed_out:
        status, reason = TIMEOUT, f"it did not end within {timeout_s:g} s"
    elif record is not None and record["duration_s"] is not None:  # the record has an end
        status, reason = record["status"], record["reason"]
        if (status == OK) != (end.exit_code == 0) or status == INTERRUPTED:
            # Nobody has stopped this run, so one of its ranks must have ended in another way.
            status, reason = FAILED, f"{ended}; the record says: {reason or 'ok'}"
    else:
        last_line = (tail(folder).splitlines() or ["no output"])[-1]
        said = complaint or reported.get("message") or _first_error(folder) or last_line
        status, reason = FAILED, f"{ended}: {said}"
    if cause == KILLED and status == FAILED:
        reason = f"killed, as by the out-of-memory killer: {reason}"
    return Outcome(
        status=status,
        reason=None if reason is None else reason[:MAX_REASON_LENGTH],
        exit_code=end.exit_code,
        duration_s=end.duration_s,
        cause=cause,
        run=run,
        record=record,
    )


def describe_exit(exit_code: int) -> str:
    """An exit code in words: "ended with exit code 1"."""
    number = _signal_of(exit_code)
    if number is None or exit_code == EXIT_INTERRUPTED:  # of a rank, after any stop signal
        return f"ended with exit code {exit_code}"
    return f"was ended by signal {int(number)} ({number.name})"


def _signal_of(exit_code: int) -> signal.Signals | None:
    """The signal n in an exit code: 128 + n of a shell, 256 - n of composer, or -n."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    if 192 < exit_code < 255:  # 255 is taken for a program's own exit(-1)
        number = 256 - exit_code
    return signal.Signals(number) if number in [*signal.Signals] else None
