"""The tables, sentences and files of a profile."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from sdbench.base.escape import for_csv
from sdbench.report.tables import Column, Table, make_cell, to_terminal
from sdbench.report.terminal import format_number
from sdbench.tasks.profile.result import Profile
from sdbench.tasks.profile.roofline import Row

# The figures of a row: their names in the files and in a terminal.
FIGURES = {
    "calls": "calls",
    "time_ms": "ms",
    "step_percent": "% of step",
    "gflop": "GFLOP",
    "tflop_per_s": "TFLOP/s",
    "arithmetic_percent": "% of arithmetic",
    "gb": "GB",
    "gb_per_s": "GB/s",
    "memory_percent": "% of memory",
    "floor_ms": "floor ms",
    "bound": "bound by",
}
NAMES = ("operator", "phase", "shapes", "types")
# So little of a step is not worth a warning.
MIN_PERCENT_TO_WARN = 1.0
MAX_NAMED = 3

LEGEND = """\
% of arithmetic, % of memory: of the ceilings above; floor: the time at the ceiling that binds.
GFLOP: matrix products and convolutions. GB: each input read once, each output written once."""


def figures_of(row: Row, profile: Profile) -> dict[str, Any]:
    """The figures of a row in the units of `FIGURES`; None is not known."""
    return {
        "calls": row.calls,
        "time_ms": _scaled(row.time_s, 1e3),
        "step_percent": None if row.time_s is None else profile.share(row.time_s),
        "gflop": _scaled(row.flop, 1e-9),
        "tflop_per_s": row.tflop_per_s,
        "arithmetic_percent": row.arithmetic_percent,
        "gb": _scaled(row.num_bytes, 1e-9),
        "gb_per_s": row.gb_per_s,
        "memory_percent": row.memory_percent,
        "floor_ms": _scaled(row.floor_s, 1e3),
        "bound": row.bound,
    }


def format_profile(profile: Profile, *, top: int) -> str:
    """The tables for a terminal.

    Args:
        profile: The figures.
        top: Rows of the tables of operators.
    """
    operators, shapes = profile.by_operator[:top], profile.rows[:top]
    sections = [
        f"Ceilings measured here and now: {describe_ceilings(profile)}",
        _section("By phase", profile.by_phase, profile, names=("phase",)),
        _section(
            f"The {len(operators)} operators of the longest time",
            operators,
            profile,
            names=("operator", "phase"),
        ),
        _section(
            f"The {len(shapes)} of the longest time, each by the shapes of its tensors",
            shapes,
            profile,
            names=NAMES,
        ),
    ]
    if profile.kernels:
        sections.append(_kernels(profile, top=top))
    return "\n\n".join([*sections, LEGEND])


def describe_ceilings(profile: Profile) -> str:
    """Both ceilings in words, with the kernels that reach them."""
    tflops = ", ".join(
        f"{format_number(ceiling.rate)} TFLOP/s in {dtype} ({ceiling.kernel})"
        for dtype, ceiling in sorted(profile.ceilings.arithmetic.items())
    )
    memory = profile.ceilings.memory
    return f"arithmetic {tflops}; memory {format_number(memory.rate)} GB/s ({memory.kernel})"


def describe_floors(profile: Profile) -> str:
    """The step as it is and what it would be at the ceilings, one below the other."""
    lines = [
        ("as it is", profile.step_s),
        ("floor of its operators, one after the other", profile.floor_s),
        (f"floor of the model's FLOPs in {profile.main_dtype}", profile.ideal_floor_s),
        ("floor of the same and of AdamW in one pass", profile.needed_floor_s),
    ]
    rows = [
        [
            make_cell(name),
            make_cell(1e3 * time_s),
            make_cell(profile.num_images / time_s),
            make_cell(100 * time_s / profile.step_s, num_digits=3),
        ]
        for name, time_s in lines
    ]
    columns = [
        Column("a step"),
        *(Column(name, is_number=True) for name in ("ms", "images/s", "% of it")),
    ]
    return to_terminal(Table("floors", "", columns, rows))


def describe_coverage(profile: Profile, *, on_gpu: bool) -> list[str]:
    """How much of the step the tables explain, and what they leave out, as sentences.

    Args:
        profile: The figures.
        on_gpu: Whether times are those of a GPU's kernels.
    """
    outside = "the GPU waits" if on_gpu else "Python, autograd and the loader run"
    ratio = profile.counted_flop / profile.model_flop
    lines = [
        f"{profile.explained_percent:.1f} % of the profiled step is in operators whose work is "
        f"known; in {profile.share(profile.outside_s):.1f} % {outside}.",
        f"The step computes {ratio:.3f} times the model's FLOPs; attention kernels that keep no "
        "scores and activation checkpointing compute some twice.",
        f"The profiler makes a step {profile.profiled_step_s / profile.step_s:.2f} times as long; "
        "shares are of the longer one.",
    ]
    below = [row for row in profile.rows if row.time_s and row.time_s < (row.floor_s or 0.0)]
    below_percent = profile.share(sum(row.time_s or 0.0 for row in below))
    if below_percent >= MIN_PERCENT_TO_WARN:
        lines.append(
            f"Operators with {below_percent:.1f} % of the step took less than their floor: they "
            "found their inputs in a cache, and the floor of a step is no bound for them."
        )
    return lines


def warnings_of(profile: Profile, *, is_compiled: bool) -> list[str]:
    """What a reader must know not to be misled.

    Args:
        profile: The figures.
        is_compiled: Whether sub-models went through torch.compile.
    """
    lines = []
    unmatched_percent = profile.share(sum(row.time_s or 0.0 for row in profile.unmatched))
    if unmatched_percent >= MIN_PERCENT_TO_WARN:
        names = ", ".join(row.name for row in profile.unmatched[:MAX_NAMED])
        lines.append(
            f"warning: {unmatched_percent:.1f} % of the profiled step is in operators that the "
            f"counted step does not have, so that their work is not known: {names}"
        )
    changed = [row for row in profile.rows if row.calls_differ]
    if changed and not is_compiled:
        names = ", ".join(row.name for row in changed[:MAX_NAMED])
        lines.append(
            f"warning: {len(changed)} operators were called another number of times in the "
            f"profiled steps than in the counted one: {names}"
        )
    if is_compiled:
        lines.append(
            "warning: work was counted on the operators that torch.compile began with. Matrix "
            "products and convolutions that it kept are joined with their times; the work of its "
            "fused kernels is not known, only their time, and the floors are those of the step "
            "before fusion."
        )
    return lines


def to_csv(profile: Profile) -> str:
    """Every operator by its shapes."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*NAMES, *FIGURES])
    for row in profile.rows:
        cells = [*_names_of(row, NAMES), *figures_of(row, profile).values()]
        writer.writerow([for_csv(cell) for cell in cells])
    return buffer.getvalue()


