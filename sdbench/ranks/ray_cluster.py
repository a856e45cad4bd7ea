"""`connect` joins this process to a Ray cluster, or starts one on this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sdbench
from sdbench.base.errors import ConfigError, RunError
from sdbench.base.packages import INSTALL_ALL, is_installed
from sdbench.settings.ray import RaySettings

# Set in the workers of Ray Train: how often it has started the ranks again, when the command was
# given (seconds since 1970), and the seconds from then to the worker's first line.
RAY_RESTARTS = "SDBENCH_RAY_RESTARTS"
RAY_BEGAN_S = "SDBENCH_RAY_BEGAN_S"
RAY_LAUNCH_S = "SDBENCH_RAY_LAUNCH_S"

# A CPU of Ray is a place for a process here, not a core: ranks, decoders and encoders share them.
NUM_PLACES = 8 + sdbench.NUM_CPUS
OMP_VARIABLE = "OMP_NUM_THREADS"
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Ray itself would try for many minutes to reach an address where nothing listens.
ANSWER_WITHIN_S = 5.0


def check_installed() -> None:
    """Raise ConfigError without Ray and Lightning."""
    missing = [name for name in ("ray", "lightning") if not is_installed(name)]
    if missing:
        raise ConfigError(
            f"The engine ray needs packages that are not installed: {', '.join(missing)}",
            value="ray",
            allowed=f"composer | torch, or first {INSTALL_ALL}",
            flag="--engine",
        )


def connect(address: str | None) -> None:
    """Join a Ray cluster, without Ray's log lines; a worker stays in its cluster.

    The address is as `ray.init` takes it, e.g. ``auto`` or ``host:6379``. None takes RAY_ADDRESS,
    and without it starts a cluster of this machine alone, which ends with the process.
    """
    check_installed()
    if is_connected():
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
        options |= {"include_dashboard": False, "num_cpus": NUM_PLACES}
    try:
        if where is not None:
            knock(where)
        # Without "local" Ray would look for a cluster that was started here by hand.
        import_ray().init(address=where or "local", **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"no Ray cluster answers at {where} (--ray_address): {' '.join(str(error).split())}; "
            "one that asks for a token needs RAY_AUTH_MODE=token here, too"
        ) from None


def import_ray() -> Any:
    """The module ray; what it reads when it is imported is set."""
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    return ray


def address_of(address: str | None) -> str | None:
    """The address of the cluster to join: that given, or of RAY_ADDRESS; None: this machine."""
    return address or os.environ.get("RAY_ADDRESS")


def head_address() -> str:
    """Host and port of the head of this process's cluster."""
    import ray

    return ray.get_runtime_context().gcs_address


def is_listening(address: str) -> bool:
    """Whether anything listens at the address of a head."""
    try:
        knock(address, within_s=1.0)
    except OSError:
        return False
    return True


def knock(address: str, *, within_s: float = ANSWER_WITHIN_S) -> None:
    """Raise OSError if the address names a host and a port, and nothing listens there."""
    if found := re.fullmatch(r"(?P<host>[^/]+):(?P<port>\d+)", address):
        place = (found["host"].strip("[]"), int(found["port"]))
        socket.create_connection(place, timeout=within_s).close()


def is_connected() -> bool:
    """Whether this process has joined a cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def carried_variables() -> dict[str, str]:
    """The variables of this process that its ranks, decoders and encoders get.

    They go in arguments: the environment that Ray is given for a process is in its logs.
    """
    names = [name for name in os.environ if name.startswith("AWS_")]
    names += [name for name in ("S3_ENDPOINT_URL", OMP_VARIABLE) if name in os.environ]
    if JOB_VARIABLE in os.environ and os.environ.get(OMP_VARIABLE) == "1":
        names.remove(OMP_VARIABLE)  # Ray's choice for the command of a job
    return {name: os.environ[name] for name in names}


def forget_threads_of_ray(num_places: float) -> None:
    """Unset the threads that Ray has chosen for a worker by its CPUs, which are no cores here."""
    if os.environ.get(OMP_VARIABLE) == str(max(1, int(num_places))):
        del os.environ[OMP_VARIABLE]


def tidy_up() -> None:
    """Remove torch's temporary folder, as it would itself if Ray did not kill this process."""
    module = sys.modules.get("torch.distributed.nn.jit.instantiator")
    shutil.rmtree(getattr(module, "INSTANTIATED_TEMPLATE_DIR_PATH", ""), ignore_errors=True)


def resources_per_worker(config: RaySettings, room: Mapping[str, float]) -> Mapping[str, float]:
    """Resources of a rank: those of the config, or else a GPU if the cluster has any."""
    if config.ray_worker_resources is not None:
        return config.ray_worker_resources
    return {"CPU": 1, "GPU": 1} if room.get("GPU") else {"CPU": 1}


def num_workers(config: RaySettings, room: Mapping[str, float]) -> int:
    """Ranks: those of the config, or else as many as the cluster has GPUs."""
    return config.num_ray_workers or int(room.get("GPU", 1))


def num_fitting(resources: Mapping[str, float], room: Mapping[str, float]) -> int:
    """How many processes with these resources each find room."""
    return min(int(room.get(name, 0) / amount + 1e-9) for name, amount in resources.items())


def states_of_places() -> set[str]:
    """States of the places that Ray Train keeps for ranks of this job: PENDING, CREATED, ..."""
    import ray

    job = ray.get_runtime_context().get_job_id()
    places = ray.util.placement_group_table()
    return {place["state"] for name, place in places.items() if name.endswith(job)} - {"REMOVED"}


def check_room(config: RaySettings, room: Mapping[str, float]) -> None:
    """Raise ConfigError if this machine alone has no room for the ranks."""
    share, number = resources_per_worker(config, room), num_workers(config, room)
    if num_fitting(share, room) < (config.min_ray_workers or number):
        raise ConfigError(
            f"this machine has no room for the ranks, each with {resources_in_words(share)}",
            value=number,
            allowed=f"as many as fit into {resources_in_words(room)}, or a larger cluster "
            "(--ray_address)",
            flag="--num_ray_workers",
        )


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
