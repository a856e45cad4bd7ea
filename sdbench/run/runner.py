"""`run`, the runner of every task: from a command line to a record and an exit code.

    request -> plan, agreed among the ranks -> folder, record, heartbeat -> work -> record

A request that cannot be run leaves no record; a run that has begun always leaves one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pkgutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sdbench.base.cause import report_cause
from sdbench.base.errors import EXIT_FAILED, EXIT_OK, ConfigError, RunError
from sdbench.base.output import fit, results_only_on_stdout
from sdbench.base.stop import STOP_SIGNALS, ignore_terminations, keep_exit_code, stop_signals_ask
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks, let_first_rank_end, refuse_tasks_without_launcher
from sdbench.ranks.launcher import COMPOSER, end_with_launcher, launcher_name
from sdbench.run.ahead import resolve_ahead
from sdbench.settings.ray import RAY

if TYPE_CHECKING:
    from sdbench.measure.startup import StartupClock
    from sdbench.ranks.heartbeat import Heartbeat
    from sdbench.run.outcome import RunRecord
    from sdbench.run.task import Task

T = TypeVar("T")

# Time limit for writing what was measured before a failure.
PARTIAL_WITHIN_S = 30.0
# Errors that every rank raises: the first rank prints them.
_SHARED: list[Exception] = []


def run(
    entry: str,
    parse: Callable[[Sequence[str]], Any],
    argv: Sequence[str] | None = None,
    *,
    began: Callable[[Path], None] | None = None,
    launch: Callable[..., int] | None = None,
) -> int:
    """Run a task as a command line asks, and return the exit code: 0 ok, 1 failed, 2 bad input.

    The caller handles a stop signal before there is a record, see `stop.stoppable`.

    The task, `entry` of `TASKS`, is imported after `parse` has turned the arguments into a request.
    `began` is called with the folder of the run, on the first rank; what has it runs a rank for a
    driver. `launch` is `ray_job.launch_ranks`, which starts the ranks of the engine ray without a
    launcher. With --json the result of the first rank is all that is on stdout.
    """
    end_with_launcher()
    command = list(sys.argv[1:] if argv is None else argv)
    ranks = Ranks.from_environment()
    try:
        request = parse(command)
        with contextlib.ExitStack() as output:
            show = None
            if request.json and began is None:  # else a driver answers
                show = output.enter_context(results_only_on_stdout())
            if launch is not None and request.config.engine == RAY and "RANK" not in os.environ:
                rank_main = functools.partial(run, entry, parse)
                ahead = functools.partial(resolve_ahead, entry, request)
                answer = None if show is None else functools.partial(_answer_for_ranks, entry, show)
                return launch(
                    request, command=command, rank_main=rank_main, ahead=ahead, answer=answer
                )
            show = show if ranks.rank == 0 else None
            if show is not None and launcher_name() == COMPOSER:
                print(
                    "caution: composer adds a line to stdout behind what --json prints; torchrun "
                    "does not",
                    file=sys.stderr,
                )
            return _run(entry, request, command=command, ranks=ranks, began=began, show=show)
    except (ConfigError, RunError) as error:  # before there was a run
        is_known_to_all = isinstance(error, ConfigError) or error in _SHARED
        if ranks.rank == 0 or not is_known_to_all:
            print(f"error: {error}", file=sys.stderr)
            report_cause(type(error).__name__, str(error))
        if isinstance(error, ConfigError):
            let_first_rank_end(ranks)
        return error.exit_code
    except Exception as error:
        report_cause(type(error).__name__, f"{type(error).__name__}: {error}")
        raise


def _run(
    entry: str,
    request: Any,
    *,
    command: list[str],
    ranks: Ranks,
    began: Callable[[Path], None] | None,
    show: Callable[[str], None] | None,
) -> int:
    from sdbench.measure import startup
    from sdbench.record.store import OutputLog

    refuse_tasks_without_launcher()
    clock = startup.StartupClock(before_main_s=startup.seconds_before_now())
    log = OutputLog()
    with log.capture(), contextlib.ExitStack() as resources:
        with garbage_collection_paused():
            from sdbench.measure.hardware import inspect_machine
            from sdbench.ranks.heartbeat import Heartbeat

            task = pkgutil.resolve_name(entry)(request, resources)
            list(map(pkgutil.resolve_name, task.imports))
            clock.ends(startup.IMPORTS)
            machine = inspect_machine(local_rank=ranks.local_rank)
            _agree(task, machine=machine, ranks=ranks, command=command, show=show)
            heartbeat = Heartbeat(ranks, timeout_s=task.timeout_s)
        config = task.printed_config()
        if config is not None:
            if ranks.rank == 0:
                print(config)
            return EXIT_OK

        def begin() -> Path:
            folder = task.make_folder()
            log.move_to(folder)
            if began is not None:
                began(folder)
            print("\n".join(map(fit, task.for_person().splitlines())), flush=True)
            return folder

        return _work(
            task,
            begin,
            command=command,
            clock=clock,
            heartbeat=heartbeat,
            ranks=ranks,
            show=show,
        )


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Do not collect garbage during imports: a million objects that stay take 0.7 s to search."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # no later collection, which may be in a measured step, searches them either
        gc.enable()


def _answer_for_ranks(entry: str, show: Callable[[str], None], folder: Path | None) -> None:
    """Print the result of ranks that Ray has run, if this node sees their record."""
    from sdbench.record.store import load_record
    from sdbench.run.outcome import format_result

    task_class = pkgutil.resolve_name(entry)
    if folder is None or not (folder / task_class.record_name).is_file():
        print("warning: --json has no record to answer with", file=sys.stderr)
        return
    show(format_result(task_class, load_record(folder / task_class.record_name), folder))


def _agree(
    task: Task,
    *,
    machine: Any,
    ranks: Ranks,
    command: list[str],
    show: Callable[[str], None] | None,
) -> None:
    """Resolve the request on every rank and connect the ranks; all raise the error of one."""
    from sdbench.measure.hardware import check_gpu_code

    if ranks.world_size > 1 and not task.is_distributed:
        raise ConfigError(
            f"{task.program} is run by one process",
            value=f"{ranks.world_size} ranks",
            allowed="the same command without a launcher",
            flag="WORLD_SIZE (in the environment)",
        )
    error = None
    try:
        check_gpu_code(machine)
        task.resolve(machine, ranks)
    except Exception as found:
        error = _to_tell(found, ranks)
    if ranks.world_size == 1:
        if error is not None:
            raise error
        return
    try:
        distributed.connect(ranks, device_type=machine.device_type, timeout_s=task.timeout_s)
    except RunError as absence:
        if error is None:
            _record_failure(task, absence, ranks=ranks, command=command, show=show)
        raise
    errors = [error for error in distributed.gather(error, ranks) if error is not None]
    if errors:
        _SHARED.append(errors[0])
        raise errors[0]
    differences = _find_differences(task, ranks)
    if differences:
        failure = RunError(
            f"the ranks, whose machines differ, chose different settings ({differences}): give "
            "each flag a value that suits all of them"
        )
        _SHARED.append(failure)
        _record_failure(task, failure, ranks=ranks, command=command, show=show)
        raise failure


def _to_tell(error: Exception, ranks: Ranks) -> Exception:
    """The error that all ranks raise for an error of this one, whose traceback they lack."""
    if ranks.world_size == 1 or isinstance(error, (ConfigError, RunError)):
        return error
    traceback.print_exception(error)
    where = distributed.name_ranks([ranks.rank], ranks)
    return RunError(f"{where}: {type(error).__name__}: {error}")


def _find_differences(task: Task, ranks: Ranks) -> str:
    """Name the settings that ranks chose differently, with the first rank of each value."""
    # These follow from the number of cores, which may differ between nodes.
    of_node = ("num_workers", "num_threads")
    configs = distributed.gather(task.for_record(num_restarts=0)["config"], ranks)
    differences = []
    for name in configs[0]:
        first_ranks: dict[str, int] = {}
        for rank, config in enumerate(configs):
            first_ranks.setdefault(repr(config[name]), rank)
        if len(first_ranks) > 1 and name not in of_node:
            values = (
                f"{value} on {distributed.name_ranks([rank], ranks)}"
                for value, rank in first_ranks.items()
            )
            differences.append(f"--{name}: {', '.join(values)}")
    return "; ".join(differences)


def _record_failure(
    task: Task,
    failure: RunError,
    *,
    ranks: Ranks,
    command: list[str],
    show: Callable[[str], None] | None,
) -> None:
    """Write the record of a run that fails before the ranks agree on it; on the first rank."""
    from sdbench.run.outcome import RunRecord, explain

    if ranks.rank == 0:
        num_restarts = distributed.num_restarts()
        folder = task.make_folder()
        record = RunRecord(task, folder, command=command, num_restarts=num_restarts, show=show)
        record.end_badly(explain(failure, rank=0))


def _on_first_rank(action: Callable[[], T], ranks: Ranks) -> T:
    """Run the action on the first rank; every rank returns its result or raises its error."""
    answer: Any = None
    if ranks.rank == 0:
        try:
            answer = action()
        except Exception as error:
            answer = _to_tell(error, ranks)
    answer = distributed.broadcast(answer, ranks)
    if isinstance(answer, Exception):
        _SHARED.append(answer)
        raise answer
    return answer


def _work(
    task: Task,
    begin: Callable[[], Path],
    *,
    command: list[str],
    clock: StartupClock,
    heartbeat: Heartbeat,
    ranks: Ranks,
    show: Callable[[str], None] | None,
) -> int:
    """Begin the record, do the work, and write the record of whatever happens."""
    from sdbench.measure import startup
    from sdbench.record.store import TIMEOUT
    from sdbench.run.outcome import Failure, RunRecord, explain
    from sdbench.run.task import Run

    num_restarts = max(distributed.gather(distributed.num_restarts(), ranks))
    record: RunRecord | None = None
    has_begun = False

    def end_badly(failure: Failure) -> int:
        assert record is not None
        record.end_badly(failure)
        report_cause(failure.cause, failure.reason)
        print(f"{failure.status}: {failure.reason}\nrecord: {folder}", file=sys.stderr)
        return failure.exit_code

    def end_as_one_is_lost(lost: str) -> None:
        """Called in another thread: the main one may wait in NCCL, which detects no dead rank."""
        reason = f"{lost} (--dist_timeout)"
        os._exit(end_badly(Failure(TIMEOUT, reason, EXIT_FAILED, cause=TIMEOUT)))

    try:
        with stop_signals_ask():  # or a stop would leave a folder without a record
            folder = _on_first_rank(begin, ranks)
            record = RunRecord(task, folder, command=command, num_restarts=num_restarts, show=show)
            _on_first_rank(record.write_unfinished, ranks)
            has_begun = True
        heartbeat.watch(end_as_one_is_lost)
        clock.ends(startup.PLAN)
        fields = task.work(Run(folder, clock, heartbeat))
        heartbeat.end("ok")
        ignore_terminations(STOP_SIGNALS)  # a signal no longer loses what has been measured
    except BaseException as error:  # also Ctrl-C: the record has to say why
        if record is None or (isinstance(error, ConfigError) and not has_begun):
            raise  # without a record
        ignore_terminations(STOP_SIGNALS)  # until the record is written
        rank = ranks.rank if task.is_distributed else None
        failure = explain(error, rank=rank, heartbeat=heartbeat)
        exit_code = end_badly(failure)
        keep_exit_code(exit_code)
        heartbeat.end(failure.status, failure.reason)
        if ranks.rank == 0:
            _write_partial(task, folder, exit_code=exit_code)
        return exit_code
    if ranks.rank == 0:
        content = record.end_well(fields)
        print(f"\n{task.conclude(content, folder)}\n\nrecord: {folder}")
    distributed.disconnect()
    return EXIT_OK


def _write_partial(task: Task, folder: Path, *, exit_code: int) -> None:
    """Have a task write what it measured before it failed; ends the process if that hangs."""
    # The steps are read from the device, which may have failed, or never answer again.
    timer = threading.Timer(PARTIAL_WITHIN_S, os._exit, [exit_code])
    timer.daemon = True
    timer.start()
    try:
        task.write_partial(folder)
    except Exception as error:
        print(f"warning: the steps could not be written: {error}", file=sys.stderr)
    finally:
        timer.cancel()
