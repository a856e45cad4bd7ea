"""Tries `python -m sdbench compare --losses` on faults of a training, or on speed-ups for GPUs.

Trains a miniature with 25 seeds, or 10, then with each change and the first five seeds, and prints
which changes are found: against the same seeds (in pairs), and against five others (by the spread
alone). Runs that are there already are not made again:

    python tools/try_loss_gate.py --folder runs/loss_gate
    python tools/try_loss_gate.py --folder runs/loss_gate --trial speed

It writes the means of the tenths of each run to losses.csv, or losses_speed.csv, in that folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from sdbench.analysis.compare_losses import OUTSIDE, compare_losses, make_loss_table  # noqa: E402
from sdbench.record.row import format_csv  # noqa: E402
from sdbench.report.runs import read_steps  # noqa: E402
from sdbench.report.tables import Table, make_table, to_markdown  # noqa: E402

NUM_STEPS, NUM_CHANGED = 300, 5
SAME_RECIPE = "the recipe"
TENTHS = [f"tenth_{number}" for number in range(1, 11)]
# What the VAE of SD3 multiplies its latents with; that of Flux.1: 0.3611.
OTHER_SCALE = 1.5305
FAULTS = {
    "times drawn logit-normal in place of uniform": ["--time_sampling", "logit_normal"],
    "times shifted by 3": ["--time_shift", "3"],
    f"scaling factor {OTHER_SCALE:g} of another VAE": ["--random_weights"],
    "learning rate 20 % higher": ["--lr", "1.2e-3"],
    "learning rate 20 % lower": ["--lr", "8e-4"],
    "bf16 without fp32 copies": ["--precision", "bf16", "--master_weights", "none"],
    # Changes that should pass.
    "no fault: bf16 with fp32 copies": ["--precision", "bf16", "--master_weights", "fp32"],
    "no fault: amp_bf16": ["--precision", "amp_bf16"],
    "no fault: micro-batches of 2": ["--device_train_microbatch_size", "2"],
    "no fault: engine composer": ["--engine", "composer"],
}
COPIES = ["--precision", "bf16", "--master_weights", "fp32"]
LAYOUT = ["--memory_format", "channels_last", "--keep_layout"]
NORM = ["--group_norm", "fused"]
# The levers of `make benchmark-gpu` that change the arithmetic of a step on latents.
SPEED_UPS = {
    "amp_bf16": ["--precision", "amp_bf16"],
    "bf16 with fp32 copies": COPIES,
    "layout kept": LAYOUT,
    "fused GroupNorm": NORM,
    "all three": [*COPIES, *LAYOUT, *NORM],
    "all three, compiled": [*COPIES, *LAYOUT, *NORM, "--compile", "unet"],
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """Changes of a recipe, and the seeds with which the recipe is trained."""

    model: str
    recipe: list[str]
    num_seeds: int
    table: str
    changes: dict[str, list[str]]


TRIALS = {
    "gate": Trial("tiny-flux", [], 25, "losses.csv", {SAME_RECIPE: [], **FAULTS}),
    "speed": Trial(
        "nano", ["--preset", "seed"], 10, "losses_speed.csv", {SAME_RECIPE: [], **SPEED_UPS}
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Make the runs, and print a table of the changes and the number of false alarms."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/loss_gate"))
    parser.add_argument("--trial", choices=TRIALS, default="gate")
    flags = parser.parse_args(argv)
    trial = TRIALS[flags.trial]
    folder, pictures = flags.folder / trial.model, flags.folder / "pictures"
    if not pictures.exists():
        _do("shapes", "--folder", str(pictures), "--num_train_images", "1000")
    means = []
    for number, (change, settings) in enumerate(trial.changes.items()):
        for seed in range(1, (trial.num_seeds if change == SAME_RECIPE else NUM_CHANGED) + 1):
            model, latents = trial.model, folder / "latents"
            if change.startswith("scaling"):
                model, latents = str(_with_other_scale(folder, model)), folder / "other_latents"
            if not latents.exists():
                encode = ["--model_name", model, *settings, "--remote", str(pictures / "train")]
                _do("precompute", *encode, "--folder", str(latents))
            run = folder / str(number) / str(seed)
            if not list(run.glob("*/steps.csv")) or not any(
                json.loads(record.read_text())["status"] == "ok"
                for record in run.glob("*/record.json")
            ):
                _train(model, latents, [*trial.recipe, *settings, "--seed", str(seed)], run)
            (table,) = run.glob("*/steps.csv")
            losses = [step["loss"] for step in read_steps(table, columns=["loss"], flag="")]
            tenths = [round(statistics.fmean(part), 6) for part in np.array_split(losses, 10)]
            means.append({"change": change, "seed": seed, **dict(zip(TENTHS, tenths, strict=True))})
    (flags.folder / trial.table).write_text(format_csv(means, columns=list(means[0])))
    rows = []
    for number, change in enumerate(trial.changes):
        if change != SAME_RECIPE:
            found = _judge(folder, [(number, seed) for seed in range(1, NUM_CHANGED + 1)], first=1)
            alone = _judge(folder, [(number, seed) for seed in range(1, NUM_CHANGED + 1)], first=6)
            rows.append({"change": change, "in pairs": found, "with other seeds": alone})
    print(to_markdown(make_table(rows)))
    _count_false_alarms(folder, trial.num_seeds)


def _count_false_alarms(folder: Path, num_seeds: int) -> None:
    """Compare the recipe with itself: one seed with the first five, and groups of five seeds."""
    others = range(NUM_CHANGED + 1, num_seeds + 1)
    alarms = [seed for seed in others if OUTSIDE in _judge(folder, [(0, seed)], first=1)]
    print(f"\nfalse alarms, one seed against five: {len(alarms)} of {len(others)} {alarms}")
    pairs = [*itertools.combinations(range(num_seeds // NUM_CHANGED), 2)]
    alarms = [
        pair
        for pair in pairs
        if OUTSIDE
        in _judge(folder, [(0, 5 * pair[1] + seed) for seed in range(1, 6)], first=5 * pair[0] + 1)
    ]
    print(f"false alarms, five seeds against five: {len(alarms)} of {len(pairs)} {alarms}")


def _do(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "sdbench", *command], check=True, cwd=ROOT)


def _train(model: str, latents: Path, settings: Sequence[str], run: Path) -> None:
    fixed = [
        *("--model_name", model, "--remote", str(latents), "--latents", "precomputed"),
        *("--image_size", "64"),
        *("--engine", "torch", "--num_threads", "1", "--num_workers", "0", "--precision", "fp32"),
        *("--batch_size", "8", "--device_train_microbatch_size", "8", "--lr", "1e-3"),
        *("--max_duration", f"{NUM_STEPS}ba"),
    ]
    shutil.rmtree(run, ignore_errors=True)
    if train.main([*fixed, *settings, "--results_dir", str(run)]):
        raise SystemExit(f"a run failed: {run}")
    for checkpoints in run.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)


def _with_other_scale(folder: Path, model: str) -> Path:
    """The miniature as a folder, whose VAE says another scaling factor."""
    made = folder / "other_scale"
    if not made.exists():
        one_step = ["--model_name", model, "--use_synth_data", "--max_duration", "1ba"]
        shutil.rmtree(folder / "one_step", ignore_errors=True)
        train.main([*one_step, "--engine", "torch", "--results_dir", str(folder / "one_step")])
        (record,) = (folder / "one_step").glob("*/record.json")
        _do("export", str(record.parent), "--folder", str(made))
        config = made / "vae" / "config.json"
        content = json.loads(config.read_text()) | {"scaling_factor": OTHER_SCALE}
        config.write_text(json.dumps(content))
    return made


def _judge(folder: Path, candidates: Sequence[tuple[int, int]], *, first: int) -> str:
    """Compare runs with five of the recipe; return the rows that are outside, in words."""
    sides = []
    for side, runs in (
        ("baseline", [(0, seed) for seed in range(first, first + NUM_CHANGED)]),
        ("candidate", candidates),
    ):
        place = folder / "sides" / side
        shutil.rmtree(place, ignore_errors=True)
        for number, seed in runs:
            for record in (folder / str(number) / str(seed)).glob("*/record.json"):
                shutil.copytree(record.parent, place / f"{number}-{seed}")
        sides.append(place)
    verdict = compare_losses(*sides, tolerance=0.0)
    if len(verdict.failures) > sum(not check.is_inside for check in verdict.checks):
        raise SystemExit(f"a run cannot be judged: {verdict.failures}")
    table: Table = make_loss_table(verdict.checks)
    texts = [[cell.text for cell in row] for row in table.rows]
    return "; ".join(f"{row[0]} {row[2]} ({row[3]}) {row[4]}" for row in texts)


if __name__ == "__main__":
    main()
