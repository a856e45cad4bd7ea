"""The command `python -m sdbench doctor`, which checks each node of a job before it begins."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from sdbench.base.errors import EXIT_INTERRUPTED
from sdbench.base.output import results_only_on_stdout, terminal_width
from sdbench.base.stop import STOPS
from sdbench.data import resolve_format
from sdbench.doctor import collective, gpus, machine, network_cards, speed
from sdbench.doctor.finding import ERROR, OK, Check, Job, bounded, is_stuck, join, settle
from sdbench.doctor.printout import make_line, make_report, merge, to_json, to_text
from sdbench.ranks.distributed import connect, gather
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.kinds import POSITIVE_NUMBER, SECONDS, SWITCH
from sdbench.settings.request import parse
from sdbench.settings.setting import setting

DESCRIPTION = """\
Check this machine, or each node of a job, before an expensive job begins. Each line is ok, skipped,
a warning or an error, with what was found and what to do about it. Takes the flags of the job, as
benchmark.py does, and flags of its own.
"""

EPILOG = """\
examples:
  python -m sdbench doctor
  torchrun --nproc_per_node 8 -m sdbench doctor --remote s3://bucket/pairs
      with an all-reduce between the GPUs of this machine
  srun --ntasks-per-node=1 python -m sdbench doctor --strict
      on each node of a Slurm job, with an all-reduce between the nodes
  python -m sdbench doctor --json > doctor.json
      the same for a program, without host names
  torchrun --nproc_per_node gpu -m sdbench doctor --speed > node.txt
      with the rates of each GPU, and verdicts on them

