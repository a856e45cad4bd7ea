"""Times what the death of a rank costs a training run, by who starts the rank again.

Trains once for each side, in turn and in fresh processes, and kills the rank (kill -9) some steps
after a checkpoint. Flags behind ``--`` are given to all sides:

    python tools/compare_failures.py --repeats 3 --output failures.md -- \
        --model_name small --image_size 128 --batch_size 8 --use_synth_data --latents precomputed

The launcher `composer` starts no rank again: there the same command is given again at once.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

# A script's own folder is on the path, the repository is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sdbench.record.store import load_record
from sdbench.report.tables import make_table, to_markdown
from tools.comparison import ROOT, in_turn, make_parser, spread

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
    """Return the process of the only rank, a descendant of the driver."""
    for process in psutil.Process(driver.pid).children(recursive=True):
        command = process.cmdline()
        is_python = TRAIN in command and process.environ().get("RANK") == "0"
        if is_python or "RayTrainWorker" in " ".join(command):
            return process
    sys.exit("no process of the rank is found")


def num_steps_in(folder: Path) -> int:
    """Return the number of steps that the run has recorded."""
    try:
        with (folder / "steps.csv").open(newline="") as file:
            return sum(1 for _ in csv.DictReader(file))
    except FileNotFoundError:
        return 0


def train(command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train, kill the rank, wait for the end, and return the record."""
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
    """Return medians with their ranges."""
    rows = [
        {
            "": name,
            "runs": len(of_side),
            **{
                heading: spread([record["summary"][key] for record in of_side])
                for key, heading in FIGURES.items()
            },
        }
        for name, of_side in records.items()
    ]
    return (
        f"Flags of all sides: `{' '.join(flags)}`; a checkpoint every {SAVE_EVERY} of {NUM_STEPS} "
        f"steps, and a kill -9 of the rank behind step {KILL_AT}.\n\n"
        "Median of the runs, with the least and the most:\n\n"
        f"{to_markdown(make_table(rows))}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything, print the report, write it."""
    parser = make_parser(__doc__, repeats=3, output="markdown file", takes_flags=True)
    arguments = parser.parse_args(argv)
    results = arguments.output.with_suffix("").resolve()
    fixed = ["--max_duration", f"{NUM_STEPS}ba", "--save_every_batches", str(SAVE_EVERY)]
    fixed += ["--log_every_batches", "1", "--resume", "auto", "--results_dir", str(results)]
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for repeat, name in in_turn(SIDES, repeats=arguments.repeats):
        run_name = f"{repeat}_{name.partition(',')[0]}"
        command = [*SIDES[name], *fixed, "--run_name", run_name, *arguments.flags]
        records[name].append(train(command, results / run_name))
        print(f"repeat {repeat} of {arguments.repeats}: {name}", flush=True)
    text = format_report(records, flags=arguments.flags)
    print(f"\n{text}")
    arguments.output.write_text(f"{text.strip()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
