"""`connect` joins this process to a Ray cluster, or starts one on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sdbench
from sdbench.base.errors import ConfigError, RunError, first_line

# Set in the workers of Ray Train: how often it has started the ranks again, when the command was
# given (seconds since 1970), and the seconds from then to the worker's first line.
RAY_RESTARTS = "SDBENCH_RAY_RESTARTS"
RAY_BEGAN_S = "SDBENCH_RAY_BEGAN_S"
RAY_LAUNCH_S = "SDBENCH_RAY_LAUNCH_S"

# Ray itself would try for many minutes to reach an address where nothing listens.
ANSWER_WITHIN_S = 20.0
INSTALL = "pip install -r requirements-ray.txt -c constraints.txt"


def check_installed() -> None:
    """Raise ConfigError without the packages of requirements-ray.txt."""
    missing = [name for name in ("ray", "lightning") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The engine ray needs packages that are not installed: {', '.join(missing)}",
            value="ray",
            allowed=f"composer | torch, or first {INSTALL}",
            flag="--engine",
        )


def connect(address: str | None) -> None:
    """Join a Ray cluster, without Ray's log lines; a worker stays in its cluster.

    The address is as `ray.init` takes it, e.g. ``auto`` or ``host:6379``. None takes RAY_ADDRESS,
    and without it starts a cluster of this machine alone, which ends with the process.
    """
    check_installed()
    # Ray Train reads it when it is imported.
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        return
    where = address_of(address)
    # Workers on this machine find this package where the driver has it.
    paths = [str(Path(sdbench.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}},
    }
    if where is None:
        # Started ahead, a process for each CPU would keep two cores busy for seconds.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        # Ray's own is 15: all else on this machine, Ray's other processes too, would go first.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # A CPU of Ray is a place for a process here, not a core: ranks, decoders and encoders share
        # the cores.
        options |= {"include_dashboard": False, "num_cpus": 8 + sdbench.NUM_CPUS}
    try:
        if where is not None:
            knock(where)
        # Without "local" Ray would look for a cluster that was started here by hand.
        ray.init(address=where or "local", **options)
    except (OSError, RuntimeError) as error:
        raise RunError(
            f"no Ray cluster answers at {where} (--ray_address): {first_line(error)}; "
            "one that asks for a token needs RAY_AUTH_MODE=token here, too"
        ) from None


def address_of(address: str | None) -> str | None:
    """The address of the cluster to join: that given, or of RAY_ADDRESS; None: this machine."""
    return address or os.environ.get("RAY_ADDRESS")


def head_address() -> str:
    """Host and port of the head of this process's cluster."""
    import ray

    return ray.get_runtime_context().gcs_address


def knock(address: str) -> None:
    """Raise OSError if the address names a host and a port, and nothing listens there."""
    if found := re.fullmatch(r"(?P<host>[^/]+):(?P<port>\d+)", address):
        place = (found["host"].strip("[]"), int(found["port"]))
        socket.create_connection(place, timeout=ANSWER_WITHIN_S).close()


def has_room(needed: Mapping[str, float]) -> bool:
    """Whether the cluster, when nothing else runs on it, has these resources."""
    import ray

    there = ray.cluster_resources()
    return all(amount <= there.get(name, 0) for name, amount in needed.items())


def resources_in_words(resources: Mapping[str, float]) -> str:
    """Resources in words, without those that Ray adds itself."""
    known = {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith(("node:", "bundle_group_"))
        and name not in ("memory", "object_store_memory")
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in known.items()) or "none"
