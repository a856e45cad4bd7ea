"""The flags of the commands of `python -m sdbench scaling`."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.report.compare import CompareFlags
from sdbench.scaling.overhead import CHANGES
from sdbench.settings import request
from sdbench.settings.kinds import (
    DATE,
    NOT_NEGATIVE_NUMBER,
    PATH,
    POSITIVE,
    POSITIVE_NUMBER,
    TEXT,
    number,
    one_of,
    whole_number,
)
from sdbench.settings.setting import REQUIRED, setting, shared

# More than 1 is not scaling: the rates were measured badly.
EFFICIENCY = number("a number above 0, at most 1", lambda value: 0 < value <= 1)
DEFAULT_GPU_COUNTS = "8,16,...,1024"
OUT_HELP = "write the rows, of the kind modelled, as CSV"

EPILOG = """\
examples:
  python -m sdbench scaling fit results/quoted/aws_p5_scaling.csv
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 8,16,...,512
  python -m sdbench scaling cost results/quoted/mosaicml_diffusion_a100.csv --recipe mosaicml
  python -m sdbench scaling plan results/quoted/aws_p5_scaling.csv --recipe mosaicml-all-512 \\
      --max_days 10
  python -m sdbench scaling overhead --help
  python -m sdbench scaling plan --help
  python -m sdbench scaling machines --help
"""

FIT_DESCRIPTION = """\
Fit the step law to the figures of one kind of GPU and one kind of work:

  step_s = micro-batches x time per micro-batch + overhead per step
  micro-batches = ceil(images of one GPU / micro-batch),
  images of one GPU = floor(batch / GPUs)

With several micro-batch sizes, images of one GPU x time per image joins it; with figures of several
nodes that show it, (nodes - 1) / nodes x communication and (GPUs - 1) x latency per rank. Where
they do not, the overhead has the communication in it, and is named so. Images in a step are GPUs x
images of one GPU, which is less than the batch where it does not divide. The constants are those
with the least squares of relative errors. Their 95 % intervals have all constants, none negative,
of all terms that agree with the figures, which are taken for independent.

Folders of runs may stand beside tables. Where a run was profiled, or a table has the column
gradient_communication_s, the time that a step waits for gradients is fitted by itself, and the law
also has the part of it that hides behind the backward pass.
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
figure measured there. It holds for every law that agrees with the figures; beyond them, which is
noted, also for a law that is off by a power of what doubles. Speed-up and efficiency are against
the fewest GPUs asked for. Figures that are off by more than 20 % on average predict nothing.
"""

PREDICT_EPILOG = """\
examples:
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 8,16,...,512
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 256,320,384 \\
      --global_batch 2048
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 8,64,512 \\
      --device_batch 32 --out weak.csv
"""

OVERHEAD_DESCRIPTION = """\
What would sharing out, or hiding, the overhead of a step give on more GPUs? The step is that of a
record with --profile_batches, or of phases that you give: a micro-batch on one GPU. Optimizer,
moving average, gradients and what is in no phase count once in a step, the encoders, the forward
and the backward pass in each micro-batch. What gradients take between GPUs that the record did not
have comes from the links; the first row counts all of it, though DDP and FSDP hide a part. All of
it is modelled: measure what matters.

Changes: the GPUs of a node share out optimizer and moving average (shared); gradients travel in 16
bits (16_bit), behind the backward pass (behind_backward), behind the encoders of the next step
(behind_encoders); what is in no phase is hidden, as CUDA graphs do (no_rest).
"""

OVERHEAD_EPILOG = """\
examples:
  python -m sdbench scaling overhead --num_gpus 8,512,1024 --global_batch 2048 --micro_batch 4 \\
      --phases vae_encode=11 text_encode=1 unet_forward=8 backward=16 optimizer=9 ema=4 other=12
      The phases are estimates: take those of a record.
  python -m sdbench scaling overhead --num_gpus 8,64,512 --device_batch 32 --micro_batch 32 \\
      --phases vae_encode=90 text_encode=6 unet_forward=65 backward=130 optimizer=9 ema=4 other=12
  python -m sdbench scaling overhead --help
      With a record: --record runs/<run> --num_gpus 8,512 --global_batch 2048
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

MACHINES_DESCRIPTION = """\
How many machines of which kind a training takes, for how long and at which price, if its pictures
are encoded by GPUs beside the trainers (online preprocessing), in the step of the trainers, or once
before the training. Works from images/s of one trainer, one encoder and one decoder (a CPU worker
that reads, decodes and tokenizes): records of this suite, or numbers. Encoders and decoders are as
many as keep the trainers from waiting, with a margin, or as many as you have: then the slowest
decides. Intervals of the rates are carried to every figure. What it does not know it leaves out:
storage of latents, disturbed runs, and what a network slows down.
"""

