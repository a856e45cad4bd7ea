"""How are a law, predictions, costs and plans told?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.escape import for_terminal
from sdbench.record.row import format_csv
from sdbench.record.store import replace_file
from sdbench.report.tables import Cell, Column, Table, make_cell
from sdbench.report.terminal import NOT_KNOWN, format_number
from sdbench.report.text_table import to_terminal
from sdbench.scaling.cost import Estimate, Value
from sdbench.scaling.plan import Candidate
from sdbench.statistics.law import Prediction, Setup, StepLaw

# Columns of a table of figures, and those that only a prediction has.
PREDICTION_COLUMNS = (
    "source",
    "kind",
    "gpu",
    "num_gpus",
    "image_size",
    "latents",
    "ema",
    "micro_batch",
    "global_batch",
    "images_per_step",
    "images_per_second",
    "images_per_second_low",
    "images_per_second_high",
    "precision",
    "engine",
    "model",
    "preset",
    "num_micro_batches",
    "last_micro_batch",
    "step_time_s",
    "speed_up",
    "efficiency_percent",
    "extrapolated",
)
COST_COLUMNS = (
    "source",
    "kind",
    "gpu",
    "num_gpus",
    "recipe",
    "latents",
    *(
        f"{name}{end}"
        for name in ("days_to_train", "gpu_hours", "cost_usd", "energy_kwh")
        for end in ("", "_low", "_high")
    ),
)


def format_lines(lines: Sequence[str]) -> str:
    """Facts, one a line."""
    return "\n".join(for_terminal(line) for line in lines)


def format_law(law: StepLaw) -> str:
    """Constants with their intervals, and how far each figure is from the law."""
    constants = Table(
        "law",
        "",
        [Column("constant"), Column("seconds", is_number=True), Column("95 % interval")],
        [
            [make_cell(term), make_cell(value), make_cell(_range(low, high))]
            for term in law.terms
            for value, low, high in [law.constant(term)]
        ],
    )
    errors = law.errors()
    points = Table(
        "points",
        "",
        [
            *_setup_columns(),
            Column("step, s", is_number=True),
            Column("images/s", is_number=True),
            Column("law", is_number=True),
            Column("error", is_number=True),
        ],
        [
            [
                *_setup_cells(point.setup),
                make_cell(point.step_time_s),
                make_cell(point.images_per_second, num_digits=5),
                make_cell(law.predict(point.setup).images_per_second, num_digits=5),
                make_cell(f"{error:+.1%}"),
            ]
            for point, error in zip(law.points, errors, strict=True)
        ],
    )
    sizes = [abs(error) for error in errors]
    summary = (
        f"error of {len(sizes)} figures: mean {sum(sizes) / len(sizes):.2%}, max {max(sizes):.2%}"
    )
    return "\n\n".join((to_terminal(constants), to_terminal(points), summary))


def format_predictions(predictions: Sequence[Prediction], *, asked_images: int | None) -> str:
    """What the law gives.

    Args:
        predictions: From the fewest GPUs on.
        asked_images: The global batch that was asked for; None where it grows with the GPUs.
    """
    rows = [
        [
            *_setup_cells(one.setup),
            make_cell(one.step_time_s),
            make_cell(one.images_per_second, num_digits=5),
            make_cell(_range(one.images_per_second_low, one.images_per_second_high)),
            make_cell(one.images_per_second / one.setup.num_gpus),
            Cell(f"{_speed_up(one, predictions[0]):.2f}x", None),
            Cell(f"{_efficiency(one, predictions[0]):.0%}", None),
            make_cell(_notes(one, asked_images), unknown=""),
        ]
        for one in predictions
    ]
    columns = [
        *_setup_columns(),
        Column("step, s", is_number=True),
        Column("images/s", is_number=True),
        Column("95 % interval"),
        Column("per GPU", is_number=True),
        Column("speed-up", is_number=True),
        Column("efficiency", is_number=True),
        Column("note"),
    ]
    return to_terminal(Table("predictions", "", columns, rows))


def prediction_rows(
    predictions: Sequence[Prediction], *, common: dict[str, Any], asked_images: int | None
) -> list[dict[str, Any]]:
    """Predictions as rows of a table of figures.

    Args:
        predictions: From the fewest GPUs on.
        common: What all rows share: source, gpu, image_size, ...
        asked_images: The global batch that was asked for; None where it grows with the GPUs.
    """
    return [
        {
            **common,
            "kind": "modelled",
            "num_gpus": one.setup.num_gpus,
            "micro_batch": one.setup.micro_batch,
            "global_batch": asked_images or one.setup.images_per_step,
            "images_per_step": one.setup.images_per_step,
            "images_per_second": one.images_per_second,
            "images_per_second_low": one.images_per_second_low,
            "images_per_second_high": one.images_per_second_high,
            "num_micro_batches": one.setup.num_micro_batches,
            "last_micro_batch": one.setup.last_micro_batch,
            "step_time_s": one.step_time_s,
            "speed_up": _speed_up(one, predictions[0]),
            "efficiency_percent": 100 * _efficiency(one, predictions[0]),
            "extrapolated": one.is_extrapolated,
        }
        for one in predictions
    ]


def format_estimates(estimates: Sequence[Estimate]) -> str:
    """Days, GPU-hours, cost and energy by GPU count."""
    rows = [_cost_cells(one) for one in estimates]
    return to_terminal(Table("cost", "", _cost_columns(), rows))


def estimate_rows(estimates: Sequence[Estimate], *, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Estimates as rows of a CSV file; `common` is what all of them share."""
    rows = []
    for one in estimates:
        row = {**common, "kind": "modelled", "num_gpus": one.num_gpus}
        for name, value in (
            ("days_to_train", one.days),
            ("gpu_hours", one.gpu_hours),
            ("cost_usd", one.cost_usd),
            ("energy_kwh", one.energy_kwh),
        ):
            if value is not None:
                row |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
        rows.append(row)
    return rows


