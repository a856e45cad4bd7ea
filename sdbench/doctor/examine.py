"""How do the ranks look at their nodes, and then together at what is between them?

The first rank of each node looks at it. The first one of all asks every rank to take part, waits
for none longer than it has said, and makes the report.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdbench.base.errors import RunError
from sdbench.base.secrets import redact
from sdbench.doctor import collective
from sdbench.doctor.checks import CHECKS, bounded, explain, look_at_node, settle
from sdbench.doctor.finding import ERROR, Finding, error, ok, skipped, warning
from sdbench.doctor.gpus import count_gpus, describe_gpus
from sdbench.doctor.job import Job
from sdbench.doctor.meeting import Meeting
from sdbench.doctor.printout import Line, Report, merge
from sdbench.ranks.distributed import name_ranks

# How long the first rank keeps the store open for ranks that still have to read its last word.
FAREWELL_S = 5.0
MEET_ADVICE = (
    "start all ranks within --timeout_s of each other, and let every node reach MASTER_ADDR at "
    "MASTER_PORT and the others at any port (security group, firewall, GLOO_SOCKET_IFNAME)"
)


def examine(job: Job) -> tuple[Report | None, Callable[[], Any]]:
    """Look at this node, and with the other ranks at all of them.

    Returns:
        The report, on the first rank and on one that has not met it, else None; and what is left
        to be done when it has been printed.
    """
    try:
        meeting = Meeting(job.ranks, timeout_s=job.timeout_s)
    except RunError as problem:
        return _examine_alone(job, str(problem)), lambda: None
    if job.ranks.rank == 0:
        return _lead(job, meeting), lambda: _say_farewell(job, meeting)
    try:
        _follow(job, meeting)
    except RuntimeError as problem:  # the store has died with the first rank, or nobody speaks
        return _examine_alone(job, str(problem)), lambda: None
    return None, lambda: None


def _examine_alone(job: Job, reason: str) -> Report:
    lines = [
        Line("ranks", (), error(reason, MEET_ADVICE), is_shared=True),
        *merge([look_at_node(job)] if job.ranks.local_rank == 0 else []),
    ]
    return Report(job.model_name, [socket.gethostname()], job.ranks.world_size, lines)


def _lead(job: Job, meeting: Meeting) -> Report:
    """What the first rank does."""
    num_ranks = job.ranks.world_size
    _arrive(job, meeting)
    here = meeting.hear("here", range(num_ranks), timeout_s=job.timeout_s)
    firsts = [rank for rank, who in here.items() if who["local_rank"] == 0]
    meeting.say("begin", firsts)
    meeting.say("checked", _look(job))
    checked = meeting.hear("checked", here, timeout_s=len(CHECKS) * job.timeout_s)
    plan = _make_plan(job, checked) if len(checked) == num_ranks > 1 else None
    meeting.say("plan", plan)
    if plan is not None:
        together = _look_together(job, meeting, plan, firsts)
    else:
        together = _explain_no_plan(num_ranks)
    nodes = [_read_findings(checked.get(rank)) for rank in firsts]
    gpus = [checked[rank]["gpus"] for rank in firsts if rank in checked]
    lines = [
        Line("ranks", (), _judge_ranks(job, here, checked), is_shared=True),
        *merge(nodes),
        Line("nodes alike", (), _compare([node for node in nodes if node], gpus), is_shared=True),
        *(Line(name, (), finding, is_shared=True) for name, finding in together.items()),
    ]
    return Report(job.model_name, [here[rank]["host"] for rank in firsts], num_ranks, lines)


def _follow(job: Job, meeting: Meeting) -> None:
    """What every other rank does.

    Raises:
        RuntimeError: The first rank is gone.
    """
    _arrive(job, meeting)
    begin = meeting.hear("begin", [0], timeout_s=2 * job.timeout_s)
    if not begin:
        raise RunError(f"rank 0 does not begin within {2 * job.timeout_s:g} s")
    meeting.say("checked", _look(job))
    # The first rank makes its own checks, and then waits for the slowest node.
    plan = meeting.hear("plan", [0], timeout_s=2 * (len(CHECKS) + 1) * job.timeout_s)
    if not plan:
        raise RunError("rank 0 is gone")
    if plan[0] is not None:
        _look_together(job, meeting, plan[0], begin[0])
    meeting.hear("end", [0], timeout_s=5 * job.timeout_s)
    meeting.say("bye")


def _arrive(job: Job, meeting: Meeting) -> None:
    meeting.say("here", {"host": socket.gethostname(), "local_rank": job.ranks.local_rank})


def _say_farewell(job: Job, meeting: Meeting) -> None:
    meeting.say("end")
    meeting.hear("bye", range(1, job.ranks.world_size), timeout_s=FAREWELL_S)


def _look(job: Job) -> dict[str, Any]:
    """What this rank tells about itself, and the first one of a node about that."""
    findings = look_at_node(job) if job.ranks.local_rank == 0 else {}
    return {
        "findings": {
            name: (finding.level, finding.found, finding.advice)
            for name, finding in findings.items()
        },
        "gpus": describe_gpus(),
        "device_type": _find_device_type(job),
    }


def _read_findings(checked: Mapping[str, Any] | None) -> dict[str, Finding]:
    """Name of each check to what a node found; none if it never told."""
    if checked is None:
        return {}
    return {name: Finding(*finding) for name, finding in checked["findings"].items()}


def _find_device_type(job: Job) -> str:
    import torch

    try:
        has_gpu = bounded(torch.cuda.is_available, timeout_s=job.timeout_s)
    except TimeoutError:  # which the line about the driver tells
        has_gpu = False
    return "cuda" if has_gpu else "cpu"


def _make_plan(job: Job, checked: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks are to add up together."""
    on_gpus = all(who["device_type"] == "cuda" for who in checked.values())
    return {
        "device_type": "cuda" if on_gpus else "cpu",
        "num_values": None if job.model is None else job.model.num_trainable,
    }