MACHINES_EPILOG = """\
examples:
  python -m sdbench scaling machines --recipe seed002 --num_trainers 32 --scaling_efficiency 1 \\
      --trainer_rates 256=138.7 512=44.3 --encoder_rates 256=100 512=32 \\
      --decoder_rates 256=25 512=18 --trainer_machine p4de.24xlarge-reserved \\
      --encoder_machine g5.2xlarge-on-demand
      The rates are made up: give those of your machines.
  python -m sdbench scaling machines --recipe seed002 --num_trainers 32 --scaling_efficiency 0.95 \\
      --trainer_rates 256=138.7:135:142 512=44.3:43:46 --in_step_rates 256=70:68:72 512=24:23:25 \\
      --encoder_rates 256=100:95:105 512=32:31:33 --decoder_rates 256=25:24:26 512=18:17:19 \\
      --trainer_machine p4de.24xlarge-reserved --encoder_machine g5.2xlarge-on-demand \\
      --num_encoders 48 --num_dataset_images 800000000
      With records: --encoder_rates runs/*_precompute-* --decoder_rates runs/*_feed-* ...
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFlags:
    """The figures that a command works with."""

    tables: tuple[Path, ...] = setting(
        PATH,
        (),
        "figures in CSV, or folders of runs",
        is_positional=True,
        takes_several=True,
        spelling="[TABLE ...]",
    )
    where: tuple[str, ...] = shared(CompareFlags, "where")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitFlags(TableFlags):
    """Flags of fit, and of whatever fits the step law."""

    micro_batch: int | None = setting(
        POSITIVE,
        None,
        "micro-batch of the rows that do not tell theirs, and of what is predicted",
    )
    num_gpus_per_node: int = setting(POSITIVE, 8, "for the communication between nodes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeFlags:
    """What is trained, and what a GPU-hour costs."""

    recipe: str = setting(TEXT, REQUIRED, "a training of --recipes")
    recipes: Path | None = setting(
        PATH, None, "YAML file of trainings (default: sdbench/scaling/recipes.yaml)"
    )
    price: str | None = setting(TEXT, None, "a row of --prices, or dollars per GPU-hour")
    prices: Path | None = setting(
        PATH, None, "YAML file of prices and powers (default: sdbench/scaling/prices.yaml)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictFlags(FitFlags):
    """Flags of predict."""

    num_gpus: str = setting(TEXT, REQUIRED, "e.g. 8,16,64 or 8,16,...,512")
    global_batch: int | None = setting(POSITIVE, None, "(default: that of the figures)")
    device_batch: int | None = setting(POSITIVE, None, "images of each GPU, weak scaling")
    out: Path | None = setting(PATH, None, OUT_HELP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverheadFlags:
    """Flags of overhead."""

    record: Path | None = setting(PATH, None, "run of benchmark.py whose phases are taken")
    phases: tuple[str, ...] = setting(
        TEXT,
        (),
        "PHASE=MILLISECONDS of a step of one micro-batch on one GPU, instead of a record",
        takes_several=True,
    )
    micro_batch: int | None = setting(POSITIVE, None, "with --phases: images of the micro-batch")
    num_parameters: int = setting(
        whole_number(1, 10**12),
        865_910_724,
        "with --phases: trained weights, whose gradients travel in 32 bits",
    )
    num_gpus: str = shared(PredictFlags, "num_gpus")
    global_batch: int | None = setting(POSITIVE, None, "images of a step, strong scaling")
    device_batch: int | None = shared(PredictFlags, "device_batch")
    bucket_mib: int | None = setting(
        POSITIVE,
        None,
        "size of the pieces in which gradients travel (default: within a node that of the record, "
        "or 25; between nodes that of a record of several, or 200)",
    )
    changes: tuple[str, ...] = setting(
        one_of(*CHANGES),
        tuple(CHANGES),
        "what is done about the overhead, in this order",
        takes_several=True,
    )
    gpus_per_node: int = setting(POSITIVE, 8, "that share a fast link")
    # AWS's page of p5 instances: NVSwitch of 900 GB/s a GPU in both directions together, and
    # 3200 Gbit/s of EFA for 8 GPUs.
    node_gb_per_s: float = setting(
        POSITIVE_NUMBER, 450.0, "what a GPU sends within its node, in GB/s"
    )
    network_gb_per_s: float = setting(
        POSITIVE_NUMBER, 50.0, "what a GPU sends to other nodes, in GB/s"
    )
    out: Path | None = setting(PATH, None, OUT_HELP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostFlags(RecipeFlags, TableFlags):
    """Flags of cost."""

    images_per_second: tuple[str, ...] = setting(
        TEXT,
        (),
        "IMAGE_SIZE=RATE, instead of a table: images/s of all GPUs together",
        takes_several=True,
    )
    num_gpus: str | None = setting(TEXT, None, "only these (default: all of the table)")
    gpu: str | None = setting(TEXT, None, "GPU to look up (default: that of the figures)")
    out: Path | None = setting(PATH, None, OUT_HELP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFlags(RecipeFlags, FitFlags):
    """Flags of plan."""

    num_gpus: str | None = setting(
        TEXT, None, f"numbers to try (default: {DEFAULT_GPU_COUNTS}, up to the batch)"
    )
    global_batch: int | None = setting(POSITIVE, None, "(default: that of the recipe)")
    max_days: float | None = setting(POSITIVE_NUMBER, None, "longest that it may take")
    by: datetime.date | None = setting(DATE, None, "date by which it has to be done")
    start: datetime.date | None = setting(DATE, None, "date on which it starts (default: today)")
    max_cost: float | None = setting(POSITIVE_NUMBER, None, "most that it may cost, in USD")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachinesFlags:
    """Flags of machines."""

    recipe: str = shared(RecipeFlags, "recipe")
    recipes: Path | None = shared(RecipeFlags, "recipes")
    num_trainers: int = setting(POSITIVE, REQUIRED, "GPUs that train")
    scaling_efficiency: float = setting(
        EFFICIENCY,
        REQUIRED,
        "assumed: images/s of one of these trainers over those in --trainer_rates; 1 if these were "
        "measured on as many",
    )
    trainer_rates: tuple[str, ...] = setting(
        TEXT,
        REQUIRED,
        "images/s of one trainer that is given latents: records of benchmark.py, or SIZE=RATE, or "
        "SIZE=RATE:LOW:HIGH",
        takes_several=True,
    )
    encoder_rates: tuple[str, ...] = setting(
        TEXT,
        REQUIRED,
        "images/s of one encoder: records of precompute or of data.py --engine ray, or so",
        takes_several=True,
    )
    decoder_rates: tuple[str, ...] = setting(
        TEXT,
        REQUIRED,
        "images/s of one CPU worker with a core of its own: records of data.py, or so",
        takes_several=True,
    )
    in_step_rates: tuple[str, ...] = setting(
        TEXT,
        (),
        "images/s of one trainer that encodes in its step: records of benchmark.py, or so "
        "(default: this way is left out)",
        takes_several=True,
    )
    num_encoders: int | None = setting(POSITIVE, None, "(default: as many as the trainers take)")
    num_decoders: int | None = setting(POSITIVE, None, "(default: as many as the trainers take)")
    margin: float = setting(
        NOT_NEGATIVE_NUMBER, 0.1, "share by which encoders and decoders may do more than is taken"
    )
    trainer_machine: str = setting(TEXT, REQUIRED, "a row under machines in --prices")
    encoder_machine: str = setting(TEXT, REQUIRED, "likewise")
    decoder_machine: str | None = setting(
        TEXT, None, "likewise (default: the CPU cores of the encoders' machines)"
    )
    num_dataset_images: int | None = setting(
        whole_number(1, 10**12),
        None,
        "pictures that are encoded if that is done once (default: those of each stage, none twice)",
    )
    text_embedding_dim: int = setting(
        POSITIVE, 1024, "width of the text embeddings, for the size of latents"
    )
    prices: Path | None = shared(RecipeFlags, "prices")
    out: Path | None = setting(PATH, None, OUT_HELP)


class Command(NamedTuple):
    """One of the commands.

    Attributes:
        flags: Dataclass of its settings.
        summary: What it gives, in a line.
        description: What it does.
        epilog: Examples.
    """

    flags: type
    summary: str
    description: str
    epilog: str


COMMANDS = {
    "fit": Command(
        FitFlags,
        "time per micro-batch, overhead per step, communication",
        FIT_DESCRIPTION,
        FIT_EPILOG,
    ),
    "predict": Command(
        PredictFlags,
        "throughput on other numbers of GPUs",
        PREDICT_DESCRIPTION,
        PREDICT_EPILOG,
    ),
    "overhead": Command(
        OverheadFlags,
        "what sharing out or hiding optimizer, EMA and communication gives on more GPUs",
        OVERHEAD_DESCRIPTION,
        OVERHEAD_EPILOG,
    ),
    "cost": Command(
        CostFlags, "days, GPU-hours, cost and energy of a training", COST_DESCRIPTION, COST_EPILOG
    ),
    "plan": Command(
        PlanFlags,
        "the number of GPUs and the micro-batch for a deadline or a sum",
        PLAN_DESCRIPTION,
        PLAN_EPILOG,
    ),
    "machines": Command(
        MachinesFlags,
        "trainers, encoders and CPU workers: how many machines, for how long, at which price",
        MACHINES_DESCRIPTION,
        MACHINES_EPILOG,
    ),
}


def parse(argv: Sequence[str] | None) -> tuple[str, Any]:
    """Read a command line."""
    prog = "python -m sdbench scaling"
    name, rest = request.choose_command(
        {name: command.summary for name, command in COMMANDS.items()},
        argv,
        prog=prog,
        description="Throughput against GPU count; days, cost and energy of a training.",
        epilog=EPILOG,
    )
    flags, _, description, epilog = COMMANDS[name]
    prog = f"{prog} {name}"
    parsed = request.parse(flags, rest, prog=prog, description=description, epilog=epilog)
    return name, parsed.config
