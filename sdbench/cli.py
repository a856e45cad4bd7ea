"""The commands of `python -m sdbench`.

Each command is a `main(argv)` in the room that it belongs to, imported when it is called.
"""

# PYTHON_ARGCOMPLETE_OK: a shell may start this to complete a command line.

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections.abc import Callable, Sequence

from sdbench.base.cause import report_cause
from sdbench.base.errors import EXIT_FAILED, ConfigError, RunError
from sdbench.base.output import protected_output
from sdbench.base.secrets import redact
from sdbench.base.stop import stoppable
from sdbench.settings.request import choose_command

# Room and module, whose `main` it is, and what it does.
COMMANDS = {
    "benchmark": ("programs.benchmark", "measure how fast this machine trains: benchmark.py"),
    "train": ("programs.train", "train a model for real, and go on with it: train.py"),
    "generate": ("programs.generate", "draw pictures from prompts: generate.py"),
    "data": ("programs.data", "measure how fast a data source alone feeds a trainer: data.py"),
    "convert": ("data.convert.convert", "turn a data set into another format: tars, parquet, MDS"),
    "verify-data": ("data.convert.verify", "check a data set, and count the samples of tars"),
    "shapes": ("scenes.write", "write a data set of coloured shapes, to see a model learn to draw"),
    "judge": ("scenes.judge", "count drawn pictures that have the colour and shape asked for"),
    "score": ("evaluate.command", "FID and CLIP score of drawn pictures, by local networks"),
    "precompute": ("encoding.precompute", "encode images and captions once, before training"),
    "export": ("training.export", "write the model of a run as a folder that diffusers loads"),
    "doctor": ("doctor.doctor", "check each node before a job: GPUs, network, memory, disks, data"),
    "profile": (
        "measuring.profile",
        "time each operator of a step, and tell how far its ceiling is",
    ),
    "memory": (
        "forecast.largest_microbatch",
        "tell the largest micro-batch of each recipe on each GPU",
    ),
    "predict": (
        "forecast.predict",
        "tell images/s, memory and cost on other GPUs, with intervals",
    ),
    "dreambooth": ("launch.dreambooth", "teach a model a subject from a few pictures of it"),
    "repeat": ("launch.repeat", "measure a command several times: an interval between runs"),
    "sweep": ("launch.sweep", "measure a grid or a list of settings, and resume it"),
    "render": ("launch.render", "fill in the manifest of a job on a cluster, and check it"),
    "publish": ("analysis.publish", "copy a run into results/ and rebuild its tables"),
    "report": (
        "analysis.report",
        "make the page of a run, of several, or of a folder of results",
    ),
    "compare": ("analysis.compare", "compare two tables or two sets of runs, row by row"),
    "scaling": ("forecast.cost", "days, GPU-hours, cost and energy of a training, by GPU count"),
}

EPILOG = """\
examples:
  python -m sdbench convert my-images/ --folder my-mds/
  python -m sdbench verify-data my-mds/ --deep
  torchrun --nproc_per_node 8 -m sdbench precompute --remote my-mds/ --folder my-latents/
  srun python -m sdbench doctor
  python -m sdbench dreambooth --help
  python -m sdbench repeat 5 --against 'composer benchmark.py' -- composer benchmark.py --use_ema
  python -m sdbench sweep sweeps/seeds.yaml --dry_run
  python -m sdbench render eks --help
  python -m sdbench publish runs/20261121T050000Z_2-core-cpu_tiny-64px-fast
  python -m sdbench compare runs/repeat_A/baseline runs/repeat_A/candidate
  python -m sdbench convert --help
"""


def load_command(name: str) -> Callable[[Sequence[str]], int]:
    """Import the `main` of a command."""
    return pkgutil.resolve_name(f"sdbench.{COMMANDS[name][0]}:main")


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
            description="A benchmark of training Stable Diffusion, and the tools around it.",
            epilog=EPILOG,
        )
        # What `render` prints is a manifest, to be used as it is.
        output = contextlib.nullcontext() if command == "render" else protected_output()
        with output:
            return load_command(command)(arguments)
    except (ConfigError, RunError) as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        report_cause(type(error).__name__, str(error))
        return error.exit_code
    except OSError as error:  # a full disk, a folder that may not be read
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return EXIT_FAILED
