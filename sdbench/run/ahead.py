"""`resolve_ahead` resolves a request as the ranks will, before Ray is asked for them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import signal
from multiprocessing.connection import Connection
from typing import Any

from sdbench.base.errors import ConfigError, RunError
from sdbench.ranks import ray_cluster
from sdbench.ranks.distributed import Ranks
from sdbench.settings.rules import UNKNOWN, Unknown, check


def resolve_ahead(entry: str, request: Any, *, is_here: bool) -> None:
    """Raise the error that the ranks would raise, of a cluster of this machine alone if `is_here`.

    First what is the same on all machines, for which no torch is imported. Then this machine is
    looked at, in another process, so that this one opens no GPU; what it needs of Ray and torch it
    imports meanwhile.
    """
    config, ranks = request.config, UNKNOWN
    if config.num_ray_workers is not None and config.min_ray_workers is None:
        ranks = Unknown(world_size=config.num_ray_workers)
    check(request, ranks=ranks)
    with contextlib.ExitStack() as resources:
        pkgutil.resolve_name(entry)(request, resources).check_ahead(ranks)
    if not is_here:
        return
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_error, args=(there, entry, request), daemon=True)
    process.start()
    there.close()
    ray_cluster.import_ray()
    import ray.train.torch  # noqa: F401

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
            _resolve_here(entry, request)
        except (ConfigError, RunError) as found:
            error = found
    with contextlib.suppress(OSError):
        there.send(error)


def _resolve_here(entry: str, request: Any) -> None:
    """Resolve the task for this machine, unless Ray decides what the ranks will see of it."""
    from sdbench.measure.hardware import check_gpu_code, inspect_machine

    machine, config = inspect_machine(), request.config
    num_gpus = machine.num_devices if machine.device_type == "cuda" else 0
    # A cluster that `connect` starts has this room.
    room = {"CPU": ray_cluster.NUM_PLACES, **({"GPU": num_gpus} if num_gpus else {})}
    ray_cluster.check_room(config, room)
    has_gpu = "GPU" in ray_cluster.resources_per_worker(config, room)
    if has_gpu == bool(num_gpus) and config.min_ray_workers is None:
        check_gpu_code(machine)
        num_ranks = ray_cluster.num_workers(config, room)
        with contextlib.ExitStack() as resources:
            task = pkgutil.resolve_name(entry)(request, resources)
            task.resolve(machine, Ranks(0, num_ranks, 0, num_ranks))
