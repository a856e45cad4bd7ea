"""The flags of the commands of `python -m sdbench scaling`."""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sdbench.scaling.cost import PRICES_FILE, RECIPES_FILE

DEFAULT_GPU_COUNTS = "8,16,...,1024"

EPILOG = """\
examples:
  python -m sdbench scaling fit results/quoted/aws_p5_scaling.csv
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 8,16,...,512
  python -m sdbench scaling cost results/quoted/mosaicml_diffusion_a100.csv --recipe mosaicml
  python -m sdbench scaling plan results/quoted/aws_p5_scaling.csv --recipe mosaicml-all-512 \\
      --max_days 10
  python -m sdbench scaling plan --help
"""

FIT_DESCRIPTION = """\
Fit the step law to the figures of one kind of GPU and one kind of work:

  step_s = micro-batches x time per micro-batch + overhead per step
  micro-batches = ceil(images of one GPU / micro-batch), images of one GPU = floor(batch / GPUs)

With several micro-batch sizes, images of one GPU x time per image joins it; with figures of several
nodes that show it, (nodes - 1) / nodes x communication that is not hidden. Images in a step are
GPUs x images of one GPU, which is less than the batch where it does not divide. The constants are
those with the least squares of relative errors; their 95 % intervals take the figures for
independent.
"""

FIT_EPILOG = """\
examples:
  python -m sdbench scaling fit results/quoted/aws_p5_scaling.csv
  python -m sdbench scaling fit results/quoted/mosaicml_diffusion_benchmark_a100.csv
  python -m sdbench scaling fit results/quoted/mosaicml_diffusion_a100.csv --where image_size=512
  python -m sdbench scaling fit results/quoted/aws_p5_scaling.csv \\
      results/quoted/aws_p4de_p5_single_node.csv --where gpu=H100 ema=true
"""

PREDICT_DESCRIPTION = """\
Fit the step law, and say what it gives for other numbers of GPUs: with one global batch for all
(strong scaling), or with so many images on each GPU (weak scaling). The interval is that of a
figure measured there. Speed-up and efficiency are against the fewest GPUs asked for.
"""

PREDICT_EPILOG = """\
examples:
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 8,16,...,512
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 256,320,384 \\
      --global_batch 2048
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 8,64,512 \\
      --device_batch 32 --out weak.csv
"""

COST_DESCRIPTION = """\
Days, GPU-hours, cost and energy of a whole training at the throughput of a table, or at one that
you give. Days are those of training alone: no evaluation, checkpoints or broken nodes. Prices and
powers are those of prices.yaml, which you edit; energy is that of the GPU boards at the most that
they may draw, without hosts and cooling. Intervals of the throughput are carried through.
"""

COST_EPILOG = """\
examples:
  python -m sdbench scaling cost results/quoted/mosaicml_diffusion_a100.csv --recipe mosaicml
  python -m sdbench scaling cost results/quoted/mosaicml_diffusion_benchmark_a100.csv \\
      --recipe mosaicml-all-512
  python -m sdbench scaling cost --images_per_second 256=4439 512=1420 --num_gpus 32 \\
      --gpu A100-80GB --recipe seed002 --price p4de-on-demand
"""

PLAN_DESCRIPTION = """\
Which number of GPUs, with which micro-batch, trains this by a date or for a sum? Fits the step law
for every resolution of the recipe and tries each number of GPUs. Fits: yes, if the whole 95 %
interval keeps the limits; likely, if only the value does. The best is the cheapest that keeps the
deadline, and with a sum alone the fastest that it pays for.
"""

PLAN_EPILOG = """\
examples:
  python -m sdbench scaling plan results/quoted/mosaicml_diffusion_a100.csv --recipe mosaicml \\
      --micro_batch 16 --max_days 12
  python -m sdbench scaling plan results/quoted/mosaicml_diffusion_benchmark_a100.csv \\
      --recipe mosaicml-all-512 --max_cost 120000
  python -m sdbench scaling plan results/quoted/aws_p5_scaling.csv --recipe mosaicml-all-512 \\
      --by 2027-01-31 --start 2027-01-01 --price 4.50
"""


