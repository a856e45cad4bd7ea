"""Do the ranks agree on the time, and how fast do they add up gradients?"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sdbench.doctor.finding import Finding, error, number_of, ok, warning
from sdbench.doctor.gpus import count_gpus, nvlink_gb_per_s
from sdbench.doctor.job import Job
from sdbench.doctor.network import describe_nics, find_active_nics
from sdbench.ranks.distributed import Ranks
from sdbench.ranks.nccl_log import SOCKETS, NcclLog

if TYPE_CHECKING:
    from sdbench.doctor.meeting import Meeting

# The shortest of several round trips says best what the other clock showed in its middle.
NUM_ROUND_TRIPS = 10
# Logs of nodes whose clocks differ by more cannot be read side by side.
LOG_SKEW_S = 1.0
# How long credentials of MUNGE, by which Slurm's nodes know each other, are valid (munge.h,
# MUNGE_DEFAULT_TTL). S3 refuses requests that are 15 minutes off.
CREDENTIAL_SKEW_S = 300.0

BYTES_OF_DTYPE = {"fp32": 4, "bf16": 2}
MAX_REPEATS = 5
# Of the nominal speed. Below half of it something is in the way; below a tenth the gradients most
# likely take another network than the one that was meant.
LOW_SHARE, HOPELESS_SHARE = 0.5, 0.1
ADVICE = (
    "NCCL_DEBUG=INFO says which network is used and why; look at the lines about network cards, "
    "and at other jobs on the network"
)


def join_group(job: Job, meeting: Meeting) -> None:
    """Connect each rank with every other one, by gloo.

    Raises:
        RuntimeError: A rank cannot be reached, although it has said that it is there.
    """
    import torch

    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.PrefixStore("gloo", meeting.store),
        rank=job.ranks.rank,
        world_size=job.ranks.world_size,
        timeout=datetime.timedelta(seconds=job.timeout_s),
    )


def measure_skews(ranks: Ranks, nodes: Mapping[int, int]) -> dict[int, tuple[float, float]]:
    """Compare the clocks of the nodes with that of the first one.

    Args:
        ranks: The place of this process.
        nodes: Number of each node to its first rank.

    Returns:
        On the first rank, number of each other node to how far its clock is ahead and to the most
        that this may be wrong, both in seconds; nothing on the other ranks.
    """
    skews = {}
    for node, rank in nodes.items():
        if node == 0:
            continue
        if ranks.rank == 0:
            skews[node] = _ask_clock(rank)
        elif ranks.rank == rank:
            _answer_clock()
    return skews


def _ask_clock(rank: int) -> tuple[float, float]:
    import torch

    answers = []
    question, answer = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    for _ in range(NUM_ROUND_TRIPS):
        sent_s = time.time()
        torch.distributed.send(question, rank)
        torch.distributed.recv(answer, rank)
        received_s = time.time()
        half_trip_s = (received_s - sent_s) / 2
        answers.append((half_trip_s, answer.item() - (sent_s + half_trip_s)))
    uncertainty_s, skew_s = min(answers)
    return skew_s, uncertainty_s


def _answer_clock() -> None:
    import torch

    question, answer = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    for _ in range(NUM_ROUND_TRIPS):
        torch.distributed.recv(question, 0)
        answer[0] = time.time()
        torch.distributed.send(answer, 0)


def judge_skews(skews: dict[int, tuple[float, float]]) -> Finding:
    """What the difference of clocks means.

    Args:
        skews: As `measure_skews` gives them; at least one.
    """
    node, (skew_s, uncertainty_s) = max(skews.items(), key=lambda item: abs(item[1][0]))
    direction = "ahead of" if skew_s > 0 else "behind"
    found = (
        f"node {node} is {_show_seconds(abs(skew_s))} {direction} node 0, to within "
        f"{_show_seconds(uncertainty_s)}"
    )
    advice = f"start the time service (chronyd, systemd-timesyncd) on node {node}"
    if abs(skew_s) - uncertainty_s > CREDENTIAL_SKEW_S:
        return error(f"{found}: credentials are refused", advice)
    if abs(skew_s) - uncertainty_s > LOG_SKEW_S:
        return warning(f"{found}: their logs do not fit together", advice)
    return ok(f"{found}, the most of {len(skews)}")


def _show_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


class Reduced(NamedTuple):
    """How an all-reduce went on one rank.

    Attributes:
        seconds: Of one of them.
        network: NCCL's name of what it used between nodes; known to the first rank alone, and
            None where there is no NCCL, one node, or a log of NCCL that the user has asked for.
    """

    seconds: float
    network: str | None


def time_all_reduce(job: Job, *, device_type: str, num_values: int) -> Reduced:
    """Add up as many numbers as the gradient has over all ranks.

    Args:
        job: The job.
        device_type: ``cuda`` on all ranks (by NCCL) or ``cpu`` (by gloo).
        num_values: The same on all ranks.

    Returns:
        The median of up to five behind one that is not counted; all of them within a third of
        the job's timeout if one is.
    """
    import torch

    nccl_log = NcclLog(job.ranks, device_type=device_type)
    group, device = None, "cpu"
    if device_type == "cuda":
        device = f"cuda:{job.ranks.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
        # This one's timeout ends the process: the doctor's own has to come first.
        patience = datetime.timedelta(seconds=10 * job.timeout_s)
        group = torch.distributed.new_group(backend="nccl", timeout=patience)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job.gradient_dtype]
    gradient = torch.zeros(num_values, dtype=dtype, device=device)

    def run() -> float:
        started_s = time.perf_counter()
        torch.distributed.all_reduce(gradient, group=group)
        if device_type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started_s

    run()
    # Of the slowest rank, so that all repeat it equally often.
    slowest = torch.tensor([run()])
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    repeats = int(job.timeout_s / 3 / slowest.item())
    seconds = [run() for _ in range(max(1, min(MAX_REPEATS, repeats)))]
    return Reduced(statistics.median(seconds), nccl_log.read_network())


def judge_all_reduce(job: Job, reduced: Reduced, *, num_values: int) -> Finding:
    """What an all-reduce means for the job.

    Args:
        job: The job.
        reduced: How it went on the slowest rank.
        num_values: How many numbers were added up.
    """
    num_ranks = job.ranks.world_size
    num_bytes = num_values * BYTES_OF_DTYPE[job.gradient_dtype]
    # As nccl-tests counts it: what each link carries in a ring, whatever the number of ranks.
    bus_gb_per_s = 2 * (num_ranks - 1) / num_ranks * num_bytes / reduced.seconds / 1e9
    nominal_gb_per_s, link = find_nominal(job)
    by = f" by NCCL's network {reduced.network}" if reduced.network else ""
    found = (
        f"{num_values:,} values in {job.gradient_dtype}, {num_bytes / 1e9:.3g} GB, over "
        f"{number_of(num_ranks, 'rank')} on {number_of(job.ranks.num_nodes, 'node')} in "
        f"{_show_seconds(reduced.seconds)}{by}: bus bandwidth {bus_gb_per_s:.3g} GB/s, nominal "
    )
    if reduced.network == SOCKETS and find_active_nics():
        return error(f"NCCL took TCP and not the faster cards; {found}n/a", ADVICE)
    if nominal_gb_per_s is None:
        return ok(f"{found}n/a ({link})")
    share = bus_gb_per_s / nominal_gb_per_s
    found += f"{nominal_gb_per_s:.4g} GB/s ({link}), {100 * share:.0f} % of it"
    if share < HOPELESS_SHARE:
        return error(found, ADVICE)
    return warning(found, ADVICE) if share < LOW_SHARE else ok(found)


def find_nominal(job: Job) -> tuple[float | None, str]:
    """GB/s that the slowest link between the ranks should carry, and which link that is."""
    if job.link_gbps is not None:
        return job.link_gbps / 8, f"--link_gbps {job.link_gbps:g}"
    if job.ranks.num_nodes == 1:
        speed = nvlink_gb_per_s()
        return speed, "no link of known speed" if speed is None else "NVLink"
    nics = find_active_nics()
    if not nics:
        return None, "no link of known speed, or --link_gbps"
    # Each GPU uses the cards next to it; with fewer ranks than GPUs the others lie idle.
    share = min(1.0, job.ranks.local_world_size / max(1, count_gpus()))
    return share * sum(nic.gbps for nic in nics) / 8, describe_nics(nics)
