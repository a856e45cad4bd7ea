"""The commands `scaling fit` and `scaling predict`: the law of a step, and what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sdbench.base.errors import ConfigError
from sdbench.report.figures import as_text
from sdbench.report.tables import Cell, Field, tabulate
from sdbench.scaling import points
from sdbench.scaling.points import IMAGE_SIZE, KIND_OF_WORK, Row, range_field, value_field
from sdbench.settings.kinds import PATH, POSITIVE
from sdbench.settings.setting import REQUIRED, setting
from sdbench.statistics.law import MAX_MEAN_ERROR, Prediction, Setup, StepLaw, fit_law

FIT_DESCRIPTION = """\
Fit the step law to the figures of one kind of GPU and one kind of work:

  step_s = micro-batches x time per micro-batch + overhead per step
  micro-batches = ceil(images of one GPU / micro-batch),
  images of one GPU = floor(batch / GPUs)

Figures of several micro-batch sizes add the term images of one GPU x time per image. Figures of
several nodes, if they determine it, add (nodes - 1) / nodes x communication and (GPUs - 1) x
latency per rank; otherwise the overhead includes the communication, and its name says so. A step
has GPUs x images of one GPU, which is less than a batch that does not divide evenly. The constants
minimize the squares of the relative errors. Their 95 % intervals cover all non-negative constants
of all terms that agree with the figures, which are assumed to be independent.

Tables and folders of runs can be mixed. If a run was profiled, or a table has the column
gradient_communication_s, the time that a step waits for gradients is fitted separately, and the law
also has the part of the communication that the backward pass hides.
"""

FIT_EPILOG = """\
examples:
  python -m sdbench scaling fit results/quoted/aws_p5_scaling.csv
  python -m sdbench scaling fit results/quoted/mosaicml_diffusion_a100.csv --where image_size=512
  python -m sdbench scaling fit results/quoted/aws_p5_scaling.csv \\
      results/quoted/aws_p4de_p5_single_node.csv --where gpu=H100 ema=true
