"""Which flags does `python -m sdbench doctor` have?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sdbench.data import resolve_format
from sdbench.settings.config import SECONDS, Kind, add_flags, reader

DESCRIPTION = """\
Look at this machine, or at each node that takes part, before an expensive job begins. Each line is
ok, skipped, a warning or an error, with what was found and what to do about it. Give it the flags
of the job that are listed below.
"""

EPILOG = """\
examples:
  python -m sdbench doctor
  torchrun --nproc_per_node 8 -m sdbench doctor --remote s3://bucket/pairs --wandb_project mine
      with an all-reduce between the GPUs of this machine
  srun --ntasks-per-node=1 python -m sdbench doctor --strict
      on each node of a Slurm job: clocks, and an all-reduce between the nodes
  python -m sdbench doctor --json > doctor.json

exit codes: 0 no error, 1 an error (with --strict also a warning), 2 bad input, 130 Ctrl-C; under
torchrun any failure is 1
"""

# Flags that mean the same in benchmark.py.
SHARED_FLAGS = (
    "model_name",
    "model_revision",
    "image_size",
    "batch_size",
    "data_format",
    "remote",
    "local",
    "num_workers",
    "prefetch_factor",
    "results_dir",
    "wandb_project",
)
LINK_SPEED = Kind("a number of Gbit/s above 0", SECONDS.parse)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read a command line.

    Args:
        argv: Arguments of the command; None takes those of the process.

    Raises:
        ConfigError: The flags about data contradict each other.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sdbench doctor",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--strict", action="store_true", help="let warnings count as errors in the exit code"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document, without host names"
    )
    parser.add_argument(
        "--timeout_s",
        type=reader(SECONDS),
        default=30.0,
        metavar="X",
        help="how long a check may take, and how long ranks wait for each other (default: 30)",
    )
    parser.add_argument(
        "--gradient_dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="format of the numbers in the timed all-reduce (default: fp32)",
    )
    parser.add_argument(
        "--link_gbps",
        type=reader(LINK_SPEED),
        metavar="X",
        help="nominal speed of the link between the ranks in Gbit/s, to compare the all-reduce "
        "with (default: of NVLink, or the sum of the network cards of a node, where known)",
    )
    parser.add_argument(
        "--random_weights",
        action="store_true",
        help="draw the weights of a folder or hub id instead of loading them",
    )
    add_flags(parser, SHARED_FLAGS)
    flags = parser.parse_args(argv)
    if flags.data_format != "auto":  # else it is told from the place, which may not answer
        resolve_format(
            data_format=flags.data_format,
            use_synth_data=False,
            remote=flags.remote,
            local=flags.local,
        )
    return flags
