"""The command `python -m sdbench submit`: measures on several numbers of nodes of Slurm.

It submits multi-node/2.train.sbatch once for each number of nodes and each repeat, waits for the
jobs, and shows their throughput in a table.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError, RunError
from sdbench.launch.child import ROOT, check_suite_is_here, refuse_flag, values_of
from sdbench.launch.runs import in_rounds, new_folder
from sdbench.record.configuration import group
from sdbench.record.store import FAILED, OK, RECORD_NAME, load_record
from sdbench.report.tables import Cell, Table, make_table, to_terminal
from sdbench.report.terminal import format_rates
from sdbench.settings.config import SETTINGS
from sdbench.settings.kinds import PATH, POSITIVE, REPEATS, list_of, one_of
from sdbench.settings.request import parse
from sdbench.settings.setting import setting

SCRIPT = "multi-node/2.train.sbatch"
POLL_S = 5.0
EPILOG = """\
examples:
  python -m sdbench submit --nodes 1,2,4 --repeats 5 -- --device_train_microbatch_size 32
      the global batch stays 2048 on any number of nodes: strong scaling
  python -m sdbench submit --nodes 1,2,4 --scaling weak -- --batch_size 2048
      2048 images on 1 node, 4096 on 2, 8192 on 4: weak scaling
  python -m sdbench submit --folder runs/submit_20261121T050000Z
      go on waiting for the jobs of that folder, and show their table

What follows -- goes to benchmark.py; sbatch itself reads SBATCH_PARTITION, SBATCH_TIMELIMIT and so
on. After Ctrl-C the jobs go on in the cluster. The exit code is 1 if a job left no good record.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubmitFlags:
    """Flags of submit."""

    nodes: tuple[int, ...] = setting(list_of(POSITIVE), (), "numbers of nodes, e.g. 1,2,4")
    repeats: int = setting(REPEATS, 3, "jobs for each number of nodes")
    scaling: str = setting(
        one_of("strong", "weak"),
        "strong",
        "weak: --batch_size is for the fewest nodes and grows with them",
    )
    folder: Path | None = setting(PATH, None, "folder of the jobs (default: runs/submit_<time>)")


