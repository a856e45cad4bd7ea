"""The commands of `python -m sdbench`.

Each command is a `main(argv)` in the room that it belongs to, imported when it is called.
"""

# PYTHON_ARGCOMPLETE_OK: a shell may start this to complete a command line.

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections.abc import Sequence

from sdbench.base.cause import report_cause
from sdbench.base.errors import EXIT_FAILED, ConfigError, RunError
from sdbench.base.output import protected_output
from sdbench.base.secrets import redact
from sdbench.base.stop import stoppable
from sdbench.settings.request import choose_command

COMMANDS: dict[str, tuple[str, str]] = {
    "convert": (
        "sdbench.data.prepare.convert:main",
        "turn a folder of images, tars, parquet files or MDS shards into one of the others",
    ),
    "verify-data": (
        "sdbench.data.prepare.verify:main",
        "check a data set: every file, and on request every sample",
    ),
    "count-samples": (
        "sdbench.data.prepare.count:main",
        "count the samples of tars, so that they can be streamed",
    ),
    "shapes": (
        "sdbench.shapes.write:main",
        "write a data set of coloured shapes, to see a model learn to draw",
    ),
    "judge": (
        "sdbench.shapes.judge:main",
        "count the drawn pictures that have the colour and the shape asked for",
    ),
    "score": (
        "sdbench.evaluate.command:main",
        "FID and CLIP score of drawn pictures, by networks in local files",
    ),
    "before-after": (
        "sdbench.evaluate.before_after:main",
        "set pictures of a subject before and after its training side by side, and score them",
    ),
    "precompute": (
        "sdbench.tasks.encode.precompute:main",
        "encode images and captions once, to train without the encoders",
    ),
    "watch": (
        "sdbench.report.watch:main",
        "make a page of a training run: curves, pictures, restarts",
    ),
    "export": (
        "sdbench.tasks.train.export:main",
        "write the model of a training run as a folder that diffusers loads",
    ),
    "doctor": (
        "sdbench.doctor.doctor:main",
        "look at each node before an expensive job: versions, GPUs, network, memory, disks, data",
    ),
    "profile": (
        "sdbench.tasks.profile:main",
        "which operators a step spends its time in, and how far each is from its ceiling",
    ),
    "dreambooth": (
        "sdbench.launch.dreambooth:main",
        "teach a model a subject by a few pictures: class pictures, training, pictures of it",
    ),
    "repeat": (
        "sdbench.launch.repeat:main",
        "measure one command several times in fresh processes: an interval between runs",
    ),
    "rerun": (
        "sdbench.launch.rerun:main",
        "run what a record says once more: launcher, ranks, settings, environment",
    ),
    "sweep": ("sdbench.launch.sweep:main", "measure a grid or a list of settings, and resume it"),
    "search": (
        "sdbench.launch.search:main",
        "find the largest and the fastest micro-batch of this machine",
    ),
    "render": (
        "sdbench.launch.render:main",
        "fill in the manifest of a job on a cluster, and check it",
    ),
    "submit": (
        "sdbench.launch.submit:main",
        "measure on several numbers of nodes of a Slurm cluster, and set them side by side",
    ),
    "publish": ("sdbench.analysis.publish:main", "copy a run into results/ and rebuild its tables"),
    "report": (
        "sdbench.analysis.report:main",
        "make tables, plots and a page from records and from quoted figures",
    ),
    "compare": (
        "sdbench.analysis.compare:main",
        "set two tables or two sets of runs against each other, row by row",
    ),
    "scaling": (
        "sdbench.scaling.scaling:main",
        "fit and predict throughput against GPU count; days, cost and energy of a training",
    ),
}

EPILOG = """\
examples:
  python -m sdbench convert my-images/ --folder my-mds/
  python -m sdbench verify-data my-mds/ --deep
  torchrun --nproc_per_node 8 -m sdbench precompute --remote my-mds/ --folder my-latents/
  srun python -m sdbench doctor
  python -m sdbench dreambooth --help
  python -m sdbench repeat 5 --against 'composer benchmark.py' -- composer benchmark.py --use_ema
  python -m sdbench rerun runs/20261121T050000Z_2-core-cpu_tiny-64px-fast --dry_run
  python -m sdbench sweep sweeps/seeds.yaml --dry_run
  python -m sdbench render eks --help
  python -m sdbench publish runs/20261121T050000Z_2-core-cpu_tiny-64px-fast
  python -m sdbench compare runs/repeat_A/baseline runs/repeat_A/candidate
  python -m sdbench convert --help
"""


@stoppable
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code is 0 ok, 1 failed, 2 bad input or 130 stopped.
    """
    try:
        command, arguments = choose_command(
            {name: help_text for name, (_, help_text) in COMMANDS.items()},
            argv,
            prog="python -m sdbench",
            description="Tools around benchmark.py.",
            epilog=EPILOG,
        )
        # What `render` prints is a manifest, to be used as it is.
        output = contextlib.nullcontext() if command == "render" else protected_output()
        with output:
            return pkgutil.resolve_name(COMMANDS[command][0])(arguments)
    except (ConfigError, RunError) as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        report_cause(type(error).__name__, str(error))
        return error.exit_code
    except OSError as error:  # a full disk, a folder that may not be read
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return EXIT_FAILED