"""

PREDICT_DESCRIPTION = """\
Fit the step law and predict other numbers of GPUs, with a fixed global batch (strong scaling) or a
fixed number of images on each GPU (weak scaling). The interval is for a figure measured there and
covers every law that agrees with the figures. Beyond the figures, which is noted, it grows with
each doubling, as the law may be off by a power of what doubles. Speed-up and efficiency are over
the law at the fewest GPUs of the figures, or at fewer if you ask for fewer. Figures that are off
by more than 20 % on average predict nothing.
"""

PREDICT_EPILOG = """\
examples:
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 8,16,...,512
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 256,320,384 \\
      --global_batch 2048
  python -m sdbench scaling predict results/quoted/aws_p5_scaling.csv --num_gpus 8,64,512 \\
      --device_batch 32 --out weak.csv
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitFlags(points.TableFlags):
    """Flags of every command that fits the step law."""

    micro_batch: int | None = setting(
        POSITIVE, None, "micro-batch of rows that do not state theirs, and of predictions"
    )
    num_gpus_per_node: int = setting(POSITIVE, 8, "for the communication between nodes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictFlags(FitFlags):
    """Flags of predict."""

    num_gpus: tuple[int, ...] = setting(points.COUNTS, REQUIRED, "e.g. 8,16,64 or 8,16,...,512")
    global_batch: int | None = setting(
        POSITIVE, None, "images of a step, strong scaling (default: that of the figures)"
    )
    device_batch: int | None = setting(POSITIVE, None, "images of each GPU, weak scaling")
    out: Path | None = setting(PATH, None, points.OUT_HELP)


def run_fit(arguments: FitFlags) -> None:
    """Fit the law, and print the constants and the error at each figure."""
    rows = points.read_rows(arguments)
    law = _fit(rows, arguments)
    constants = [{"constant": term, "seconds": law.constant(term)} for term in law.terms]
    errors = law.errors()
    figures = [
        {
            **points.setup_columns(point.setup),
            "step_time_s": point.step_time_s,
            "images_per_second": points.make_amount(point.images_per_second),
            "law": point.setup.images_per_step / law.step_time_s(point.setup),
            "error": Cell(f"{error:+.1%}", error),
        }
        for point, error in zip(law.points, errors, strict=True)
    ]
    points.show(
        _describe_figures(rows, law),
        tabulate(CONSTANT, constants),
        tabulate((*FIGURE, *LAW), figures),
    )
    largest = max(map(abs, errors))
    print(f"\nerror of {len(errors)} figures: mean {law.mean_error:.2%}, max {largest:.2%}")
    if law.mean_error > MAX_MEAN_ERROR:
        print(
            "warning: these figures do not follow the law, and nothing is predicted from it; see "
            "the largest errors"
        )


def run_predict(arguments: PredictFlags) -> None:
    """Print the predictions for other GPU counts, and write them to the file of --out."""
    rows = points.read_rows(arguments)
    law = _fit_to_predict(rows, arguments)
    global_batch = _global_batch(rows, arguments)
    # The first is only compared with: of the numbers asked for, it would always be 100 % efficient.
    fewest = min(*arguments.num_gpus, *(point.setup.num_gpus for point in law.points))
    first, *predictions = [
        law.predict(setup)
        for setup in _make_setups(
            (fewest, *arguments.num_gpus),
            global_batch=global_batch,
            device_batch=arguments.device_batch,
            micro_batch=_micro_batch(law, arguments),
        )
    ]
    names = " and ".join(path.name for path in arguments.tables)
    common = {
        "source": f"step law fitted to {names} ({points.describe_sources(rows)})",
        "kind": points.MODELLED,
        **{column: points.first_known(rows, column) for column in (*KIND_OF_WORK, IMAGE_SIZE)},
    }
    found = [
        {**common, **_prediction_row(one, first, asked_images=global_batch)} for one in predictions
    ]
    kind = f"strong scaling: a global batch of {global_batch}"
    if global_batch is None:
        kind = f"weak scaling: {arguments.device_batch} images of each GPU in a step"
    against = f"speed-up and efficiency: over the law at {fewest} GPUs"
    points.show(
        [*_describe_figures(rows, law), kind, against], tabulate((*FIGURE, *PREDICTION), found)
    )
    points.write_rows(arguments.out, found)


def _fit_to_predict(rows: Sequence[Row], arguments: FitFlags) -> StepLaw:
    """Fit the law, and refuse one that its own figures do not follow."""
    law = _fit(rows, arguments)
    if law.mean_error > MAX_MEAN_ERROR:
        raise ConfigError(
            "the figures do not follow the step law, so it predicts nothing",
            value=f"a mean error of {law.mean_error:.0%}",
            allowed=f"at most {MAX_MEAN_ERROR:.0%}; python -m sdbench scaling fit shows the error "
            "of each figure",
            flag="TABLE and --where",
        )
    return law


def _fit(rows: Sequence[Row], arguments: FitFlags) -> StepLaw:
    points.check_one_kind(rows, (*KIND_OF_WORK, IMAGE_SIZE))
    figures = points.make_points(rows, micro_batch=arguments.micro_batch)
    return fit_law(figures, gpus_per_node=arguments.num_gpus_per_node)


def _micro_batch(law: StepLaw, arguments: FitFlags) -> int:
    if arguments.micro_batch is not None:
        return arguments.micro_batch
    if len(law.micro_batches) > 1:
        raise ConfigError(
            "the figures have several micro-batches, and a prediction is for one",
            value="no --micro_batch",
            allowed=" | ".join(map(str, law.micro_batches)) + ", or another",
            flag="--micro_batch",
        )
    return law.micro_batches[0]


def _global_batch(rows: Sequence[Row], arguments: PredictFlags) -> int | None:
    """The global batch of strong scaling: the given one, or that of all figures."""
    if arguments.device_batch is not None or arguments.global_batch is not None:
        return arguments.global_batch
    values = points.known_values(rows, "global_batch")
    return values[0] if len(values) == 1 else None


def _make_setups(
    counts: Sequence[int],
    *,
    global_batch: int | None,
    device_batch: int | None,
    micro_batch: int,
) -> list[Setup]:
    """Divide a step among each number of GPUs.

    Either the global batch is fixed (strong scaling) or the batch of each GPU (weak scaling).
    """
    if (global_batch is None) == (device_batch is None):
        raise ConfigError(
            "the batch is either the same for all numbers of GPUs or grows with them",
            value="neither"
            if global_batch is None
            else f"--global_batch {global_batch} --device_batch {device_batch}",
            allowed="one of the two",
            flag="--global_batch or --device_batch",
        )
    return [
        Setup(num_gpus, device_batch, micro_batch)
        if global_batch is None
        else points.split_batch(
            global_batch=global_batch, num_gpus=num_gpus, micro_batch=micro_batch
        )
        for num_gpus in counts
    ]


def _describe_figures(rows: Sequence[Row], law: StepLaw) -> list[str]:
    columns = ("gpu", IMAGE_SIZE, "latents", "precision", "ema", "model", "preset")
    known = {column: points.first_known(rows, column) for column in columns}
    kinds = [f"{name} {as_text(value)}" for name, value in known.items() if value is not None]
    lines = [f"figures: {len(law.points)}, {', '.join(kinds)}"]
    if len(rows) > len(law.points):
        lines.append(f"left out: {len(rows) - len(law.points)} modelled, which are no evidence")
    return [*lines, *law.notes]


def _prediction_row(one: Prediction, first: Prediction, *, asked_images: int | None) -> Row:
    """A prediction, compared with the first; without `asked_images` it is of weak scaling."""
    speed_up = one.images_per_second[0] / first.images_per_second[0]
    return {
        **points.setup_columns(one.setup),
        "global_batch": asked_images or one.setup.images_per_step,
        "images_per_second": one.images_per_second,
        "step_time_s": one.step_time_s,
        "speed_up": speed_up,
        "efficiency_percent": 100 * speed_up * first.setup.num_gpus / one.setup.num_gpus,
        "extrapolated": one.is_extrapolated,
    }


def _micro_batches(row: Row) -> str:
    """E.g. ``2 of 4, the last of 1``."""
    device_batch = row["images_per_step"] // row["num_gpus"]
    text = f"{row['num_micro_batches']} of {min(row['micro_batch'], device_batch)}"
    if row["num_micro_batches"] > 1 and row["last_micro_batch"] < row["micro_batch"]:
        text += f", the last of {row['last_micro_batch']}"
    return text


def _note(row: Row) -> str:
    notes = ["extrapolated"] if row["extrapolated"] else []
    if row["images_per_step"] != row["global_batch"]:
        notes.insert(0, f"{row['images_per_step']} of {row['global_batch']} images in a step")
    return "; ".join(notes)


# The columns of tables, whose rows have the names of the columns of the CSV files.
FIGURE = (
    Field("GPUs", "num_gpus"),
    Field("images/step", "images_per_step"),
    Field("per GPU", lambda row: row["images_per_step"] // row["num_gpus"]),
    Field("micro-batches", _micro_batches),
    Field("step, s", "step_time_s"),
    value_field("images/s", "images_per_second", digits=5),
)
LAW = (Field("law", "law", 5), Field("error", "error"))
CONSTANT = (
    Field("constant", "constant"),
    value_field("seconds", "seconds"),
    range_field("95 % interval", "seconds"),
)
PREDICTION = (
    range_field("95 % interval", "images_per_second", unknown="0 to unbounded"),
    Field("rate per GPU", lambda row: float(row["images_per_second"][0]) / row["num_gpus"]),
    Field("speed-up", lambda row: Cell(f"{row['speed_up']:.2f}x", row["speed_up"])),
    Field(
        "efficiency",
        lambda row: Cell(f"{row['efficiency_percent']:.0f}%", row["efficiency_percent"]),
    ),
    Field("note", _note),
)
