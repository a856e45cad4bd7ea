"""Settings of any run, of the measurement, and of Weights & Biases."""

from __future__ import annotations

import dataclasses

from sdbench.settings.kinds import (
    DURATION,
    NOT_NEGATIVE,
    POSITIVE,
    SECONDS,
    SHARE,
    SWITCH,
    TEXT,
    one_of,
    row_of,
)
from sdbench.settings.setting import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Who trains, by which recipe, and where the record goes."""

    GROUP = "the run"

    preset: str = setting(
        one_of("fast", "seed"),
        "fast",
        "recipe that sets the speed-ups: fast, or seed (repeats mosaicml/diffusion-benchmark)",
        is_everyday=True,
    )
    engine: str = setting(
        row_of("sdbench.engines:ENGINES"),
        "composer",
        "training loop: MosaicML Composer, a lean loop without a trainer (torch), or PyTorch "
        "Lightning in ranks that Ray Train starts (ray)",
        is_everyday=True,
    )
    seed: int = setting(
        NOT_NEGATIVE, 17, "seed of weights, data and noise", only_measures=True, identifies=True
    )
    dist_timeout: float = setting(
        SECONDS,
        600.0,
        "seconds after which a missing or silent rank ends the run on all ranks",
        only_measures=True,
    )
    stop_grace_s: float | None = setting(
        SECONDS,
        None,
        "seconds from the scheduler's SIGTERM to its SIGKILL: a step that still runs after 80 % "
        "of them is aborted (default: after 10 s and three times the longest step so far)",
        only_measures=True,
    )
    results_dir: str = setting(
        TEXT, "runs", "folder that gets one folder per run", only_measures=True, is_everyday=True
    )
    check_memory: bool = setting(
        SWITCH,
        True,
        "refuse a run whose estimated peak memory exceeds the machine's; on a GPU, where the "
        "estimate may be a fifth too high, only warn",
        only_measures=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuringSettings:
    """What is measured, and for how long."""

    GROUP = "what is measured"
    ONLY_MEASURES = True

    warmup_batches: int | None = setting(
        NOT_NEGATIVE, None, "batches trained before the measured window"
    )
    measure_batches: int | None = setting(
        POSITIVE, None, "batches in the measured window; below 10 there is no interval"
    )
    max_warmup_batches: int | None = setting(
        NOT_NEGATIVE,
        None,
        "longest warm-up: while the step time still drifts, measured batches become warm-up and "
        "more are measured (default: two more windows)",
    )
    target_precision: float | None = setting(
        SHARE,
        None,
        "double the measured window until the 95 % interval is within this share of the rate; "
        "takes at least 3 / share batches (300 for 1%) and 30 s, since few batches miss pauses",
        is_everyday=True,
    )
    max_measure_batches: int | None = setting(
        POSITIVE,
        None,
        "longest window for --target_precision (default: 16 times --measure_batches, or the least "
        "number of batches for the precision)",
    )
    profile_batches: int | None = setting(
        NOT_NEGATIVE,
        None,
        "batches after the window whose time is split into phases; one more finds the attention "
        "kernels, if it has 32 micro-batches or fewer; 0: no breakdown",
    )
    profile_trace: bool = setting(
        SWITCH, False, "train one more batch and write torch's trace of it, trace.json.gz"
    )
    measure_peak: bool = setting(
        SWITCH, True, "time a large matrix product before the run, for MFU against it"
    )
    max_duration: str | None = setting(
        DURATION,
        None,
        "length of the run, e.g. 48ba or 5ep, including warm-up, window and profile (default: as "
        "long as these take)",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """What Weights & Biases is told."""

    GROUP = "Weights & Biases (off unless a flag is given)"
    ONLY_MEASURES = True

    wandb_name: str | None = setting(TEXT, None, "run name")
    wandb_project: str | None = setting(TEXT, None, "project name")