COMMANDS = {
    "fit": ("time per micro-batch, overhead per step, communication", FIT_DESCRIPTION, FIT_EPILOG),
    "predict": ("throughput on other numbers of GPUs", PREDICT_DESCRIPTION, PREDICT_EPILOG),
    "cost": ("days, GPU-hours, cost and energy of a training", COST_DESCRIPTION, COST_EPILOG),
    "plan": (
        "the number of GPUs and the micro-batch for a deadline or a sum",
        PLAN_DESCRIPTION,
        PLAN_EPILOG,
    ),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read a command line.

    Args:
        argv: A command and its arguments; None takes those of the process.

    Returns:
        The values of its flags; ``command`` is fit, predict, cost or plan.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m sdbench scaling",
        description="Throughput against GPU count; days, cost and energy of a training.",
        epilog=EPILOG,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (help_text, description, epilog) in COMMANDS.items():
        command = commands.add_parser(
            name, help=help_text, description=description, epilog=epilog, formatter_class=raw
        )
        _add_flags(command.add_argument, name)
    return parser.parse_args(argv)


def _add_flags(add: Callable[..., Any], command: str) -> None:
    add("tables", nargs="*", type=Path, metavar="TABLE", help="figures in CSV")
    add(
        "--where",
        nargs="+",
        default=[],
        metavar="COLUMN=VALUE",
        help="use only the rows with these values, or with the only one that begins so",
    )
    if command != "cost":
        add(
            "--micro_batch",
            type=_positive_int,
            metavar="N",
            help="micro-batch of the rows that do not tell theirs, and of what is predicted",
        )
        add(
            "--gpus_per_node",
            type=_positive_int,
            default=8,
            metavar="N",
            help="for the communication between nodes (default: 8)",
        )
    if command in ("cost", "plan"):
        add("--recipe", required=True, metavar="NAME", help="a training of recipes.yaml")
        _add_file(add, "--recipes", RECIPES_FILE)
        add("--price", metavar="NAME", help="which row of prices, or dollars per GPU-hour")
        _add_file(add, "--prices", PRICES_FILE)
    if command == "predict":
        add("--num_gpus", required=True, metavar="LIST", help="e.g. 8,16,64 or 8,16,...,512")
        count = {"type": _positive_int, "metavar": "N"}
        add("--global_batch", **count, help="(default: that of the figures)")
        add("--device_batch", **count, help="images of each GPU, weak scaling")
    if command == "cost":
        add(
            "--images_per_second",
            nargs="+",
            default=[],
            metavar="IMAGE_SIZE=RATE",
            help="instead of a table: images/s of all GPUs together",
        )
        add("--num_gpus", metavar="LIST", help="only these (default: all of the table)")
        add("--gpu", metavar="NAME", help="GPU to look up (default: that of the figures)")
    if command in ("predict", "cost"):
        add("--out", type=Path, metavar="FILE", help="write the rows, of the kind modelled, as CSV")
    if command == "plan":
        add("--num_gpus", metavar="LIST", help=f"(default: {DEFAULT_GPU_COUNTS}, up to the batch)")
        add("--global_batch", type=_positive_int, metavar="N", help="(default: that of the recipe)")
        add("--max_days", type=_positive_float, metavar="DAYS", help="longest that it may take")
        date = {"type": datetime.date.fromisoformat, "metavar": "YYYY-MM-DD"}
        add("--by", **date, help="date by which it has to be done")
        add("--start", **date, help="date on which it starts (default: today)")
        add("--max_cost", type=_positive_float, metavar="USD", help="most that it may cost")


def _add_file(add: Callable[..., Any], flag: str, path: Path) -> None:
    shown = "/".join(path.parts[-3:])
    add(flag, type=Path, default=path, metavar="FILE", help=f"in place of {shown}")


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return number


def _positive_float(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number