def _explain_no_plan(num_ranks: int) -> dict[str, Finding]:
    reason = "ranks are missing"
    if num_ranks == 1:
        launcher = f"torchrun --nproc_per_node {count_gpus()}" if count_gpus() > 1 else "srun"
        reason = f"a single rank; {launcher} starts several"
    return {"clocks": skipped(reason), "all-reduce": skipped(reason)}


def _judge_ranks(job: Job, here: Mapping[int, Any], checked: Mapping[int, Any]) -> Finding:
    num_ranks = job.ranks.world_size
    absent = [rank for rank in range(num_ranks) if rank not in here]
    silent = [rank for rank in here if rank not in checked]
    if absent:
        return error(
            f"{len(here)} of {num_ranks} came within {job.timeout_s:g} s, absent: "
            f"{name_ranks(absent, job.ranks)}",
            MEET_ADVICE,
        )
    if silent:
        return error(
            f"{len(checked)} of {num_ranks} ended their checks, silent: "
            f"{name_ranks(silent, job.ranks)}",
            "look at what these ranks have printed, and at their nodes",
        )
    return ok("a single one" if num_ranks == 1 else f"all {num_ranks} are here")


def _compare(nodes: Sequence[Mapping[str, Finding]], gpus: Sequence[str]) -> Finding:
    """Whether the nodes have the same versions and GPUs."""
    if len(nodes) < 2:
        return skipped("a single node")
    facts = {name: [node[name].found for node in nodes] for name in ("software", "driver")}
    facts["GPUs"] = list(gpus)
    different = [name for name, values in facts.items() if len(set(values)) > 1]
    if not different:
        return ok("software, driver and GPUs are the same on all")
    shown = f" ({'; '.join(dict.fromkeys(gpus))})" if "GPUs" in different else ""
    return warning(
        f"they differ in {', '.join(different)}{shown}",
        "start all nodes from one image and of one kind: the slowest sets the pace",
    )


def _look_together(
    job: Job, meeting: Meeting, plan: Mapping[str, Any], firsts: Sequence[int]
) -> dict[str, Finding]:
    """What all ranks do at the same time; the findings are of use on the first one."""
    connected = settle(lambda: _connect(job, meeting), timeout_s=job.timeout_s)
    if connected.level == ERROR:
        broken = error(f"the ranks cannot be connected: {connected.found}", MEET_ADVICE)
        return {"clocks": broken, "all-reduce": skipped("the ranks are not connected")}
    nodes = dict(enumerate(firsts))
    clocks = settle(lambda: _compare_clocks(job, nodes), timeout_s=job.timeout_s)
    return {"clocks": clocks, "all-reduce": _reduce(job, meeting, plan)}


def _connect(job: Job, meeting: Meeting) -> Finding:
    collective.join_group(job, meeting)
    return ok("")


def _compare_clocks(job: Job, nodes: Mapping[int, int]) -> Finding:
    skews = collective.measure_skews(job.ranks, nodes)
    return collective.judge_skews(skews) if skews else skipped("a single node")


def _reduce(job: Job, meeting: Meeting, plan: Mapping[str, Any]) -> Finding:
    if plan["num_values"] is None:
        return skipped("the size of the model is not known")
    try:
        reduced = bounded(lambda: collective.time_all_reduce(job, **plan), timeout_s=job.timeout_s)
        meeting.say("reduced", {"seconds": reduced.seconds})
    except Exception as problem:
        reason = explain(problem, timeout_s=job.timeout_s).found
        meeting.say("reduced", {"problem": redact(reason)})
    if job.ranks.rank != 0:
        return ok("")
    heard = meeting.hear("reduced", range(job.ranks.world_size), timeout_s=job.timeout_s)
    problems = [
        f"rank {rank}: {heard.get(rank, {'problem': 'no word of it'})['problem']}"
        for rank in range(job.ranks.world_size)
        if "seconds" not in heard.get(rank, {})
    ]
    if problems:
        return error(
            f"it has failed on {len(problems)} of {job.ranks.world_size} ranks; {problems[0]}",
            "NCCL_DEBUG=INFO says more; a larger --timeout_s if the link is only slow",
        )
    slowest = reduced._replace(seconds=max(who["seconds"] for who in heard.values()))
    return collective.judge_all_reduce(job, slowest, num_values=plan["num_values"])
