"""The command `profile`: its flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from sdbench.base.errors import ConfigError
from sdbench.run.runner import run
from sdbench.settings.config import POSITIVE, Request, parse_request, parse_value
from sdbench.tasks import TASKS

DESCRIPTION = """\
Count the arithmetic and the bytes of every operator of a training step, time it, and set both
against what this machine reaches at its best.

Besides the flags below it takes those of benchmark.py that say what a step does, with the same
meaning and defaults, and these: --warmup_batches (before anything is timed), --measure_batches
(timed as they are, 3 by default), --profile_batches (under torch's profiler) and --profile_trace
(writes torch's trace of the last of them). Without --batch_size a step is one micro-batch.
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
  python -m sdbench profile --batch_size 64 --device_train_microbatch_size 16 --out before
      with four micro-batches to an optimizer step, into a folder of this name

It prints three tables (by phase, by operator, by operator and shapes) and the floor of a step, and
writes profile.json (figures, settings, versions), operators.csv (every operator) and stdout.log.
With --compile the step is counted uncompiled, which may need more memory.

exit codes: 0 ok, 1 the run failed, 2 bad input, 130 Ctrl-C
"""
DEFAULT_TOP = 20
# Step times serve for comparison only: a rate with an interval is benchmark.py's.
MEASURE_BATCHES = 3
# Flags of benchmark.py that say how long to measure and where to tell of it.
NOT_HERE = (
    "max_duration",
    "max_warmup_batches",
    "max_measure_batches",
    "target_precision",
    "measure_peak",
    "wandb_name",
    "wandb_project",
)


class ProfileRequest(NamedTuple):
    """What was asked for.

    Attributes:
        request: By the flags of benchmark.py.
        top: Rows of the tables.
        out: Folder of the files, or None for a new one.
    """

    request: Request
    top: int
    out: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """Profile a training step.

    Args:
        argv: Command-line arguments; None takes those of the process.

    Returns:
        The exit code.
    """
    return run(TASKS["profile"], _parse, argv)


def _parse(argv: Sequence[str]) -> ProfileRequest:
    own, rest = _make_parser().parse_known_args(argv)
    top = parse_value("top", own.top, kind=POSITIVE)
    request = _with_defaults(parse_request(rest, description="", epilog=""))
    return ProfileRequest(request, top, own.out)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sdbench profile",
        usage="%(prog)s [--top N] [--out FOLDER] [FLAGS OF benchmark.py]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--top",
        default=DEFAULT_TOP,
        metavar="N",
        help=f"rows of the tables of operators (default: {DEFAULT_TOP}); the files have all",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="new folder of the files (default: one of its own in --results_dir)",
    )
    return parser


def _with_defaults(request: Request) -> Request:
    """The request with this command's own defaults where the user said nothing."""
    for name in NOT_HERE:
        if request.is_users(name):
            raise ConfigError(
                "a profile has no use for this setting of benchmark.py",
                value=getattr(request.config, name),
                allowed="those that say what a step does, and --warmup_batches, "
                "--measure_batches, --profile_batches and --profile_trace",
                flag=f"--{name}",
            )
    config = request.config
    if config.measure_batches is None:
        config = dataclasses.replace(config, measure_batches=MEASURE_BATCHES)
    microbatch = config.device_train_microbatch_size
    if config.batch_size is None and microbatch != "auto":
        config = dataclasses.replace(config, batch_size=microbatch)
    return dataclasses.replace(request, config=config)
