"""Times train.py beside benchmark.py on the same settings: what being kept costs a run.

Runs both in turn, in fresh processes; which is first changes with each repeat. Flags behind ``--``
are given to both:

    python tools/compare_training.py --repeats 3 --output training.json -- \
        --model_name small --image_size 128 --batch_size 8
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script's own folder is on the path, the repository is not

from sdbench.record.store import load_record  # noqa: E402
from sdbench.statistics.intervals import compare  # noqa: E402

# Steps from one line of figures of train.py to the next.
PERIOD = 5


def run_benchmark(flags: Sequence[str], folder: Path, *, warmup: int, measured: int) -> float:
    """Images per second of benchmark.py's measured window."""
    lengths = [f"--warmup_batches={warmup}", f"--measure_batches={measured}"]
    # A window of the same steps in each run, with nothing behind it.
    fixed = [f"--max_warmup_batches={warmup}", "--profile_batches=0"]
    _launch(["benchmark.py", *flags, *lengths, *fixed, f"--results_dir={folder}"])
    (path,) = folder.glob("*/record.json")
    return load_record(path)["summary"]["images_per_second"]


def run_training(flags: Sequence[str], folder: Path, *, warmup: int, measured: int) -> float:
    """Images per second of the same steps of train.py, by the rates in its steps.csv."""
    lengths = [f"--max_duration={warmup + measured}ba", f"--log_every_batches={PERIOD}"]
    _launch(["train.py", *flags, *lengths, f"--results_dir={folder}", "--run_name=run"])
    with (folder / "run" / "steps.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) > warmup]
    assert len(rows) == measured
    return statistics.harmonic_mean([float(row["images_per_second"]) for row in rows])


PROGRAMS = {"benchmark": run_benchmark, "train": run_training}


def _launch(arguments: Sequence[str]) -> None:
    command = [sys.executable, *arguments, "--use_synth_data", "--engine=torch"]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if result.returncode != 0:
        sys.exit(f"exit {result.returncode}: {' '.join(command)}\n{result.stdout}{result.stderr}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything, print the rates and their ratio, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup_batches", type=int, default=PERIOD)
    parser.add_argument("--measure_batches", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "compare_training")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("flags", nargs="*", help="for both programs, behind --")
    arguments = parser.parse_args(argv)
    steps = {"warmup": arguments.warmup_batches, "measured": arguments.measure_batches}
    if any(number % PERIOD for number in steps.values()):
        parser.error(f"both numbers of batches have to be multiples of {PERIOD}")

    rates: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for repeat in range(arguments.repeats):
        for name in list(PROGRAMS)[:: -1 if repeat % 2 else 1]:
            folder = arguments.folder.resolve() / f"{name}_{repeat + 1}"
            rate = PROGRAMS[name](arguments.flags, folder, **steps)
            rates[name].append(rate)
            print(f"repeat {repeat + 1} of {arguments.repeats}: {name} {rate:.4g} images/s")
    comparison = compare(rates["train"], rates["benchmark"])
    content: dict[str, Any] = {"flags": arguments.flags, **steps, "images_per_second": rates}
    content["train_against_benchmark"] = dataclasses.asdict(comparison)
    print(json.dumps(content["train_against_benchmark"]))
    arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
