"""Times `--preset seed` and `--preset fast` beside an independent loop of the recipe.

Runs the reference loop and the two presets in turn, in fresh processes, on sd2-base at 256 px,
global batch 2, micro-batch 2, no EMA. It takes about five minutes a run on two cores:

    python tools/compare_presets.py --repeats 3 --output comparison.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A script's own folder is on the path, the repository is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sdbench.record.store import load_record
from sdbench.statistics.intervals import Comparison, compare
from tools.comparison import ROOT, in_turn, launch, make_parser, write_json

BATCH_SIZE = 2
WORKLOAD = ["--image_size", "256", "--batch_size", str(BATCH_SIZE)]
WORKLOAD += ["--device_train_microbatch_size", "2"]
PROGRAMS = {
    "reference": ["tests/reference/diffusion_benchmark_loop.py", *WORKLOAD],
    "seed": ["benchmark.py", "--use_synth_data", "--preset", "seed", *WORKLOAD],
    "fast": ["benchmark.py", "--use_synth_data", "--preset", "fast", *WORKLOAD],
}
COMPOSER = ("-m", "composer.cli.launcher", "-n", "1")
PAIRS = (("seed", "reference"), ("fast", "seed"), ("fast", "reference"))


def run_reference(flags: Sequence[str]) -> dict[str, Any]:
    """Run the reference loop and return the figures, the JSON line of its output."""
    output = launch(*COMPOSER, *PROGRAMS["reference"], *flags)
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    return json.loads(line)


def run_preset(name: str, flags: Sequence[str], *, results_dir: Path) -> dict[str, Any]:
    """Run the benchmark with a preset and return the figures of its record."""
    before = set(results_dir.glob("*/record.json"))
    launch(*COMPOSER, *PROGRAMS[name], *flags, "--results_dir", str(results_dir))
    (path,) = set(results_dir.glob("*/record.json")) - before
    return {"run": path.parent.name, **load_record(path)["summary"]}


def compare_medians(runs: Sequence[dict[str, Any]], name: str, baseline: str) -> Comparison:
    """Compare the rates of the runs' median step times."""
    rates = {
        program: [BATCH_SIZE / run["step_time_p50_s"] for run in runs if run["program"] == program]
        for program in (name, baseline)
    }
    return compare(rates[name], rates[baseline])


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything, print the ratios, write the JSON file."""
    parser = make_parser(__doc__, repeats=3, output="JSON file")
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--warmup_batches", type=int, default=2)
    parser.add_argument("--measure_batches", type=int, default=10)
    parser.add_argument("--results_dir", type=Path, default=ROOT / "runs")
    arguments = parser.parse_args(argv)
    names = ("num_workers", "warmup_batches", "measure_batches")
    settings = {name: getattr(arguments, name) for name in names}
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    results_dir = arguments.results_dir.resolve()

    runs: list[dict[str, Any]] = []
    for repeat, program in in_turn(PROGRAMS, repeats=arguments.repeats):
        print(f"repeat {repeat} of {arguments.repeats}: {program}", flush=True)
        if program == "reference":
            figures = run_reference(flags)
        else:
            figures = run_preset(program, flags, results_dir=results_dir)
        runs.append({"repeat": repeat, "program": program, **figures})

    comparisons = [
        {
            "program": name,
            "baseline": baseline,
            **dataclasses.asdict(compare_medians(runs, name, baseline)),
        }
        for name, baseline in PAIRS
    ]
    for row in comparisons:
        print(json.dumps(row))
    content = {"programs": PROGRAMS, "settings": settings, "runs": runs, "comparisons": comparisons}
    write_json(arguments.output, content)


if __name__ == "__main__":
    main()
