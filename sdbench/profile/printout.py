"""The tables, sentences and files of a profile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sdbench.base.escape import for_csv
from sdbench.profile.roofline import Profile
from sdbench.report.tables import make_cell, make_table, to_terminal
from sdbench.report.terminal import format_number

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
MAX_KERNEL_NAME = 100
# A smaller share of a step is not worth a warning.
MIN_PERCENT_TO_WARN = 1.0
MAX_NAMED = 3

LEGEND = """\
% of arithmetic, % of memory: of the ceilings above; floor: the time at the ceiling that binds.
GFLOP: matrix products and convolutions. GB: each input read once, each output written once."""


def add_figures(rows: pd.DataFrame, profile: Profile) -> pd.DataFrame:
    """Names and `FIGURES` of rows of a profile; an unknown figure is None."""
    time_s = rows.time_s.where(rows.time_s > 0)
    bound = np.where(rows.arithmetic_s > rows.memory_s, "arithmetic", "memory")
    figures = rows[[name for name in NAMES if name in rows]].assign(
        calls=rows.calls,
        time_ms=1e3 * rows.time_s,
        step_percent=100 * rows.time_s / profile.profiled_step_s,
        gflop=rows.flop / 1e9,
        tflop_per_s=rows.flop / time_s / 1e12,
        arithmetic_percent=100 * rows.arithmetic_s.where(rows.flop > 0) / time_s,
        gb=rows.num_bytes / 1e9,
        gb_per_s=rows.num_bytes / time_s / 1e9,
        memory_percent=100 * rows.memory_s.where(rows.num_bytes > 0) / time_s,
        floor_ms=1e3 * rows.floor_s,
        bound=pd.Series(bound, index=rows.index).where(rows.floor_s > 0),
    )
    return figures.astype(object).where(figures.notna(), None)


def format_profile(profile: Profile, *, top: int) -> str:
    """The ceilings and the tables for a terminal; tables of operators have `top` rows."""
    operators, shapes = profile.by_operator[:top], profile.rows[:top]
    tables = {
        "By phase": add_figures(profile.by_phase, profile),
        f"The {len(operators)} operators of the longest time": add_figures(operators, profile),
        f"The {len(shapes)} of the longest time, each by the shapes of its tensors": add_figures(
            shapes, profile
        ),
    }
    if profile.kernels:
        kernels = pd.DataFrame(
            [
                (name[:MAX_KERNEL_NAME], calls, 1e3 * time_s, profile.share(time_s))
                for name, (calls, time_s) in profile.kernels.items()
            ],
            columns=["kernel", "calls", "time_ms", "step_percent"],
        ).nlargest(top, "time_ms")
        tables[f"The {len(kernels)} kernels and copies of the longest time"] = kernels
    sections = [f"{title}:\n{_to_text(rows)}" for title, rows in tables.items()]
    tflops = ", ".join(
        f"{format_number(ceiling.rate)} TFLOP/s in {dtype} ({ceiling.kernel})"
        for dtype, ceiling in sorted(profile.ceilings.arithmetic.items())
    )
    memory = profile.ceilings.memory
    ceilings = (
        f"Ceilings measured here and now: arithmetic {tflops}; "
        f"memory {format_number(memory.rate)} GB/s ({memory.kernel})"
    )
    return "\n\n".join([ceilings, *sections, LEGEND])


def describe_floors(profile: Profile) -> str:
    """A table of the measured step and of its floors at the ceilings."""
    times_s = {
        "as it is": profile.step_s,
        "floor of its operators, one after the other": profile.floor_s,
        f"floor of the model's FLOPs in {profile.main_dtype}": profile.ideal_floor_s,
        "floor of the same and of AdamW in one pass": profile.needed_floor_s,
    }
    rows = [
        {
            "a step": name,
            "ms": 1e3 * time_s,
            "images/s": profile.num_images / time_s,
            "% of it": make_cell(100 * time_s / profile.step_s, num_digits=3),
        }
        for name, time_s in times_s.items()
    ]
    return to_terminal(make_table(rows))


def describe_coverage(profile: Profile, *, on_gpu: bool) -> list[str]:
    """How much of the step the tables explain, and what they leave out, as sentences."""
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
    rows = profile.rows
    below_percent = profile.share(rows.time_s[rows.time_s < rows.floor_s].sum())
    if below_percent >= MIN_PERCENT_TO_WARN:
        lines.append(
            f"Operators with {below_percent:.1f} % of the step took less than their floor: they "
            "found their inputs in a cache, and the floor of a step is no bound for them."
        )
    return lines


def warnings_of(profile: Profile, *, is_compiled: bool) -> list[str]:
    """What a reader must know not to be misled, as sentences."""
    lines = []
    unmatched_percent = profile.share(profile.unmatched.time_s.sum())
    if unmatched_percent >= MIN_PERCENT_TO_WARN:
        names = ", ".join(profile.unmatched.operator[:MAX_NAMED])
        lines.append(
            f"warning: {unmatched_percent:.1f} % of the profiled step is in operators that the "
            f"counted step does not have, so that their work is not known: {names}"
        )
    changed = profile.rows[profile.rows.calls_differ]
    if len(changed) and not is_compiled:
        names = ", ".join(changed.operator[:MAX_NAMED])
        lines.append(
            f"warning: {len(changed)} operators were called a different number of times in the "
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
    return add_figures(profile.rows, profile).map(for_csv).to_csv(index=False, lineterminator="\n")


def to_json(profile: Profile) -> dict[str, Any]:
    """The figures; only `to_csv` has the operators by their shapes."""
    phases = add_figures(profile.by_phase, profile).set_index("phase")
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
        "phases": phases.to_dict("index"),
        "operators": add_figures(profile.by_operator, profile).to_dict("records"),
        "unmatched": dict(
            zip(profile.unmatched.operator, 1e3 * profile.unmatched.time_s, strict=True)
        ),
        "kernels": {
            name: {"calls": timing.calls, "time_ms": 1e3 * timing.time_s}
            for name, timing in profile.kernels.items()
        },
    }


def _to_text(rows: pd.DataFrame) -> str:
    """Rows with `FIGURES` as a table for a terminal."""
    cells = rows.rename(columns=FIGURES).map(lambda value: make_cell(value, num_digits=3))
    return to_terminal(make_table(cells.to_dict("records"), left=("bound by",)))
