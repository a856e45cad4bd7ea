"""Has this node the software, the memory and the processors that the job needs?"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sdbench.doctor.finding import OK, Finding, error, join, number_of, ok, show_bytes, warning
from sdbench.doctor.gpus import count_gpus
from sdbench.doctor.job import Job
from sdbench.record.provenance import PACKAGES, git_state, package_versions

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
# Without these no run begins; each of the others is needed for some flag.
REQUIRED = frozenset(
    {"torch", "torchvision", "mosaicml", "mosaicml-streaming", "diffusers", "transformers"}
    | {"numpy", "pillow"}
)
# Bytes that training a weight in fp32 holds: weight, gradient and AdamW's two moments.
BYTES_PER_TRAINED_WEIGHT, BYTES_PER_FROZEN_WEIGHT = 16, 4
CGROUPS = Path("/sys/fs/cgroup")


def check_software(job: Job) -> Finding:
    """Whether the packages are there, in the versions that requirements.txt pins."""
    versions, pins = package_versions(), read_pins()
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    state = git_state()
    commit = f", commit {state['commit'][:10]}" if state["commit"] else ""
    found = f"{shown}{commit}{' with changes' if state['dirty'] else ''}"

    missing = [name for name in PACKAGES if name in pins and versions[name] is None]
    others = [
        f"{name} {versions[name]} where {pins[name]} is pinned"
        for name in PACKAGES
        if name in pins and versions[name] and _release(versions[name]) != pins[name]
    ]
    findings = [ok(found)]
    if missing:
        judge = error if REQUIRED & set(missing) else warning
        findings.append(
            judge(f"not installed: {', '.join(missing)}", "pip install -r requirements.txt")
        )
    if others:
        findings.append(
            warning(
                ", ".join(others),
                "pip install -r requirements.txt, or compare figures of these versions only",
            )
        )
    return join(findings)


def _release(version: str) -> str:
    """A version without the build that some carry: 2.7.0 of 2.7.0+cu126."""
    return version.partition("+")[0]


def read_pins() -> dict[str, str]:
    """Package to pinned version; empty where the suite has come without requirements.txt."""
    if not REQUIREMENTS.is_file():
        return {}
    text = REQUIREMENTS.read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)$", text, flags=re.MULTILINE))


def check_host_memory(job: Job) -> Finding:
    """Whether the ranks of this node find room in main memory."""
    import psutil

    memory = psutil.virtual_memory()
    limit_bytes = read_memory_limit()
    available_bytes = memory.available
    found = f"{show_bytes(available_bytes)} of {show_bytes(memory.total)} free"
    if limit_bytes is not None and limit_bytes < memory.total:
        available_bytes = min(available_bytes, limit_bytes)
        found += f", {show_bytes(limit_bytes)} allowed to this container or job"
    if job.model is None:
        return ok(found)
    num_ranks = job.ranks_per_node
    weights_bytes = 4 * job.model.num_parameters * num_ranks
    training_bytes = num_ranks * (
        BYTES_PER_TRAINED_WEIGHT * job.model.num_trainable
        + BYTES_PER_FROZEN_WEIGHT * (job.model.num_parameters - job.model.num_trainable)
    )
    advice = (
        "end other processes, raise the limit (docker run --memory, the pod's limit, sbatch "
        "--mem), or start fewer ranks on a node"
    )
    if available_bytes < weights_bytes:
        return error(
            f"{found}; the weights alone take {show_bytes(weights_bytes)} in "
            f"{number_of(num_ranks, 'rank')}",
            advice,
        )
    if available_bytes < training_bytes and not count_gpus():
        return warning(
            f"{found}; weights, gradients and moments in fp32 take "
            f"{show_bytes(training_bytes)} in {number_of(num_ranks, 'rank')}",
            advice,
        )
    return ok(found)


def read_memory_limit() -> int | None:
    """Bytes that this process and its neighbours may take together, as cgroups (version 2) say."""
    try:
        text = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    own = re.search(r"^0::/(.*)$", text, flags=re.MULTILINE)
    if own is None:
        return None
    folder = CGROUPS / own[1]
    limits = []
    for group in (folder, *folder.parents):
        if not group.is_relative_to(CGROUPS):
            break
        file = group / "memory.max"
        if file.is_file() and (content := file.read_text().strip()).isdecimal():
            limits.append(int(content))
    return min(limits, default=None)


def check_threads(job: Job) -> Finding:
    """Whether ranks and loaders have processors to run on."""
    import psutil

    num_cores = len(psutil.Process().cpu_affinity()) or psutil.cpu_count()
    num_ranks = job.ranks_per_node
    given = os.environ.get("OMP_NUM_THREADS", "")
    shown = f"OMP_NUM_THREADS={given}" if given else "OMP_NUM_THREADS is not set"
    shared = f"{number_of(num_cores, 'core')} for {number_of(num_ranks, 'rank')}"
    found = f"{shared}, {shown}"
    findings = []
    if num_cores < num_ranks:
        findings.append(
            warning(
                shared,
                "give each task its cores: srun --cpus-per-task, docker run --cpuset-cpus",
            )
        )
    num_workers = job.model.num_workers if job.model else 0
    if num_workers * num_ranks > num_cores:
        findings.append(
            warning(
                f"{number_of(num_workers * num_ranks, 'loader process')} on "
                f"{number_of(num_cores, 'core')}",
                f"--num_workers {max(1, num_cores // num_ranks)}, or more cores for each task",
            )
        )
    # torchrun sets 1 where nobody has set anything, and benchmark.py then takes no notice of it.
    if given.isdecimal() and not (given == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        findings.append(_check_given_threads(int(given), num_cores, num_ranks))
    bad = [finding for finding in findings if finding.level != OK]
    return join([*bad, ok(found)]) if bad else ok(found)


def _check_given_threads(num_threads: int, num_cores: int, num_ranks: int) -> Finding:
    share = max(1, num_cores // num_ranks)
    advice = f"unset OMP_NUM_THREADS, or set it to {share}"
    if num_threads * num_ranks > max(num_cores, num_ranks):
        return warning(
            f"{num_threads * num_ranks} threads of {number_of(num_ranks, 'rank')} on "
            f"{number_of(num_cores, 'core')}",
            advice,
        )
    if num_threads < share and not count_gpus():
        return warning(f"OMP_NUM_THREADS={num_threads} of {share} cores that a rank has", advice)
    return ok("")
