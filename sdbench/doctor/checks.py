"""Which checks are there, in which order, and what if one of them breaks or hangs?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.secrets import redact
from sdbench.doctor import gpus, machine, network, services, storage
from sdbench.doctor.finding import Finding, error
from sdbench.doctor.job import Job

T = TypeVar("T")

THREAD_NAME = "sdbench-doctor"


class Check(NamedTuple):
    """One line of the report.

    Attributes:
        name: What is looked at.
        look: Does so on one node; what it raises is an error of the node.
        is_for_all_nodes: Else the first one is looked at, which alone writes the record and logs.
    """

    name: str
    look: Callable[[Job], Finding]
    is_for_all_nodes: bool = True


# GPUs come before whatever opens a context on them, and the model before what depends on its size.
CHECKS = (
    Check("software", machine.check_software),
    Check("driver", gpus.check_driver),
    Check("GPUs", gpus.check_gpus),
    Check("NVLink", gpus.check_nvlink),
    Check("network cards", network.check_fabric),
    Check("NCCL network", network.check_nccl_network),
    Check("model", services.check_model),
    Check("host memory", machine.check_host_memory),
    Check("threads", machine.check_threads),
    Check("limits", network.check_limits),
    Check("shared memory", storage.check_shared_memory),
    Check("stale memory", storage.check_stale_shared_memory),
    Check("disk", storage.check_disk),
    Check("data", services.check_data),
    Check("W&B", services.check_wandb, is_for_all_nodes=False),
)


def look_at_node(job: Job) -> dict[str, Finding]:
    """Make all checks of this node; returns the name of each with what it found."""
    return {
        check.name: settle(lambda check=check: check.look(job), timeout_s=job.timeout_s)
        for check in CHECKS
        if check.is_for_all_nodes or job.ranks.rank == 0
    }


def settle(look: Callable[[], Finding], *, timeout_s: float) -> Finding:
    """Come to a finding whatever happens, and without any secret of the environment in it."""
    try:
        finding = bounded(look, timeout_s=timeout_s)
    except Exception as problem:
        finding = explain(problem, timeout_s=timeout_s)
    return Finding(finding.level, redact(finding.found), redact(finding.advice))


def explain(problem: Exception, *, timeout_s: float) -> Finding:
    """The finding for what a check raised."""
    if isinstance(problem, ConfigError):
        return error(
            f"{problem.what}: got {problem.value!r}", f"{problem.allowed}; set {problem.flag}"
        )
    if isinstance(problem, TimeoutError):
        return error(
            f"no answer within {timeout_s:g} s",
            "find out what it waits for; if it is only slow, --timeout_s",
        )
    said = (str(problem).strip().splitlines() or [""])[0]
    if isinstance(problem, RunError):
        return error(said, "make it whole and reachable from this node")
    return error(
        f"{type(problem).__name__}: {said}", "mend what it names; a job would meet it as well"
    )


def bounded(work: Callable[[], T], *, timeout_s: float) -> T:
    """Do something in a thread of its own, and give it up after a while.

    Raises:
        TimeoutError: It has not ended in time. Its thread goes on, see `is_stuck`.
        Exception: What it raised.
    """
    results: list[T] = []
    problems: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if problems:
        raise problems[0]
    if not results:
        raise TimeoutError
    return results[0]


def is_stuck() -> bool:
    """Whether something that was given up goes on in this process."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())
