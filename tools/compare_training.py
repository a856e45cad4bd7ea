"""Times train.py beside benchmark.py on the same settings: the cost of logs and checkpoints.

Runs both in turn, in fresh processes. Flags behind ``--`` are given to both:

    python tools/compare_training.py --repeats 3 --output training.json -- \
        --model_name small --image_size 128 --batch_size 8
"""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A script's own folder is on the path, the repository is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sdbench.record.store import load_record
from sdbench.statistics.intervals import compare
from tools.comparison import ROOT, in_turn, launch, make_parser, write_json

# Steps from one line of figures of train.py to the next.
PERIOD = 5
FIXED = ("--use_synth_data", "--engine=torch")


def run_benchmark(flags: Sequence[str], folder: Path, *, warmup: int, measured: int) -> float:
    """Return images/s of benchmark.py's measured window."""
    lengths = [f"--warmup_batches={warmup}", f"--measure_batches={measured}"]
    # A window of the same steps in each run, with nothing behind it.
    fixed = [f"--max_warmup_batches={warmup}", "--profile_batches=0"]
    launch("benchmark.py", *flags, *lengths, *fixed, *FIXED, f"--results_dir={folder}")
    (path,) = folder.glob("*/record.json")
    return load_record(path)["summary"]["images_per_second"]


def run_training(flags: Sequence[str], folder: Path, *, warmup: int, measured: int) -> float:
    """Return images/s of the same steps of train.py, by the rates in its steps.csv."""
    lengths = [f"--max_duration={warmup + measured}ba", f"--log_every_batches={PERIOD}"]
    launch("train.py", *flags, *lengths, *FIXED, f"--results_dir={folder}", "--run_name=run")
    with (folder / "run" / "steps.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) > warmup]
    assert len(rows) == measured
    return statistics.harmonic_mean([float(row["images_per_second"]) for row in rows])


PROGRAMS = {"benchmark": run_benchmark, "train": run_training}


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything, print the rates and their ratio, write the JSON file."""
    parser = make_parser(__doc__, repeats=3, output="JSON file", takes_flags=True)
    parser.add_argument("--warmup_batches", type=int, default=PERIOD)
    parser.add_argument("--measure_batches", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "compare_training")
    arguments = parser.parse_args(argv)
    steps = {"warmup": arguments.warmup_batches, "measured": arguments.measure_batches}
    if any(number % PERIOD for number in steps.values()):
        parser.error(f"both numbers of batches have to be multiples of {PERIOD}")

    rates: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for repeat, name in in_turn(PROGRAMS, repeats=arguments.repeats):
        folder = arguments.folder.resolve() / f"{name}_{repeat}"
        rate = PROGRAMS[name](arguments.flags, folder, **steps)
        rates[name].append(rate)
        print(f"repeat {repeat} of {arguments.repeats}: {name} {rate:.4g} images/s")
    comparison = compare(rates["train"], rates["benchmark"])
    content: dict[str, Any] = {"flags": arguments.flags, **steps, "images_per_second": rates}
    content["train_against_benchmark"] = dataclasses.asdict(comparison)
    print(json.dumps(content["train_against_benchmark"]))
    write_json(arguments.output, content)


if __name__ == "__main__":
    main()
