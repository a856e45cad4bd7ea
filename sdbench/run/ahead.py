"""`resolve_ahead` resolves a request as the ranks will, before Ray is asked for them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import signal
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from sdbench.base.errors import ConfigError, RunError
from sdbench.ranks import ray_cluster
from sdbench.ranks.distributed import Ranks
from sdbench.settings.rules import UNKNOWN, Unknown, check

if TYPE_CHECKING:
    from sdbench.measure.hardware import Machine
    from sdbench.run.task import Task


def resolve_ahead(entry: str, request: Any, *, is_here: bool) -> None:
    """Raise the error that the ranks would raise, of a cluster of this machine alone if `is_here`.

    The machines of another cluster are unknown: only what is the same on all of them is checked,
    for which no torch is imported. This machine is looked at in another process, so that this one
    opens no GPU; what it needs of Ray and torch is imported meanwhile.
    """
    if not is_here:
        with contextlib.ExitStack() as resources:
            task = pkgutil.resolve_name(entry)(request, resources)
            _check(task, machine=None, num_ranks=request.config.num_ray_workers)
        return
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_error, args=(there, entry, request), daemon=True)
    process.start()
    there.close()
    ray_cluster.import_train()
    error = None
    with contextlib.suppress(EOFError):  # it was killed, of which the ranks will tell
        error = here.recv()
    process.join()
    if error is not None:
        raise error


def _send_error(there: Connection, entry: str, request: Any) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    error = None
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        try:
            os.environ[ray_cluster.RAY_RESTARTS] = "0"  # as in a rank
            with contextlib.ExitStack() as resources:
                task = pkgutil.resolve_name(entry)(request, resources)
                machine, num_ranks = _see_this_machine(request.config)
                _check(task, machine=machine, num_ranks=num_ranks)
        except (ConfigError, RunError) as found:
            error = found
    with contextlib.suppress(OSError):
        there.send(error)


def _see_this_machine(config: Any) -> tuple[Machine | None, int]:
    """This machine as the ranks will see it, or None if Ray decides that, and their number."""
    from sdbench.measure.hardware import inspect_machine

    machine = inspect_machine()
    num_gpus = machine.num_devices if machine.device_type == "cuda" else 0
    room = ray_cluster.room_of_this_machine(num_gpus)
    ray_cluster.check_room(config, room)
    has_gpu = "GPU" in ray_cluster.resources_per_worker(config, room)
    num_ranks = ray_cluster.num_workers(config, room)
    return (machine if has_gpu == bool(num_gpus) else None), num_ranks


def _check(task: Task, *, machine: Machine | None, num_ranks: int | None) -> None:
    """Resolve the task, or check what is the same for any machine or number of ranks."""
    from sdbench.measure.hardware import check_gpu_code

    if task.request.config.min_ray_workers is not None:
        num_ranks = None  # it depends on the room in the cluster
    if machine is not None and num_ranks is not None:
        check_gpu_code(machine)
        task.resolve(machine, Ranks(0, num_ranks, 0, num_ranks))
        return
    ranks = UNKNOWN if num_ranks is None else Unknown(world_size=num_ranks)
    check(task.request, ranks=ranks)
    task.check_ahead(ranks)
