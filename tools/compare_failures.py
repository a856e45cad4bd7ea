"""Times what the death of a rank costs a training run, by who starts the rank again.

Trains once for each side, in turn and in fresh processes, and kills the rank (kill -9) behind a
checkpoint and some steps more. Flags behind ``--`` are given to all sides:

    python tools/compare_failures.py --repeats 3 --output failures.md -- \
        --model_name small --image_size 128 --batch_size 8 --use_synth_data --latents precomputed

The launcher `composer` starts no rank again: there the same command is given again at once.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script's own folder is on the path, the repository is not

from sdbench.record.store import load_record  # noqa: E402
from sdbench.report.tables import make_table, to_markdown  # noqa: E402

TRAIN = str(ROOT / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max_restarts", "1"]
SIDES = {
    "composer, started by hand": [
        *[sys.executable, "-m", "composer.cli.launcher", "-n", "1", TRAIN],
        *["--engine", "composer"],
    ],
    "torch, by torchrun": [*TORCHRUN, "--nproc_per_node", "1", TRAIN, "--engine", "torch"],
    "ray, by Ray Train": [
        *[sys.executable, TRAIN, "--engine", "ray"],
        *["--num_ray_workers", "1", "--max_failures", "1"],
    ],
}
SAVE_EVERY, KILL_AT, NUM_STEPS = 10, 17, 30
FIGURES = {
    "down_s": "without a rank, s",
    "lost_s": "steps trained again, s",
    "num_lost_steps": "steps trained again",
}
WAIT_S = 0.05


def find_rank(driver: subprocess.Popen[bytes]) -> psutil.Process:
    """The process of the only rank, below the one that was started."""
    for process in psutil.Process(driver.pid).children(recursive=True):
        command = process.cmdline()
        is_python = TRAIN in command and process.environ().get("RANK") == "0"
        if is_python or "RayTrainWorker" in " ".join(command):
            return process
    sys.exit("no process of the rank is found")


def num_steps_in(folder: Path) -> int:
    """Steps that the run has written down."""
    try:
        with (folder / "steps.csv").open(newline="") as file:
            return sum(1 for _ in csv.DictReader(file))
    except FileNotFoundError:
        return 0


def train(command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train, kill the rank, and wait for the end; the record."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("wb") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log)
        while num_steps_in(folder) < KILL_AT:
            if driver.poll() is not None:
                sys.exit(f"the run has ended: {log.name}")
            time.sleep(WAIT_S)
        find_rank(driver).kill()
        if driver.wait() != 0:  # nobody has started the rank again
            subprocess.run(command, stdout=log, stderr=log, check=True)
    record = load_record(folder)
    assert record["summary"]["num_restarts"] == 1 and num_steps_in(folder) == NUM_STEPS
    return record


def format_report(records: dict[str, list[dict[str, Any]]], *, flags: Sequence[str]) -> str:
    """Medians with their ranges."""
    rows = []
    for name, of_side in records.items():
        row: dict[str, Any] = {"": name, "runs": len(of_side)}
        for key, heading in FIGURES.items():
            values = [record["summary"][key] for record in of_side]
            row[heading] = (
                f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
            )
        rows.append(row)
    return (
        f"Flags of all sides: `{' '.join(flags)}`; a checkpoint every {SAVE_EVERY} of {NUM_STEPS} "
        f"steps, and a kill -9 of the rank behind step {KILL_AT}.\n\n"
        "Median of the runs, with the least and the most:\n\n"
        f"{to_markdown(make_table(rows))}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything, print the report, write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True, help="markdown file to write")
    parser.add_argument("flags", nargs="*", help="for all sides, behind --")
    arguments = parser.parse_args(argv)
    results = arguments.output.with_suffix("").resolve()
    fixed = ["--max_duration", f"{NUM_STEPS}ba", "--save_every_batches", str(SAVE_EVERY)]
    fixed += ["--log_every_batches", "1", "--resume", "auto", "--results_dir", str(results)]
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for repeat in range(arguments.repeats):
        for name, command in SIDES.items():
            run_name = f"{repeat + 1}_{name.partition(',')[0]}"
            whole = [*command, *fixed, "--run_name", run_name, *arguments.flags]
            records[name].append(train(whole, results / run_name))
            print(f"repeat {repeat + 1} of {arguments.repeats}: {name}", flush=True)
    text = format_report(records, flags=arguments.flags)
    print(f"\n{text}")
    arguments.output.write_text(f"{text.strip()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
