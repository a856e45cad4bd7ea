"""The commands `python -m sdbench scaling fit | predict | cost`."""

from __future__ import annotations

from collections.abc import Sequence

from sdbench.base.errors import EXIT_OK
from sdbench.scaling import cost, predict
from sdbench.settings import request

PROG = "python -m sdbench scaling"

EPILOG = """\
examples:
  python -m sdbench scaling fit results/quoted/aws_p5_scaling.csv
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 8,16,...,512
  python -m sdbench scaling cost results/quoted/mosaicml_diffusion_a100.csv --recipe mosaicml
"""


# The flags of a command, what prints its answer, and the texts of its help.
COMMANDS = {
    "fit": (
        predict.FitFlags,
        predict.run_fit,
        "time per micro-batch, overhead per step, communication",
        predict.FIT_DESCRIPTION,
        predict.FIT_EPILOG,
    ),
    "predict": (
        predict.PredictFlags,
        predict.run_predict,
        "throughput on other numbers of GPUs",
        predict.PREDICT_DESCRIPTION,
        predict.PREDICT_EPILOG,
    ),
    "cost": (
        cost.CostFlags,
        cost.run,
        "days, GPU-hours, cost and energy of a training",
        cost.__doc__,
        cost.EPILOG,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return its exit code."""
    name, rest = request.choose_command(
        {name: summary for name, (_, _, summary, *_) in COMMANDS.items()},
        argv,
        prog=PROG,
        description="Throughput against GPU count; days, cost and energy of a training.",
        epilog=EPILOG,
    )
    flags, run, _, description, epilog = COMMANDS[name]
    prog = f"{PROG} {name}"
    run(request.parse(flags, rest, prog=prog, description=description, epilog=epilog).config)
    return EXIT_OK
