"""Compares the losses of recipes with those of a reference.

The reference is the preset seed in fp32, not compiled. Five more runs with other initial weights,
on the same data and noise, give the spread of equally correct losses: the standard deviation at
each step, as a root mean square over the steps. The band reaches three spreads to each side of the
reference. A recipe has the weights, data and noise of the reference; only its arithmetic differs.
It is inside if all of its 50 losses lie in the band. Nothing is smoothed: an average would hide a
single bad step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sdbench.analysis.ladder import THREADS, added_to_seed, describe_recipe
from sdbench.record.configuration import as_key, group, settings_of
from sdbench.record.store import STEPS_NAME
from sdbench.report.runs import describe_devices, read_steps
from sdbench.report.tables import Field, Table, tabulate
from sdbench.settings.config import PRESETS

# Settings of the reference that may differ from seed: in fp32 they change the speed only.
OF_REFERENCE = {"precision", "optimizer", "optimizer_params", "cpu_allocator", THREADS}
NUM_STEPS = 50
NUM_OTHER_WEIGHTS = 5
NUM_SPREADS = 3
INSIDE, OUTSIDE, NO_BAND = "inside", "OUTSIDE", "no band yet"


class LossRun(NamedTuple):
    """A record and the losses of the first 50 steps."""

    record: dict[str, Any]
    losses: Sequence[float]


def read_run(record: dict[str, Any], folder: Path) -> LossRun:
    """Read the first 50 losses of a run; a run with fewer is refused."""
    path = folder / STEPS_NAME
    steps = read_steps(path, columns=["loss"], flag="--numerics", least=NUM_STEPS)
    return LossRun(record, [step["loss"] for step in steps[:NUM_STEPS]])


def make_tables(runs: Sequence[LossRun]) -> list[Table]:
    """A table for each device and size: the reference, its runs with other weights, the recipes."""
    tables: list[Table] = []
    for alike in group(runs, key_of=lambda run: as_key(_same_for_all(run.record))).values():
        references = [run for run in alike if _is_eager_fp32(run) and not _has_other_weights(run)]
        if references:
            name = f"loss-band-{len(tables) + 1}"
            tables.append(_make_table(references[0], alike, name=name))
    return tables


def _make_table(reference: LossRun, runs: Sequence[LossRun], *, name: str) -> Table:
    others = [run for run in runs if _has_other_weights(run) and _is_eager_fp32(run)]
    recipes = [run for run in runs if not _has_other_weights(run) and run is not reference]
    record, config = reference.record, reference.record["config"]
    work = (
        f"{describe_devices(record)}, {record['workload']['architecture']}, "
        f"{config['image_size']} px, batch {config['batch_size']}"
    )
    if len(others) < NUM_OTHER_WEIGHTS:
        half_width = None
        band = f"no band yet, {len(others)} of {NUM_OTHER_WEIGHTS} runs that make it"
    else:
        by_step = zip(*(run.losses for run in others), strict=True)
        spread = math.sqrt(statistics.fmean(map(statistics.variance, by_step)))
        half_width = NUM_SPREADS * spread
        band = (
            f"the band is {NUM_SPREADS} x {spread:.4g} = {half_width:.4g} to either side of the "
            f"reference, from {len(others)} runs with other weights"
        )
    rows = [_describe(reference) | {"recipe": "the reference"}]
    for run in others:
        seed = run.record["config"]["weights_seed"]
        recipe = f"the reference with weights of seed {seed}"
        rows.append(_describe(run) | _deviations(run, reference) | {"recipe": recipe})
    for run in recipes:
        row = _describe(run) | _deviations(run, reference)
        if half_width is None:
            verdict = NO_BAND
        else:
            verdict = INSIDE if row["deviation"] <= half_width else OUTSIDE  # a NaN is outside
        rows.append(row | {"verdict": verdict})
    return tabulate(FIELDS, rows, name=name, caption=f"{work}: {band}")


def _describe(run: LossRun) -> dict[str, Any]:
    return {
        "recipe": describe_recipe(run.record),
        "engine": run.record["config"]["engine"],
        "losses": f"{run.losses[0]:.4f} to {run.losses[-1]:.4f}",
        "run_id": run.record["run_id"],
    }


def _deviations(run: LossRun, reference: LossRun) -> dict[str, Any]:
    """The largest deviation (NaN if a loss is NaN), its step, and the mean deviation."""
    deviations = np.subtract(run.losses, reference.losses)
    # The first NaN if there is one, else the largest deviation.
    step = int(np.argmax(np.nan_to_num(np.abs(deviations), nan=math.inf)))
    return {
        "deviation": float(abs(deviations[step])),
        "step": step,
        "mean_deviation": statistics.fmean(deviations.tolist()),
    }


def _same_for_all(record: dict[str, Any]) -> dict[str, Any]:
    """The settings that two runs share if they have the same data, noise and way of drawing."""
    recipe = {*PRESETS["seed"], "preset", "engine", THREADS, "use_ema"}
    settings = settings_of(record) | {
        "seed": record["config"]["seed"],
        # Records without it are older than drawing with all threads.
        "drawing": record["workload"].get("drawing", 1),
    }
    return {name: value for name, value in settings.items() if name not in recipe}


def _is_eager_fp32(run: LossRun) -> bool:
    """Whether it is the recipe of the reference: plain fp32, with Composer."""
    config = run.record["config"]
    has_speedups = bool(added_to_seed(run.record).keys() - OF_REFERENCE)
    return config["engine"] == "composer" and config["precision"] == "fp32" and not has_speedups


def _has_other_weights(run: LossRun) -> bool:
    config = run.record["config"]
    return config["weights_seed"] not in (None, config["seed"])  # None: one seed for all


FIELDS = (
    Field("recipe", "recipe"),
    Field("engine", "engine"),
    Field("largest deviation", "deviation", digits=3, unknown=""),
    Field("at step", "step", unknown=""),
    Field("mean deviation", "mean_deviation", digits=2, unknown=""),
    Field("loss, first to last", "losses"),
    Field("verdict", "verdict", unknown="", is_left=True),
    Field("run", "run_id"),
)
