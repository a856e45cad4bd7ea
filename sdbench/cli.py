"""The commands of `python -m sdbench`.

Each command is a `main(argv)` in the room that it belongs to, imported when it is called.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence

from sdbench.base.errors import ConfigError, RunError
from sdbench.base.output import protected_output
from sdbench.base.refusal import report_refusal
from sdbench.base.secrets import redact

COMMANDS: dict[str, tuple[str, str]] = {
    "convert": (
        "sdbench.data.prepare.convert:main",
        "turn a folder of images, tars, parquet files or MDS shards into one of the others",
    ),
    "verify-data": (
        "sdbench.data.prepare.verify:main",
        "check a data set: every file, and on request every sample",
    ),
    "precompute": (
        "sdbench.tasks.encode.precompute:main",
        "encode images and captions once, to train without the encoders",
    ),
    "doctor": (
        "sdbench.doctor.doctor:main",
        "look at each node before an expensive job: versions, GPUs, network, memory, disks, data",
    ),
    "profile": (
        "sdbench.tasks.profile.profile:main",
        "which operators a step spends its time in, and how far each is from its ceiling",
    ),
    "repeat": (
        "sdbench.launch.repeat:main",
        "measure one command several times in fresh processes: an interval between runs",
    ),
    "sweep": ("sdbench.launch.sweep:main", "measure a grid or a list of settings, and resume it"),
    "search": (
        "sdbench.launch.search:main",
        "find the largest and the fastest micro-batch of this machine",
    ),
    "render": (
        "sdbench.launch.render.render:main",
        "fill in the manifest or the script of a job on a cluster, and check it",
    ),
    "submit": (
        "sdbench.launch.submit:main",
        "measure on several numbers of nodes of a Slurm cluster, and set them side by side",
    ),
    "publish": ("sdbench.report.publish:main", "copy a run into results/ and rebuild its tables"),
    "report": (
        "sdbench.report.report:main",
        "make tables, plots and a page from records and from quoted figures",
    ),
    "compare": (
        "sdbench.report.compare:main",
        "set two tables or two sets of runs against each other, row by row",
    ),
    "scaling": (
        "sdbench.scaling.scaling:main",
        "fit and predict throughput against GPU count; days, cost and energy of a training",
    ),
}

EPILOG = """\
examples:
  python -m sdbench convert my-images/ my-mds/
  python -m sdbench verify-data my-mds/ --deep
  torchrun --nproc_per_node 8 -m sdbench precompute --remote my-mds/ --out my-latents/
  srun python -m sdbench doctor
  python -m sdbench repeat 5 -- composer benchmark.py --use_synth_data
  python -m sdbench sweep sweeps/seeds.yaml --dry_run
  python -m sdbench render eks --help
  python -m sdbench publish runs/20261121T050000Z_2-core-cpu_tiny-64px-fast
  python -m sdbench compare runs/before runs/after
  python -m sdbench convert --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The command and its arguments; None takes those of the process.

    Returns:
        The exit code: 0 ok, 1 failed, 2 bad input.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sdbench",
        description="Tools around benchmark.py.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, help_text) in COMMANDS.items():
        commands.add_parser(name, help=help_text, add_help=False)
    known, rest = parser.parse_known_args(argv)
    module, function = COMMANDS[known.command][0].split(":")
    # What `render` prints is a script or a manifest, to be used as it is.
    output = contextlib.nullcontext() if known.command == "render" else protected_output()
    try:
        with output:
            return getattr(importlib.import_module(module), function)(rest)
    except (ConfigError, RunError) as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        report_refusal(error)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:  # a full disk, a folder that may not be read
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return 1