def format_candidates(candidates: Sequence[Candidate], *, best: Candidate | None) -> str:
    """All candidates, with the best marked."""
    columns = [
        *_cost_columns(),
        Column("micro-batch"),
        Column("images/step", is_number=True),
        Column("fits"),
        Column("note"),
    ]
    rows = [
        [
            *_cost_cells(one.estimate),
            make_cell(", ".join(str(stage.setup.micro_batch) for stage in one.predictions)),
            make_cell(one.predictions[0].setup.images_per_step),
            make_cell(one.fits),
            make_cell(_candidate_notes(one, best), unknown=""),
        ]
        for one in candidates
    ]
    return to_terminal(Table("plan", "", columns, rows))


def describe_value(value: Value | None, unit: str) -> str:
    """A number with its unit and interval."""
    if value is None:
        return f"{NOT_KNOWN} {unit}"
    text = f"{format_number(value.value)} {unit}"
    return text if value.low is None else f"{text} ({_range(value.low, value.high)})"


def write_csv(path: Path, rows: Sequence[dict[str, Any]], *, columns: Sequence[str]) -> None:
    """Write rows to a CSV file.

    Raises:
        ConfigError: If it cannot be written.
    """
    try:
        replace_file(path, format_csv(rows, columns=columns))
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written ({error.strerror})",
            value=str(path),
            allowed="a file in a folder that exists and that this user may write",
            flag="--out",
        ) from None
    print(f"\nwrote {for_terminal(path)}")


def _setup_columns() -> list[Column]:
    return [
        Column("GPUs", is_number=True),
        Column("images/step", is_number=True),
        Column("per GPU", is_number=True),
        Column("micro-batches"),
    ]


def _setup_cells(setup: Setup) -> list[Cell]:
    return [
        make_cell(setup.num_gpus),
        make_cell(setup.images_per_step),
        make_cell(setup.device_batch),
        make_cell(_micro_batches(setup)),
    ]


def _micro_batches(setup: Setup) -> str:
    """E.g. ``2 of 4``, or ``2 of 4, the last of 1``."""
    text = f"{setup.num_micro_batches} of {min(setup.micro_batch, setup.device_batch)}"
    if setup.num_micro_batches > 1 and setup.last_micro_batch < setup.micro_batch:
        text += f", the last of {setup.last_micro_batch}"
    return text


def _cost_columns() -> list[Column]:
    return [
        Column("GPUs", is_number=True),
        Column("days", is_number=True),
        Column("95 % interval"),
        Column("GPU-hours", is_number=True),
        Column("cost, USD", is_number=True),
        Column("95 % interval"),
        Column("energy of the boards, kWh", is_number=True),
    ]


def _cost_cells(one: Estimate) -> list[Cell]:
    return [
        make_cell(one.num_gpus),
        make_cell(one.days.value),
        make_cell(_interval(one.days), unknown=""),
        make_cell(round(one.gpu_hours.value)),
        make_cell(None if one.cost_usd is None else round(one.cost_usd.value)),
        make_cell(_interval(one.cost_usd), unknown=""),
        make_cell(None if one.energy_kwh is None else round(one.energy_kwh.value)),
    ]


def _interval(value: Value | None) -> str | None:
    return None if value is None or value.low is None else _range(value.low, value.high)


def _range(low: float, high: float | None) -> str:
    return f"{format_number(low)} to {'unbounded' if high is None else format_number(high)}"


def _notes(one: Prediction, asked_images: int | None) -> str | None:
    notes = []
    if asked_images is not None and one.setup.images_per_step != asked_images:
        notes.append(f"{one.setup.images_per_step} of {asked_images} images in a step")
    if one.is_extrapolated:
        notes.append("extrapolated")
    return "; ".join(notes) or None


def _candidate_notes(one: Candidate, best: Candidate | None) -> str | None:
    notes = ["<- best"] if one is best else []
    if any(stage.is_extrapolated for stage in one.predictions):
        notes.append("extrapolated")
    return " ".join(notes) or None


def _speed_up(one: Prediction, first: Prediction) -> float:
    return one.images_per_second / first.images_per_second


def _efficiency(one: Prediction, first: Prediction) -> float:
    return _speed_up(one, first) * first.setup.num_gpus / one.setup.num_gpus
