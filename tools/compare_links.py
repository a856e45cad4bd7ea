"""Times steps over links of limited speed and compares them with an ideal all-reduce.

    python tools/compare_links.py --repeats 3 --output comparison.json

Weak scaling over nodes of one rank each: network namespaces of this machine with an address each,
joined by a bridge, whose links are left free or are held to a rate in both directions. Root only.
The nodes share this machine's cores, so that more of them compute more slowly; what is compared is
the time that a link adds to the step on the same number of nodes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A script's own folder is on the path, the repository is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sdbench.measure import hardware
from sdbench.record import provenance
from sdbench.record.store import load_record
from sdbench.report.tables import Cell, Field, Table, tabulate, to_markdown
from tests.nodes import address_of, limit_links, make_nodes
from tools import comparison

# Work of a rank in a step of each model, and the number of measured steps.
WORK = {
    "tiny": {"image_size": 64, "device_batch": 4, "num_steps": 20},
    "small": {"image_size": 128, "device_batch": 2, "num_steps": 3},
}
NUMS_NODES = (1, 2, 4)
# Megabit a second; None is a link without a limit.
LINKS_MBIT = (None, 1000, 100)
PORT = 29500
TIMEOUT_S = 900


def run(names: Sequence[str], model: str, folder: Path) -> dict[str, Any]:
    """Run with a rank on each node and return the record."""
    work = WORK[model]
    results = folder / f"run-{len(list(folder.iterdir()))}"
    arguments = (
        f"--model_name {model} --image_size {work['image_size']} --use_synth_data "
        f"--batch_size {work['device_batch'] * len(names)} --engine torch --num_workers 0 "
        "--num_threads 1 --no_measure_peak --profile_batches 0 --warmup_batches 1 "
        f"--max_warmup_batches 1 --measure_batches {work['num_steps']} --results_dir {results}"
    )
    program = str(comparison.ROOT / "multi-node" / "start-ranks.sh")
    command = [program, *arguments.split()]
    processes = []
    for index, name in enumerate(names):
        environment = {
            **os.environ,
            "NUM_NODES": str(len(names)),
            "NODE_RANK": str(index),
            "NUM_GPUS_PER_NODE": "1",
            "MASTER_ADDR": address_of(0),
            "MASTER_PORT": str(PORT),
            "LAUNCHER": "torchrun",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env=environment,
                stdout=(folder / f"{name}.log").open("wb"),
                stderr=subprocess.STDOUT,
            )
        )
    exit_codes = [process.wait(TIMEOUT_S) for process in processes]
    if any(exit_codes):
        raise RuntimeError(f"{exit_codes}: see {folder}")
    (path,) = results.glob("*/record.json")
    return load_record(path)


def predict_added_s(num_bytes: int, *, num_nodes: int, rate_mbit: int) -> float:
    """The time of a ring all-reduce over the links, if the backward pass hides nothing.

    Each node sends (nodes - 1) / nodes of the bytes twice: to sum them, and to share the sums.
    """
    return 2 * 8 * num_bytes / (rate_mbit * 1e6) * (num_nodes - 1) / num_nodes


def summarize(result: dict[str, Any]) -> Table:
    """Make a row for each model, number of nodes and link of the result that `main` writes."""
    rows = []
    for model, cells in result["step_time_p50_s"].items():
        for cell, times_s in cells.items():
            nodes, link = cell.split()
            step_s = statistics.median(times_s)
            row = {
                "model": model,
                "nodes": int(nodes),
                "link": "no limit" if link == "free" else f"{link} Mbit/s",
                "step": Cell(f"{step_s:.3g} ({min(times_s):.3g} to {max(times_s):.3g})", step_s),
                "rate": result["work"][model]["device_batch"] * int(nodes) / step_s,
            }
            if link != "free":
                row["added_s"] = step_s - statistics.median(cells[f"{nodes} free"])
                row["predicted_s"] = predict_added_s(
                    result["gradient_bytes"][model], num_nodes=int(nodes), rate_mbit=int(link)
                )
                row["ratio"] = row["added_s"] / row["predicted_s"]
            rows.append(row)
    return tabulate(FIELDS, rows, name="links", caption="Steps over limited links")


FIELDS = (
    Field("model", "model"),
    Field("nodes", "nodes"),
    Field("link", "link"),
    Field("step, s (lowest to highest run)", "step"),
    Field("images/s", "rate", digits=3),
    Field("added by the link, s", "added_s", digits=3, unknown=""),
    Field("predicted, s", "predicted_s", digits=3, unknown=""),
    Field("measured / predicted", "ratio", digits=3, unknown=""),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as the command line says."""
    parser = comparison.make_parser(__doc__, repeats=3, output="JSON file")
    parser.add_argument("--models", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--nodes", nargs="+", type=int, default=NUMS_NODES, metavar="N")
    flags = parser.parse_args(argv)
    steps_s: dict[str, dict[str, list[float]]] = {model: {} for model in flags.models}
    gradient_bytes = {}
    folder = Path(tempfile.mkdtemp(prefix="links-"))
    print(f"logs: {folder}", file=sys.stderr)
    with make_nodes(max(flags.nodes)) as names:
        for repeat in range(flags.repeats):
            for model in flags.models:
                for num_nodes in flags.nodes:
                    for link in LINKS_MBIT if num_nodes > 1 else (None,):
                        limit_links(names, link)
                        record = run(names[:num_nodes], model, folder)
                        # Gradients in fp32, of the trainable weights alone.
                        gradient_bytes[model] = 4 * record["workload"]["num_trainable_parameters"]
                        step_s = record["summary"]["step_time_p50_s"]
                        cell = f"{num_nodes} {link or 'free'}"
                        steps_s[model].setdefault(cell, []).append(step_s)
                        print(f"{repeat + 1}: {model} {cell}: {step_s:.4f} s", file=sys.stderr)
    result = {
        "what": "median seconds of a step, by model and by nodes and Mbit/s of their links",
        "work": WORK,
        "gradient_bytes": gradient_bytes,
        "step_time_p50_s": steps_s,
        "machine": hardware.as_dict(hardware.inspect_machine()),
        "versions": provenance.package_versions(),
        "git": provenance.git_state(),
    }
    print(to_markdown(summarize(result)))
    comparison.write_json(flags.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
