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

if TYPE_CHECKING:
    from sdbench.run.task import Task


def resolve_ahead(entry: str, request: Any, *, is_here: bool) -> None:
    """Raise the error that the ranks would raise, of a cluster of this machine alone if `is_here`.

    The machines of another cluster are unknown: only what ranks share is checked. In another
    process, so that this one opens no GPU.
    """
    config = request.config
    if not is_here and (config.num_ray_workers is None or config.min_ray_workers is not None):
        return
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(
        target=_send_error, args=(there, entry, request, is_here), daemon=True
    )
    process.start()
    there.close()
    error = None
    with contextlib.suppress(EOFError):  # it was killed, of which the ranks will tell
        error = here.recv()
    process.join()
    if error is not None:
        raise error


def _send_error(there: Connection, entry: str, request: Any, is_here: bool) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    error = None
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        try:
            os.environ[ray_cluster.RAY_RESTARTS] = "0"  # as in a rank
            with contextlib.ExitStack() as resources:
                task = pkgutil.resolve_name(entry)(request, resources)
                if is_here:
                    _resolve_here(task, request.config)
                else:
                    num_ranks = request.config.num_ray_workers
                    task.check_shares(Ranks(0, num_ranks, 0, num_ranks))
        except (ConfigError, RunError) as found:
            error = found
    with contextlib.suppress(OSError):
        there.send(error)


def _resolve_here(task: Task, config: Any) -> None:
    from sdbench.measure.hardware import check_gpu_code, inspect_machine

    machine = inspect_machine()
    num_gpus = machine.num_devices if machine.device_type == "cuda" else 0
    room = ray_cluster.room_of_this_machine(num_gpus)
    share = ray_cluster.resources_per_worker(config, room)
    num_ranks = ray_cluster.num_workers(config, room)
    ray_cluster.check_room(config, room)
    if config.min_ray_workers is not None or bool(num_gpus) != ("GPU" in share):
        return  # how many ranks there will be, or what they see of the machine, is Ray's
    check_gpu_code(machine)
    task.resolve(machine, Ranks(0, num_ranks, 0, num_ranks))
