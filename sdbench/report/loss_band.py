"""Compares the losses of recipes with those of a reference.

The reference is the preset seed in fp32, not compiled. Five more runs of it with other weights, on
the same data and noise, give the spread of losses that are equally right: the root mean square over
the steps of the standard deviation at each step. The band reaches three spreads to each side of the
reference. A recipe has the weights, data and noise of the reference, so that only its arithmetic
differs. It is inside if all of its 50 losses lie in the band. Nothing is smoothed: an average would
hide a single bad step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.record.configuration import as_key, group, settings_of
from sdbench.record.store import STEPS_NAME
from sdbench.report.ladder import THREADS, added_to_seed, describe_recipe
from sdbench.report.runs import describe_devices, read_steps
from sdbench.report.tables import EMPTY, Table, make_cell, make_table, optional_cell
from sdbench.settings.config import PRESETS

# Settings of the reference that may differ from seed: in fp32 they change the speed only.
OF_REFERENCE = {"precision", "optimizer", "optimizer_params", "cpu_allocator", THREADS}
NUM_STEPS = 50
NUM_OTHER_WEIGHTS = 5
NUM_SPREADS = 3
INSIDE, OUTSIDE, NO_BAND = "inside", "OUTSIDE", "no band yet"


@dataclasses.dataclass(frozen=True)
class LossRun:
    """A record and the losses of the first 50 steps."""

    record: dict[str, Any]
    losses: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Judged:
    """The distance of the losses of a run from those of the reference.

    Attributes:
        recipe: The preset, and the flags on top of it.
        deviation: The largest distance at one step; NaN if a loss is NaN.
        step: That step, from 0.
        mean_deviation: Mean over the steps, with its sign.
        verdict: ``inside``, ``OUTSIDE`` or ``no band yet``; None for the runs that make the band.
    """

    run: LossRun
    recipe: str
    deviation: float
    step: int
    mean_deviation: float
    verdict: str | None


@dataclasses.dataclass(frozen=True)
class Band:
    """The band of one device and size, and the runs that were compared with it.

    Attributes:
        reference: The run that the others are compared with.
        spread: Root mean square over the steps of the standard deviation of the losses of five
            runs with other weights; None with fewer runs.
        num_others: Runs with other weights.
        judged: The runs with other weights, then the recipes.
    """

    reference: LossRun
    spread: float | None
    num_others: int
    judged: Sequence[Judged]

    @property
    def half_width(self) -> float | None:
        """The largest distance from the reference that is inside."""
        return None if self.spread is None else NUM_SPREADS * self.spread


def read_run(record: dict[str, Any], folder: Path) -> LossRun:
    """Read the first 50 losses of a run; a run with fewer is refused."""
    path = folder / STEPS_NAME
    losses = [step["loss"] for step in read_steps(path, columns=["loss"], flag="--numerics")]
    if len(losses) < NUM_STEPS:
        raise ConfigError(
            "the band of losses takes runs of 50 steps",
            value=f"{path}: {len(losses)} steps",
            allowed=f"at least {NUM_STEPS} steps with a loss",
            flag="--numerics",
        )
    return LossRun(record, losses[:NUM_STEPS])


def find_bands(runs: Sequence[LossRun]) -> list[Band]:
    """The band of each device and size that has a reference."""
    bands = []
    for alike in group(runs, key_of=lambda run: as_key(_same_for_all(run.record))).values():
        references = [run for run in alike if _is_eager_fp32(run) and not _has_other_weights(run)]
        if references:
            bands.append(_make_band(references[0], alike))
    return bands


def make_tables(bands: Sequence[Band]) -> list[Table]:
    """A table for each band."""
    return [
        make_table(
            _table_rows(band),
            name=f"loss-band-{number}",
            caption=_describe_band(band),
            left=["verdict"],
        )
        for number, band in enumerate(bands, 1)
    ]


def _make_band(reference: LossRun, runs: Sequence[LossRun]) -> Band:
    others = [run for run in runs if _has_other_weights(run) and _is_eager_fp32(run)]
    recipes = [run for run in runs if not _has_other_weights(run) and run is not reference]
    spread = None
    if len(others) >= NUM_OTHER_WEIGHTS:
        by_step = zip(*(run.losses for run in others), strict=True)
        spread = math.sqrt(statistics.fmean(map(statistics.variance, by_step)))
    half_width = None if spread is None else NUM_SPREADS * spread
    judged = [_judge(run, reference) for run in others]
    for one in (_judge(run, reference) for run in recipes):
        if half_width is None:
            verdict = NO_BAND
        else:
            verdict = INSIDE if one.deviation <= half_width else OUTSIDE  # a NaN is outside
        judged.append(dataclasses.replace(one, verdict=verdict))
    return Band(reference, spread, len(others), judged)


def _judge(run: LossRun, reference: LossRun) -> Judged:
    deviations = [
        loss - expected for loss, expected in zip(run.losses, reference.losses, strict=True)
    ]
    # The first NaN, if there is one, and else the largest: nothing is larger than a NaN.
    distances = [math.inf if math.isnan(one) else abs(one) for one in deviations]
    step = distances.index(max(distances))
    return Judged(
        run=run,
        recipe=f"the reference with weights of seed {run.record['config']['weights_seed']}"
        if _has_other_weights(run)
        else describe_recipe(run.record),
        deviation=abs(deviations[step]),
        step=step,
        mean_deviation=statistics.fmean(deviations),
        verdict=None,
    )


def _table_rows(band: Band) -> list[dict[str, Any]]:
    rows = [
        {
            "recipe": one.recipe,
            "engine": one.run.record["config"]["engine"],
            "largest deviation": make_cell(one.deviation, num_digits=3),
            "at step": one.step,
            "mean deviation": make_cell(one.mean_deviation, num_digits=2),
            "loss, first to last": f"{one.run.losses[0]:.4f} to {one.run.losses[-1]:.4f}",
            "verdict": optional_cell(one.verdict),
            "run": one.run.record["run_id"],
        }
        for one in (_judge(band.reference, band.reference), *band.judged)
    ]
    no_deviations = dict.fromkeys(("largest deviation", "at step", "mean deviation"), EMPTY)
    rows[0] |= {"recipe": "the reference", **no_deviations}
    return rows


def _describe_band(band: Band) -> str:
    record, config = band.reference.record, band.reference.record["config"]
    work = (
        f"{describe_devices(record)}, "
        f"{record['workload']['architecture']}, {config['image_size']} px, batch "
        f"{config['batch_size']}"
    )
    if band.spread is None:
        return f"{work}: no band yet, {band.num_others} of {NUM_OTHER_WEIGHTS} runs that make it"
    return (
        f"{work}: the band is {NUM_SPREADS} x {band.spread:.4g} = {band.half_width:.4g} to either "
        f"side of the reference, from {band.num_others} runs with other weights"
    )


def _same_for_all(record: dict[str, Any]) -> dict[str, Any]:
    """The settings that two runs share if they have the same data, noise and way of drawing."""
    recipe = {*PRESETS["seed"], "preset", "engine", THREADS, "use_ema"}
    settings = settings_of(record) | {
        "seed": record["config"]["seed"],
        # Without it: a record from before all threads drew.
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