exit codes: 0 no error, 1 an error (with --strict also a warning), 2 bad input, 130 stopped; under
torchrun any failure is 1
"""
# The GPUs come first, before other checks open a context on them.
CHECKS = [
    one
    for module in (gpus, network_cards, machine)
    for one in vars(module).values()
    if isinstance(one, Check)
]
CONNECT = (
    "start all ranks within --timeout_s of each other, and let every node reach MASTER_ADDR at "
    "MASTER_PORT and the others at any port (security group, firewall, GLOO_SOCKET_IFNAME)"
)
TOGETHER = {
    "nodes alike": "start all nodes from one image and of one kind: the slowest sets the pace",
    "all-reduce": "NCCL_DEBUG=INFO says which network NCCL takes and why; look at the lines about "
    "the network, at other jobs on it, and raise --timeout_s if it is only slow",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorSettings(BenchmarkConfig):
    """Settings of doctor: its own, and those of the job."""

    strict: bool = setting(
        SWITCH, False, "let warnings count as errors in the exit code", is_everyday=True
    )
    speed: bool = setting(
        SWITCH,
        False,
        "measure GPUs or cores (products, memory, copies), and compare them with others",
        is_everyday=True,
    )
    timeout_s: float = setting(
        SECONDS,
        30.0,
        "seconds that a check or a measurement may take, and that ranks wait for each other",
        is_everyday=True,
    )
    link_gbps: float | None = setting(
        POSITIVE_NUMBER,
        None,
        "nominal speed of the link between the ranks in Gbit/s, to compare the all-reduce with",
        is_everyday=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks, print the report and return the exit code.

    The first rank has the verdict; the others end with 0 when it has their results.
    """
    request = parse(
        DoctorSettings,
        argv,
        prog="python -m sdbench doctor",
        description=DESCRIPTION,
        epilog=EPILOG,
        takes_file=True,
        answers_json=True,
    )
    flags = request.config
    if flags.data_format != "auto":  # else it is detected at the place, which may not answer
        resolve_format(flags)
    job = Job(
        ranks=collective.find_ranks(),
        request=request.part(BenchmarkConfig),
        timeout_s=flags.timeout_s,
        link_gbps=flags.link_gbps,
        with_speed=flags.speed,
    )
    exit_code = 0
    try:
        with results_only_on_stdout():
            examined = examine(job)
        if examined is not None:
            lines, hosts, measured = examined
            report = make_report(
                lines,
                speed=measured,
                model_name=flags.model_name,
                hosts=hosts,
                num_ranks=job.ranks.world_size,
                strict=flags.strict,
            )
            as_text = to_text(report, hosts=hosts, width=terminal_width())
            text = to_json(report, hosts=hosts) if request.json else as_text
            # A rank that cannot reach the first one must not write into its output.
            print(text, file=sys.stdout if job.ranks.rank == 0 else sys.stderr, flush=True)
            exit_code = int(report["status"] == "error")
    except STOPS:
        exit_code = EXIT_INTERRUPTED
    if is_stuck() or job.ranks.world_size > 1:
        # A hanging check or rank would keep the interpreter from ending.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def examine(job: Job) -> tuple[list[dict[str, Any]], list[str], dict[str, Any] | None] | None:
    """Check this node, and all nodes with the other ranks; return lines, hosts and rates.

    The rates are None if the job does not ask for them. The first rank, or a rank that cannot reach
    the others, returns this; other ranks return None.
    """
    ranks = job.ranks
    own: dict[str, Any] = {}
    try:
        # A collective waits for the slowest node.
        num_waits = len(CHECKS) + 1 + job.with_speed * speed.MAX_MEASUREMENTS
        patience_s = num_waits * job.timeout_s
        connect(ranks, device_type="cpu", timeout_s=job.timeout_s, patience_s=patience_s)
        own = _look(job)
        everyone = gather(own, ranks)
        firsts = everyone[:: ranks.local_world_size]
        on_gpus = all(one["device_type"] == "cuda" for one in everyone)
        together = {
            "nodes alike": collective.compare_nodes(
                [first["findings"] for first in firsts], [first["gpus"] for first in firsts]
            ),
            "all-reduce": collective.time_all_reduce(
                job,
                device_type="cuda" if on_gpus else "cpu",
                num_values=everyone[0]["num_trainable"],
            ),
        }
        if ranks.rank != 0:
            return None
        met = (OK, f"{ranks.world_size} of {ranks.world_size} are here")
    except RuntimeError as problem:  # also torch's, for a connection that fails
        # benchmark.py has another name for the bound.
        first_line = str(problem).partition("\n")[0]
        met = (ERROR, first_line.replace("--dist_timeout", "--timeout_s"))
        firsts, together = [own or _look(job)], {}
    lines = [
        make_line("ranks", join([met], advice=CONNECT)),
        *merge([first["findings"] for first in firsts]),
        *(make_line(name, join([seen], advice=TOGETHER[name])) for name, seen in together.items()),
    ]
    measured = None
    if job.with_speed:
        # A rank that cannot reach the first of its node has measured nothing.
        nodes = [first["speed"] for first in firsts if first["speed"] is not None]
        measured = speed.report_speed(nodes, job)
        lines.append(make_line("speed", join(speed.look(measured, nodes), advice=speed.ADVICE)))
    return lines, [first["host"] for first in firsts], measured


def _look(job: Job) -> dict[str, Any]:
    """Return the results of this rank; the first rank of a node runs the checks of the node."""
    import torch

    checks = CHECKS if job.ranks.local_rank == 0 else ()
    findings = {check.name: settle(check, job) for check in checks}
    has_gpu = False
    with contextlib.suppress(TimeoutError):  # the line about the driver reports it
        has_gpu = bounded(torch.cuda.is_available, timeout_s=job.timeout_s)
    return {
        "host": socket.gethostname(),
        "findings": findings,
        "gpus": gpus.describe_gpus(gpus.read_gpus()),
        "device_type": "cuda" if has_gpu else "cpu",
        "num_trainable": job.num_trainable,
        # The last of the rank, when all others of the node wait.
        "speed": speed.measure_node(job) if checks and job.with_speed else None,
    }
