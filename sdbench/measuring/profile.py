"""The command `profile`: work, time and ceiling of each operator of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sdbench.base.errors import ConfigError
from sdbench.run import TASKS
from sdbench.run.runner import run
from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.kinds import POSITIVE, TEXT
from sdbench.settings.request import Request, parse
from sdbench.settings.setting import setting

DESCRIPTION = """\
Count the arithmetic and the bytes of every operator of a training step, time it, and compare it
with the best that this machine reaches.

Takes --top, --folder and the flags of benchmark.py that say what a step does. Of its other flags it
takes --warmup_batches (before anything is timed), --measure_batches (timed without the profiler, 3
by default), --profile_batches (under torch's profiler) and --profile_trace (writes torch's trace of
the last of them). Without --batch_size a step is one micro-batch.
One process, on one GPU or the CPU.
"""
EPILOG = """\
examples:
  python -m sdbench profile --model_name tiny --use_synth_data
      a miniature in seconds
  python -m sdbench profile --preset seed --device_train_microbatch_size 4 --use_ema
      where the time of the reference recipe goes
  python -m sdbench profile --latents precomputed --remote my-latents --engine torch --top 40
      on precomputed latents, without a trainer, in longer tables
  python -m sdbench profile --batch_size 64 --device_train_microbatch_size 16 --folder before
      with four micro-batches to an optimizer step, into a folder of this name

It prints three tables (by phase, by operator, by operator and shapes) and the floors of a step, and
writes profile.json (figures, settings, versions), operators.csv (every operator) and stdout.log.
With --compile the step is counted uncompiled, which may need more memory.

exit codes: 0 ok, 1 the run failed, 2 bad input, 130 stopped
"""
# Step times serve for comparison only; benchmark.py measures a rate with an interval.
MEASURE_BATCHES = 3
# Flags of benchmark.py that say how long to measure and where to log it.
NOT_HERE = (
    "max_duration",
    "max_warmup_batches",
    "max_measure_batches",
    "target_precision",
    "measure_peak",
    "wandb_name",
    "wandb_project",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSettings(BenchmarkConfig):
    """Settings of profile: its own, and the settings of the run that it profiles."""

    top: int = setting(
        POSITIVE, 20, "rows of the tables of operators; the files have all", is_everyday=True
    )
    folder: str | None = setting(
        TEXT,
        None,
        "new folder for the files (default: a new one in --results_dir)",
        is_everyday=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Profile a training step as the command line says; return the exit code."""
    return run(TASKS["profile"], _parse, argv)


def _parse(argv: Sequence[str]) -> Request[ProfileSettings]:
    request = parse(
        ProfileSettings,
        argv,
        prog="python -m sdbench profile",
        description=DESCRIPTION,
        epilog=EPILOG,
        takes_file=True,
    )
    config = request.config
    for name in NOT_HERE:
        if request.is_users(name):
            raise ConfigError(
                "a profile has no use for this setting of benchmark.py",
                value=getattr(config, name),
                allowed="settings that say what a step does, and --warmup_batches, "
                "--measure_batches, --profile_batches and --profile_trace",
                flag=f"--{name}",
            )
    if config.measure_batches is None:
        config = dataclasses.replace(config, measure_batches=MEASURE_BATCHES)
    microbatch = config.device_train_microbatch_size
    if config.batch_size is None and microbatch != "auto":
        config = dataclasses.replace(config, batch_size=microbatch)
    return dataclasses.replace(request, config=config)
