"""Times the engines beside each other, or online preprocessing beside encoders in the step.

Runs benchmark.py once for each side, in turn and in fresh processes. Flags behind ``--`` are given
to all sides:

    python tools/compare_engines.py --repeats 5 --output engines.md -- \
        --model_name small --image_size 128 --batch_size 8 --use_synth_data --latents precomputed
    python tools/compare_engines.py --sides online --repeats 5 --warmup_batches 15 \
        --measure_batches 100 --output online.md -- \
        --model_name small --image_size 128 --batch_size 8 --remote my-pictures

The sides `online` are for two cores: a trainer that encodes has a thread on each; otherwise the
trainer and the encoder have one each, beside one decoder. About ten batches are prepared ahead of
the trainer: the window has to be many times as long.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# A script's own folder is on the path, the repository is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sdbench.launch.child import Outcome, run_child, tail
from sdbench.record.store import OK
from sdbench.report.tables import make_table, to_markdown
from sdbench.statistics.intervals import compare
from tools.comparison import ROOT, in_turn, make_parser, spread

DATA_WAIT = "waits for data, %"
BENCHMARK = str(ROOT / "benchmark.py")
# The flags of each side, by what is compared. The first side is the baseline of the ratios.
SIDES = {
    "engines": {name: ["--engine", name] for name in ("torch", "composer", "ray")},
    "online": {
        "encoders in the step": ["--engine", "ray", "--num_threads", "2"],
        "online preprocessing": [
            *["--engine", "ray", "--num_threads", "1", "--online_preprocessing"],
            *["--num_decoders", "1", "--num_encoders", "1"],
        ],
    },
}


def launcher_of(flags: Sequence[str], num_ranks: int) -> list[str]:
    """What starts the ranks: Ray itself, or torchrun where there are several."""
    if "ray" in flags:
        return [sys.executable, BENCHMARK, "--num_ray_workers", str(num_ranks)]
    if num_ranks == 1:
        return [sys.executable, BENCHMARK]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc_per_node", str(num_ranks), BENCHMARK]


def figures_of(outcome: Outcome) -> dict[str, float]:
    """Return the figures of a run, including the seconds of the command outside of the window."""
    summary = outcome.summary
    return {
        "images/s": summary["images_per_second"],
        "step time p50, s": summary["step_time_p50_s"],
        DATA_WAIT: summary["data_wait_percent"],
        "start-up, s": summary["startup"]["total_s"],
        "outside the window, s": outcome.duration_s - summary["window_s"],
    }


def format_report(runs: dict[str, list[Outcome]], *, flags: Sequence[str]) -> str:
    """Return medians with ranges, ratios to the first side with 95 % intervals, and the runs."""
    figures = {name: [figures_of(outcome) for outcome in of_side] for name, of_side in runs.items()}
    baseline = next(iter(figures))
    medians = [
        {
            "": name,
            "runs": len(rows),
            **{key: spread([row[key] for row in rows]) for key in rows[0]},
        }
        for name, rows in figures.items()
    ]
    # A wait of 0 has no ratio.
    compared = [key for key in figures[baseline][0] if key != DATA_WAIT]
    ratios = [
        {"": name, **{key: _ratio(rows, figures[baseline], key) for key in compared}}
        for name, rows in figures.items()
        if name != baseline
    ]
    records = [
        f"- {name}, {outcome.record['config']['num_threads']} threads: {outcome.run}"
        for name, of_side in runs.items()
        for outcome in of_side
    ]
    parts = [
        f"Flags of all sides: `{' '.join(flags)}`",
        "Median of the runs, with the least and the most:",
        to_markdown(make_table(medians)),
        f"Ratio to {baseline}, with its 95 % interval between runs:",
        to_markdown(make_table(ratios)),
        "Start-up is from the command to the first measured step; outside the "
        "window is all of the command but the measured steps. Runs:",
        "\n".join(records),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _ratio(rows: Sequence[dict[str, float]], others: Sequence[dict[str, float]], key: str) -> str:
    found = compare([row[key] for row in rows], [row[key] for row in others])
    if found.interval is None:
        return f"{found.ratio:.3f}"
    return f"{found.ratio:.3f} ({found.interval.low:.3f} to {found.interval.high:.3f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything, print the report, write it."""
    parser = make_parser(__doc__, repeats=3, output="markdown file", takes_flags=True)
    parser.add_argument("--sides", choices=SIDES, default="engines")
    parser.add_argument("--num_ranks", type=int, default=1)
    parser.add_argument("--warmup_batches", type=int, default=5)
    parser.add_argument("--measure_batches", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=None, help="for the runs (default: beside)")
    arguments = parser.parse_args(argv)
    folder = (arguments.folder or arguments.output.with_suffix("")).resolve()
    # A window of the same steps in each run, with nothing behind it.
    window = [f"--warmup_batches={arguments.warmup_batches}", "--profile_batches=0"]
    window += [f"--max_warmup_batches={arguments.warmup_batches}"]
    window += [f"--measure_batches={arguments.measure_batches}"]

    sides = SIDES[arguments.sides]
    runs: dict[str, list[Outcome]] = {name: [] for name in sides}
    for repeat, name in in_turn(sides, repeats=arguments.repeats):
        command = launcher_of(sides[name], arguments.num_ranks)
        command += [*sides[name], *window, *arguments.flags]
        place = folder / f"{repeat}_{name.replace(' ', '_')}"
        outcome = run_child(command, folder=place)
        if outcome.status != OK:
            sys.exit(f"{name}: {outcome.status}, {outcome.reason}\n{tail(place)}")
        runs[name].append(outcome)
        rate = outcome.summary["images_per_second"]
        print(f"repeat {repeat} of {arguments.repeats}: {name} {rate:.4g} images/s")
    text = format_report(runs, flags=arguments.flags)
    print(f"\n{text}")
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
