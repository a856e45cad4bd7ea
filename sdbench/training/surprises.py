"""Sentences of a plan about what a run would do without an error, and nobody would expect."""

from __future__ import annotations

from pathlib import Path

from sdbench.base.outside import open_table
from sdbench.record.history import TRAIN_STEP_COLUMNS
from sdbench.record.store import STEPS_NAME
from sdbench.settings.recipe import TrainConfig
from sdbench.state.checkpoints import Checkpoint


def describe_average(config: TrainConfig, *, num_steps: int) -> str | None:
    """Warn of a moving average that has hardly moved from the first weights at the end of a run."""
    if not config.use_ema:
        return None
    num_updates = num_steps // config.ema_interval_batches
    share = 0.5 ** (num_updates * config.ema_interval_batches / config.half_life_batches)
    if share <= 0.5 or (config.ema_warmup and num_updates):
        return None
    return (
        f"At the end, step {num_steps}, the moving average will be to {share:.0%} the weights of "
        f"the first step: its half-life is {config.half_life_batches:.4g} steps, and it is updated "
        f"every {config.ema_interval_batches}. python -m sdbench export writes it unless told "
        "--no_ema. --ema_half_life_batches shortens it, and --ema_warmup lets it follow at first."
    )


def describe_rate(config: TrainConfig, found: Checkpoint, *, num_steps: int) -> str | None:
    """Warn of a falling learning rate that rises where the run goes on with another length."""
    from sdbench.training.train_job import learning_rate_factor_of

    before = _last_rate(found.folder.parent.parent / STEPS_NAME, step=found.step)
    is_falling = config.lr_schedule != "constant" and found.step >= config.lr_warmup_batches
    if before is None or not is_falling or found.step >= num_steps:
        return None
    after = config.lr * learning_rate_factor_of(config, num_steps=num_steps)(found.step)
    # Another --lr is told as a changed setting.
    if after / config.lr <= 1.01 * before / found.facts["config"]["lr"]:
        return None
    return (
        f"The learning rate rises from {before:.3g} to {after:.3g} after step {found.step}, as the "
        f"schedule {config.lr_schedule} now ends at step {num_steps}. To train on without a rise: "
        "a new run with --init_from and its own schedule."
    )


def _last_rate(file: Path, *, step: int) -> float | None:
    """The learning rate of the last step up to this one in steps.csv, if it can be read."""
    rate = None
    try:
        for row in open_table(file, required=TRAIN_STEP_COLUMNS):
            if int(row["step"]) <= step:
                rate = float(row["learning_rate"])
    except (OSError, ValueError, TypeError):
        return None  # rows that a kill has damaged: the rate is not known
    return rate