def to_json(profile: Profile) -> dict[str, Any]:
    """The figures but for the single operators, which to_csv has."""
    return {
        "ceilings": {
            "tflops": {dtype: one.rate for dtype, one in profile.ceilings.arithmetic.items()},
            "gb_per_s": profile.ceilings.memory.rate,
            "kernels": {dtype: one.kernel for dtype, one in profile.ceilings.arithmetic.items()}
            | {"memory": profile.ceilings.memory.kernel},
        },
        "step": {
            "num_images": profile.num_images,
            "step_ms": 1e3 * profile.step_s,
            "images_per_second": profile.num_images / profile.step_s,
            "profiled_step_ms": 1e3 * profile.profiled_step_s,
            "floor_ms": 1e3 * profile.floor_s,
            "images_per_second_at_floor": profile.num_images / profile.floor_s,
            "ideal_floor_ms": 1e3 * profile.ideal_floor_s,
            "images_per_second_at_ideal_floor": profile.num_images / profile.ideal_floor_s,
            "ideal_floor_dtype": profile.main_dtype,
            "needed_floor_ms": 1e3 * profile.needed_floor_s,
            "images_per_second_at_needed_floor": profile.num_images / profile.needed_floor_s,
            "model_gflop": profile.model_flop / 1e9,
            "counted_gflop": profile.counted_flop / 1e9,
            "explained_percent": profile.explained_percent,
            "outside_operators_ms": 1e3 * profile.outside_s,
        },
        "phases": {row.phase: figures_of(row, profile) for row in profile.by_phase},
        "operators": [
            {"phase": row.phase, "operator": row.name} | figures_of(row, profile)
            for row in profile.by_operator
        ],
        "unmatched": {row.name: 1e3 * (row.time_s or 0.0) for row in profile.unmatched},
        "kernels": {
            name: {"calls": timing.calls, "time_ms": 1e3 * timing.time_s}
            for name, timing in profile.kernels.items()
        },
    }


def _section(title: str, rows: Sequence[Row], profile: Profile, *, names: Sequence[str]) -> str:
    columns = [
        *(Column(name) for name in names),
        *(Column(name, is_number=name != "bound by") for name in FIGURES.values()),
    ]
    cells = [
        [make_cell(text) for text in _names_of(row, names)]
        + [make_cell(value, num_digits=3) for value in figures_of(row, profile).values()]
        for row in rows
    ]
    return f"{title}:\n{to_terminal(Table('profile', title, columns, cells))}"


def _kernels(profile: Profile, *, top: int) -> str:
    kernels = sorted(profile.kernels.items(), key=lambda item: -item[1].time_s)[:top]
    columns = [
        Column("kernel"),
        *(Column(name, is_number=True) for name in ("calls", "ms", "% of step")),
    ]
    rows = [
        [
            make_cell(name[:100]),
            make_cell(timing.calls, num_digits=3),
            make_cell(1e3 * timing.time_s, num_digits=3),
            make_cell(profile.share(timing.time_s), num_digits=3),
        ]
        for name, timing in kernels
    ]
    title = f"The {len(kernels)} kernels and copies of the longest time"
    return f"{title}:\n{to_terminal(Table('kernels', title, columns, rows))}"


def _names_of(row: Row, names: Sequence[str]) -> list[str]:
    texts = {
        "phase": row.phase,
        "operator": row.name,
        "shapes": " ".join("x".join(map(str, shape)) for shape in row.shapes),
        "types": " ".join(sorted(row.dtypes)),
    }
    return [texts[name] for name in names]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
