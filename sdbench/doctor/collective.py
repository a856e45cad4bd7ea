"""Checks by all ranks together: presence, versions, and a timed all-reduce."""

from __future__ import annotations

import datetime
import functools
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.doctor.finding import ERROR, OK, SKIPPED, WARNING, Finding, Job, bounded, describe
from sdbench.ranks.distributed import Ranks, gather, num_tasks_without_launcher

# As in multi-node/2.train.sbatch: jobs that share a node get ports of their own, below Linux's
# ephemeral ports.
FIRST_PORT, NUM_PORTS = 10_000, 20_000
MAX_REPEATS = 5
# Shares of the nominal speed. Below half of it something slows the link; below a tenth the
# gradients probably use another network than intended.
LOW_SHARE, HOPELESS_SHARE = 0.5, 0.1


def find_ranks() -> Ranks:
    """Find the ranks in the environment of a launcher, or else of srun.

    The values of srun are written into the environment under the names that launchers use.
    """
    step = os.environ
    num_tasks = num_tasks_without_launcher()
    if num_tasks > 1:
        tasks_per_node = num_tasks // int(step["SLURM_STEP_NUM_NODES"])
        port = FIRST_PORT + int(step["SLURM_JOB_ID"]) % NUM_PORTS
        step["RANK"], step["WORLD_SIZE"] = step["SLURM_PROCID"], str(num_tasks)
        step["LOCAL_RANK"], step["LOCAL_WORLD_SIZE"] = step["SLURM_LOCALID"], str(tasks_per_node)
        step.setdefault("MASTER_PORT", str(port))
        if "MASTER_ADDR" not in step and shutil.which("scontrol"):
            # Slurm's own address of the first node: one that the others reach, also without DNS.
            first = _ask_slurm("hostnames", step["SLURM_STEP_NODELIST"]).split()[0]
            found = re.findall(r"NodeAddr=(\S+)", _ask_slurm("node", "--oneliner", first))
            step["MASTER_ADDR"] = found[0]
    ranks = Ranks.from_environment()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if ranks.world_size > 1 and not step.get(name):
            raise ConfigError(
                f"there are {ranks.world_size} ranks, but no address of the first one",
                value=f"no {name}",
                allowed="the address of the first node, and a free port on it, at least 1024",
                flag=name,
            )
    return ranks


def _ask_slurm(*arguments: str) -> str:
    command = ["scontrol", "show", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def time_all_reduce(job: Job, *, device_type: str, num_values: int | None) -> tuple[str, str]:
    """Time an all-reduce by NCCL (``cuda``) or gloo (``cpu``); return a finding's level and text.

    A rank that cannot take part is named. `num_values` is None for a model of unknown size.
    """
    if job.ranks.world_size == 1 or num_values is None:
        is_single = job.ranks.world_size == 1
        return SKIPPED, "a single rank" if is_single else "a model of unknown size"
    measure = functools.partial(_measure, job, device_type=device_type, num_values=num_values)
    try:
        own: Any = bounded(measure, timeout_s=job.timeout_s)
    except Exception as problem:
        own = describe(problem)
    times = gather(own, job.ranks)
    for rank, result in enumerate(times):
        if isinstance(result, str):
            return ERROR, f"failed on rank {rank}: {result}"
    return judge_all_reduce(job, seconds=max(times), num_values=num_values)


def _measure(job: Job, *, device_type: str, num_values: int) -> float:
    """Return the median seconds of up to five all-reduces of a gradient, after a warm-up.

    Together they take at most a third of the job's timeout, if one of them does.
    """
    import torch

    # NCCL's timeout ends the process: the doctor's own has to come first.
    patience = datetime.timedelta(seconds=10 * job.timeout_s)
    device = "cpu"
    if device_type == "cuda":
        device = f"cuda:{job.ranks.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    group = torch.distributed.new_group(backend=backend, timeout=patience)
    gradient = torch.zeros(num_values, device=device)

    def run() -> float:
        started_s = time.perf_counter()
        torch.distributed.all_reduce(gradient, group=group)
        if device_type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started_s

    run()
    # The time of the slowest rank, so that all ranks repeat it equally often.
    slowest = torch.tensor([run()], device=device)
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX, group=group)
    num_repeats = int(job.timeout_s / 3 / slowest.item())
    return statistics.median(run() for _ in range(max(1, min(MAX_REPEATS, num_repeats))))


def judge_all_reduce(job: Job, *, seconds: float, num_values: int) -> tuple[str, str]:
    """Compare an all-reduce with the nominal speed of the link; return a finding's level and text.

    `seconds` is its time on the slowest rank. The job keeps the bus bandwidth.
    """
    num_ranks = job.ranks.world_size
    num_bytes = 4 * num_values
    # As nccl-tests counts it: what each link carries in a ring, whatever the number of ranks.
    job.bus_gb_per_s = 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds / 1e9
    level, beside = OK, "no --link_gbps to compare it with"
    if job.link_gbps is not None:
        share = 8 * job.bus_gb_per_s / job.link_gbps
        level = OK if share >= LOW_SHARE else WARNING if share >= HOPELESS_SHARE else ERROR
        beside = f"{share:.0%} of --link_gbps {job.link_gbps:g}"
    return level, (
        f"{num_bytes / 1e9:.3g} GB over {num_ranks} ranks on {job.ranks.num_nodes} nodes in "
        f"{seconds:.3g} s: bus bandwidth {job.bus_gb_per_s:.3g} GB/s, {beside}"
    )


def compare_nodes(nodes: Sequence[Mapping[str, Finding]], gpus: Sequence[str]) -> tuple[str, str]:
    """Compare findings by check and GPUs of the nodes; return a finding's level and text."""
    facts = {name: {node[name].found for node in nodes} for name in ("software", "driver")}
    different = [name for name, values in (facts | {"GPUs": set(gpus)}).items() if len(values) > 1]
    kinds = "; ".join(sorted(set(gpus)))
    if different:
        return WARNING, f"they differ in {', '.join(different)}; GPUs: {kinds}"
    if len(nodes) == 1:
        return SKIPPED, "a single node"
    return OK, f"software, driver and GPUs of {len(nodes)} nodes"
