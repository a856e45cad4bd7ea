"""The runner of every task: from a command line to a record and an exit code.

    request -> plan, agreed among the ranks -> folder, record, heartbeat -> work -> record

A request that cannot be run leaves no record; a run that has begun leaves one however it ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.refusal import report_refusal
from sdbench.base.stop import (
    STOP_SIGNALS,
    Terminated,
    ignore_terminations,
    stop_signals_raise,
)
from sdbench.ranks import distributed
from sdbench.ranks.distributed import Ranks, let_first_rank_end

if TYPE_CHECKING:
    from sdbench.run.outcome import RunRecord
    from sdbench.run.task import Run, Task

T = TypeVar("T")

# Errors that every rank raises: the first one prints them.
_SHARED: list[Exception] = []


def run(
    entry: str, parse: Callable[[Sequence[str]], Any], argv: Sequence[str] | None = None
) -> int:
    """Run a task as a command line asks.

    Args:
        entry: A value of `TASKS`, imported when the command line is found valid.
        parse: Makes the task's request from arguments.
        argv: Command-line arguments; None takes those of the process.

    Returns:
        The exit code: 0 ok, 1 the run failed, 2 bad input, 130 Ctrl-C.
    """
    command = list(sys.argv[1:] if argv is None else argv)
    ranks = Ranks.from_environment()
    try:
        return _run(entry, parse(command), command=command, ranks=ranks)
    except (ConfigError, RunError) as error:  # before there was a run
        is_known_to_all = isinstance(error, ConfigError) or error in _SHARED
        if ranks.rank == 0 or not is_known_to_all:
            print(f"error: {error}", file=sys.stderr)
            report_refusal(error)
        if isinstance(error, RunError):
            return 1
        let_first_rank_end(ranks)
        return 2
    except KeyboardInterrupt:
        return 130
    except Terminated as stop:
        print(f"{stop.number.name} before there was a run", file=sys.stderr)
        return 1


def _run(entry: str, request: Any, *, command: list[str], ranks: Ranks) -> int:
    from sdbench.measure import startup
    from sdbench.record.store import OutputLog

    clock = startup.StartupClock(before_main_s=startup.seconds_before_now())
    log = OutputLog()
    with log.capture(), stop_signals_raise(), contextlib.ExitStack() as resources:
        with no_garbage_expected():
            from sdbench.measure.hardware import inspect_machine
            from sdbench.ranks.heartbeat import Heartbeat
            from sdbench.run.task import Run

            module, name = entry.split(":")
            task = getattr(importlib.import_module(module), name)(request, resources)
            clock.ends(startup.IMPORTS)
            machine = inspect_machine(local_rank=ranks.local_rank)
            _agree(task, machine=machine, ranks=ranks, command=command)
            heartbeat = Heartbeat(ranks, timeout_s=task.timeout_s)
        config = task.printed_config()
        if config is not None:
            if ranks.rank == 0:
                print(config)
            return 0
        num_restarts = max(distributed.gather(distributed.num_restarts(), ranks))

        def begin() -> Path:
            folder = task.make_folder()
            log.move_to(folder)
            print(task.for_person(), flush=True)
            return folder

        folder = _on_first_rank(begin, ranks)
        record = _make_record(task, folder, command, num_restarts=num_restarts)
        return _work(task, Run(folder, clock, heartbeat), record, ranks=ranks)


@contextlib.contextmanager
def no_garbage_expected() -> Iterator[None]:
    """Imports make a million objects to stay: looking for garbage in them takes 0.7 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # also later no collection looks at them, in a measured step least of all
        gc.enable()


def _agree(task: Task, *, machine: Any, ranks: Ranks, command: list[str]) -> None:
    """Resolve on every rank and connect them; an error on one of them is raised on all."""
    from sdbench.run.outcome import explain

    if ranks.world_size > 1 and not task.is_distributed:
        raise ConfigError(
            f"{task.program} is run by one process",
            value=f"{ranks.world_size} ranks",
            allowed="the same command without a launcher",
            flag="WORLD_SIZE (in the environment)",
        )
    error = None
    try:
        task.resolve(machine, ranks)
    except (ConfigError, RunError) as found:
        error = found
    if ranks.world_size == 1:
        if error is not None:
            raise error
        return
    try:
        distributed.connect(ranks, device_type=machine.device_type, timeout_s=task.timeout_s)
    except RunError as absence:
        if error is None and ranks.rank == 0:
            num_restarts = distributed.num_restarts()
            record = _make_record(task, task.make_folder(), command, num_restarts=num_restarts)
            record.end_badly(explain(absence, rank=0))
        raise
    errors = [error for error in distributed.gather(error, ranks) if error is not None]
    if errors:
        _SHARED.append(errors[0])
        raise errors[0]
    # Nodes may have unlike numbers of cores, and these follow from them.
    of_node = {"num_workers", "num_threads"}
    config = task.for_record(num_restarts=0)["config"]
    config = {name: value for name, value in config.items() if name not in of_node}
    configs = distributed.gather(config, ranks)
    assert configs == [config] * ranks.world_size, "ranks resolved the same flags differently"


def _on_first_rank(action: Callable[[], T], ranks: Ranks) -> T:
    """Act on the first rank; every rank returns, or raises, what that one does."""
    answer: Any = None
    if ranks.rank == 0:
        try:
            answer = action()
        except (ConfigError, RunError) as error:
            answer = error
    answer = distributed.broadcast(answer, ranks)
    if isinstance(answer, Exception):
        _SHARED.append(answer)
        raise answer
    return answer


def _make_record(task: Task, folder: Path, command: list[str], *, num_restarts: int) -> RunRecord:
    from sdbench.record.store import RunFolder
    from sdbench.run.outcome import RunRecord

    return RunRecord(
        RunFolder(folder, record_name=task.record_name),
        kind=task.kind,
        program=task.program,
        command=command,
        described=task.for_record(num_restarts=num_restarts),
    )


def _work(task: Task, run: Run, record: RunRecord, *, ranks: Ranks) -> int:
    """Do the work, and leave a record whatever happens."""
    from sdbench.measure import startup
    from sdbench.run.outcome import Failure, explain, explain_among_ranks

    def end_badly(failure: Failure) -> int:
        record.end_badly(failure)
        print(f"{failure.status}: {failure.reason}\nrecord: {run.folder}", file=sys.stderr)
        return failure.exit_code

    def end_as_one_is_lost(lost: str) -> None:
        """In another thread, while the main one waits for ever: NCCL knows no dead neighbour."""
        os._exit(end_badly(Failure("timeout", f"{lost} (--dist_timeout)", exit_code=1)))

    has_begun = False
    try:
        _on_first_rank(record.write_unfinished, ranks)
        has_begun = True
        run.heartbeat.watch(end_as_one_is_lost)
        run.clock.ends(startup.PLAN)
        fields = task.work(run)
        run.heartbeat.end("ok")
        ignore_terminations(STOP_SIGNALS)  # what has been measured is not given up any more
    except BaseException as error:  # also Ctrl-C: the record has to say why
        if isinstance(error, ConfigError) and not has_begun:
            raise  # there is no place for a record
        if task.is_distributed:
            failure = explain_among_ranks(error, heartbeat=run.heartbeat, rank=ranks.rank)
        else:
            failure = explain(error)
        exit_code = end_badly(failure)
        run.heartbeat.end(failure.status, failure.reason)
        return exit_code
    if ranks.rank == 0:
        content = record.end_well(fields)
        print(f"\n{task.conclude(content, run.folder)}\n\nrecord: {run.folder}")
    distributed.disconnect()
    return 0
