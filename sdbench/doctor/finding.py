"""Job, what a check looks at; Finding, what it comes to; `settle`, which runs it in its time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sdbench.base.errors import ConfigError
from sdbench.base.secrets import redact
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import Request

if TYPE_CHECKING:
    from sdbench.models.architecture import Architecture
    from sdbench.plan.resolve import Plan

T = TypeVar("T")

# An error is what a job would fail of, or what would make its figures worthless.
OK, SKIPPED, WARNING, ERROR = "ok", "skipped", "warning", "error"
LEVELS = (SKIPPED, OK, WARNING, ERROR)  # from the least to the most severe
BYTES_PER_GIB = 1024**3
THREAD_NAME = "sdbench-doctor"


@dataclasses.dataclass(kw_only=True)
class Job:
    """The job, and what the checks have found out about it so far.

    Attributes:
        ranks: The place of this process.
        request: The job's own flags.
        timeout_s: How long a check may take.
        gradient_dtype: ``fp32`` or ``bf16``, of the timed all-reduce.
        link_gbps: Nominal speed of the link between the ranks in Gbit/s, or None.
        architecture: Set by the check of the model, with the two below.
        num_trainable: Weights with a gradient.
        num_parameters: All weights.
        plan: Set by the check of the plan.
    """

    ranks: Ranks
    request: Request
    timeout_s: float
    gradient_dtype: str
    link_gbps: float | None
    architecture: Architecture | None = None
    num_trainable: int | None = None
    num_parameters: int | None = None
    plan: Plan | None = None


# What a check yields: levels, each with what was seen.
Seen = Iterator[tuple[str, str]]


class Check(NamedTuple):
    """One line of the report.

    Attributes:
        name: What is looked at.
        look: Does so on one node; what it raises is an error of the node.
        advice: What to do about a warning or an error.
        is_for_all_nodes: Else the first node is looked at, which alone writes the record and logs.
    """

    name: str
    look: Callable[[Job], Seen]
    advice: str = ""
    is_for_all_nodes: bool = True


class Finding(NamedTuple):
    """What a check found: a level, what was seen, and what to do about it, which may be empty."""

    level: str
    found: str
    advice: str = ""


def join(seen: Iterable[tuple[str, str]], *, advice: str) -> Finding:
    """All that a check has yielded, as one finding of the worst level."""
    worst_first = sorted(seen, key=lambda one: -LEVELS.index(one[0]))
    level = worst_first[0][0]
    found = "; ".join(text for _, text in worst_first)
    return Finding(level, redact(found), redact(advice) if level in (WARNING, ERROR) else "")


def settle(check: Check, job: Job) -> Finding:
    """The finding of a check, or the error that it raised, without secrets of the environment."""
    advice = check.advice
    try:
        seen = bounded(lambda: list(check.look(job)), timeout_s=job.timeout_s)
    except ConfigError as problem:
        seen = [(ERROR, f"{problem.what}: got {problem.value!r}")]
        advice = f"{problem.allowed}; set {problem.flag}"
    except TimeoutError as problem:
        seen = [(ERROR, str(problem))]
        advice = "find out what it waits for; if it is only slow, raise --timeout_s"
    except Exception as problem:
        seen = [(ERROR, describe(problem))]
    return join(seen, advice=advice)


def describe(problem: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(problem).__name__}: {(str(problem).strip().splitlines() or [''])[0]}"


def bounded(work: Callable[[], T], *, timeout_s: float) -> T:
    """Do something in a thread, and give it up after a while; see `is_stuck`.

    Raises:
        TimeoutError: It has not ended in time. Its thread goes on.
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
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return results[0]


def is_stuck() -> bool:
    """Whether a check that was given up still runs."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


def show_gib(num_bytes: float) -> str:
    """A size of memory or of a disk."""
    return f"{num_bytes / BYTES_PER_GIB:.1f} GiB"
