"""The parts of the doctor: `Job`, what is checked; `Check`; `Finding`, the result of a check."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sdbench.base.errors import ConfigError
from sdbench.base.secrets import redact
from sdbench.ranks.distributed import Ranks
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.request import Request

if TYPE_CHECKING:
    from sdbench.models.architecture import Architecture
    from sdbench.plan.draft import Plan

T = TypeVar("T")

# An error would make a job fail or its figures worthless.
OK, SKIPPED, WARNING, ERROR = "ok", "skipped", "warning", "error"
LEVELS = (SKIPPED, OK, WARNING, ERROR)  # from the least to the most severe
THREAD_NAME = "sdbench-doctor"


@dataclasses.dataclass(kw_only=True)
class Job:
    """The flags of the job, and the results of earlier checks.

    A check takes `timeout_s` at most; `link_gbps` is the nominal speed of the link between the
    ranks; `with_speed` asks for rates of the devices. The check of the model sets `architecture`
    and `num_trainable`, its number of trained parameters, the check of the plan `plan`, and the
    all-reduce `bus_gb_per_s`.
    """

    ranks: Ranks
    request: Request
    timeout_s: float
    link_gbps: float | None
    with_speed: bool = False
    architecture: Architecture | None = None
    num_trainable: int | None = None
    plan: Plan[BenchmarkConfig] | None = None
    bus_gb_per_s: float | None = None


# What a check yields: pairs of a level and a text.
Seen = Iterator[tuple[str, str]]


class Check(NamedTuple):
    """A line of the report: its name, what checks a node, and advice about a fault.

    An exception of `look` is an error of the node.
    """

    name: str
    look: Callable[[Job], Seen]
    advice: str


def check(name: str, advice: str) -> Callable[[Callable[[Job], Seen]], Check]:
    """Make the decorated function a check."""
    return lambda look: Check(name, look, advice)


class Finding(NamedTuple):
    """The result of a check: level, what was found, and advice, which may be empty."""

    level: str
    found: str
    advice: str = ""


def join(seen: Iterable[tuple[str, str]], *, advice: str) -> Finding:
    """Combine the results of a check into one finding of the most severe level."""
    worst_first = sorted(seen, key=lambda one: -LEVELS.index(one[0]))
    level = worst_first[0][0]
    found = "; ".join(text for _, text in worst_first)
    return Finding(level, redact(found), redact(advice) if level in (WARNING, ERROR) else "")


def settle(check: Check, job: Job) -> Finding:
    """Run a check within its time; an exception becomes a finding. Secrets are removed."""
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
    """Run work in a thread and raise its exception, or TimeoutError if it takes too long.

    After a timeout the thread continues; see `is_stuck`.
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
    """Return True if a check continues after its timeout."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())