def main(argv: Sequence[str] | None = None) -> int:
    """Submit, wait and show the result; returns the exit code."""
    request = parse(
        SubmitFlags,
        argv,
        prog="python -m sdbench submit",
        description="Measure on several numbers of nodes of a Slurm cluster.",
        epilog=EPILOG,
        rest="ARGUMENTS of benchmark.py",
    )
    flags = request.config
    folder = flags.folder
    if folder is None or not any(folder.glob("nodes-*")):
        folder = _submit(flags, request.rest)
    _wait(folder)
    ended_well, failures = _collect(folder)
    if ended_well:
        table = tabulate_nodes(ended_well)
        print(f"\n{table.caption}\n{to_terminal(table)}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    print(f"\njobs: {folder}")
    return 1 if failures else 0


def tabulate_nodes(records: Sequence[dict[str, Any]]) -> Table:
    """Throughput of good runs by number of nodes.

    The efficiency is images/s of a rank over images/s of a rank on the fewest nodes.
    """
    by_nodes = group(records, key_of=lambda record: record["ranks"]["num_nodes"])
    rows, base = [], None
    for num_nodes, runs in sorted(by_nodes.items()):
        summaries = [run["summary"] for run in runs]
        per_rank = statistics.mean(one["images_per_second_per_device"] for one in summaries)
        base = base or per_rank
        flags = sorted({flag for one in summaries for flag in one.get("flags", [])})
        rows.append(
            {
                "nodes": num_nodes,
                "ranks": runs[0]["ranks"]["world_size"],
                "global batch": runs[0]["config"]["batch_size"],
                "runs": len(runs),
                "images/s": Cell(format_rates(summaries), per_rank),
                "efficiency, %": 100 * per_rank / base,
                "notes": ", ".join(flags),
            }
        )
    return make_table(rows, name="nodes", caption=describe_scaling(records))


def describe_scaling(records: Sequence[dict[str, Any]]) -> str:
    """Strong or weak scaling, as the global batches say."""
    batches = {record["config"]["batch_size"] for record in records}
    shares = {record["config"]["batch_size"] / record["ranks"]["world_size"] for record in records}
    if len(batches) == 1:
        return f"Strong scaling: a global batch of {batches.pop()} shared by all ranks"
    of_ranks = " or ".join(f"{share:g}" for share in sorted(shares))
    return f"Weak scaling: {of_ranks} images per rank and step"


def _submit(flags: SubmitFlags, arguments: Sequence[str]) -> Path:
    """Submit a job for each number of nodes and each repeat; `arguments` are for benchmark.py."""
    batch_size = _check(flags, arguments)
    folder = new_folder(flags.folder, prefix="submit").resolve()
    runs = in_rounds(flags.nodes, times=flags.repeats)
    for repeat, num_nodes in runs:
        run_folder = folder / f"nodes-{num_nodes}_run-{repeat}"
        run_folder.mkdir()
        command = ["sbatch", f"--nodes={num_nodes}", f"--output={run_folder}/output.log"]
        command += [f"--job-name={folder}", str(ROOT / SCRIPT), *arguments]
        command += ["--results_dir", str(run_folder)]
        if batch_size is not None:  # the last one counts
            command += ["--batch_size", str(batch_size * num_nodes // min(flags.nodes))]
        _run(command)
    print(
        f"submitted {len(runs)} jobs, which a Ctrl-C here does not stop: python -m sdbench submit "
        f"--folder {folder} waits for them again"
    )
    return folder


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, cwd=(ROOT / SCRIPT).parent, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunError(f"{' '.join(command[:2])} has failed: {done.stderr.strip()}")
    return done.stdout


def _check(flags: SubmitFlags, arguments: Sequence[str]) -> int | None:
    """Find mistakes; returns the global batch on the fewest nodes if it grows with the nodes."""
    check_suite_is_here(SCRIPT, folder=ROOT)
    if not flags.nodes:
        raise ConfigError(
            "the numbers of nodes are missing",
            value="",
            allowed="numbers of nodes, or --folder with the jobs of an earlier start",
            flag="--nodes",
        )
    why = "each job gets a folder of its own"
    refuse_flag("--results_dir", arguments, why=why, flag="--folder")
    batch_size = None
    if flags.scaling == "weak":
        given = values_of(arguments, "--batch_size")
        if not given:
            raise ConfigError(
                "weak scaling needs the global batch on the fewest nodes",
                value=" ".join(arguments),
                allowed="--batch_size N after --",
                flag="--batch_size",
            )
        batch_size = SETTINGS["batch_size"].parse(given[-1])
        smallest = min(flags.nodes)
        uneven = [num_nodes for num_nodes in flags.nodes if num_nodes % smallest]
        if uneven:
            raise ConfigError(
                "the global batch cannot grow in proportion",
                value=uneven[0],
                allowed=f"multiples of {smallest} nodes",
                flag="--nodes",
            )
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "this machine is not part of a Slurm cluster",
            value="no sbatch on PATH",
            allowed="a login or head node",
            flag="PATH",
        )
    return batch_size


def _wait(folder: Path) -> None:
    """Wait until Slurm has ended every job; they have the name of the folder."""
    left = None
    while left != 0:
        before, names = left, _run(["squeue", "--me", "--noheader", "--format=%j"]).splitlines()
        left = names.count(str(folder.resolve()))
        if left != before:
            print(f"{left} jobs have not ended", flush=True)
        if left:
            time.sleep(POLL_S)


def _collect(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Records of good runs, and a sentence for each job without one."""
    ended_well, failures = [], []
    for job in sorted(folder.glob("nodes-*")):
        # A job that was started again has one for each start.
        paths = sorted(job.glob(f"*/{RECORD_NAME}"))
        try:
            last = load_record(paths[-1]) if paths else {"status": FAILED, "reason": "no record"}
        except (OSError, ValueError) as error:
            last = {"status": FAILED, "reason": f"its record cannot be read ({error})"}
        if last["status"] == OK:
            ended_well.append(last)
        else:
            failures.append(f"{last['status']}, {last['reason']} (see {job}/output.log)")
    return ended_well, failures
