"""Reads figures of one kind of GPU and work from tables, records and flags, and divides steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.base.outside import is_bounded
from sdbench.measure import phases
from sdbench.record.configuration import group
from sdbench.record.row import make_row
from sdbench.record.store import BENCHMARK, OK, kind_of
from sdbench.report.figures import (
    MEASURED,
    as_text,
    mark_copies,
    parse_conditions,
    read_figures,
    select_rows,
)
from sdbench.report.runs import read_record
from sdbench.scaling.cost import Amount, make_amount
from sdbench.settings.kinds import MAX_COUNT
from sdbench.statistics.intervals import between_runs_interval, mean_rate
from sdbench.statistics.law import Point, Setup

Row = dict[str, Any]
# Images/s of all GPUs together, by number of GPUs and by resolution.
Rates = dict[int, dict[int, Amount]]

# Figures that differ in one of these columns follow different laws.
KIND_OF_WORK = ("gpu", "latents", "precision", "ema", "model", "preset", "engine")
IMAGE_SIZE = "image_size"
# Seconds of a step that wait for gradients: communication that the backward pass does not hide.
COMMUNICATION_S = "gradient_communication_s"
MODELLED = "modelled"
MAX_COUNTS = 1000


def read_rows(paths: Sequence[Path], *, where: Sequence[str], required: Sequence[str]) -> list[Row]:
    """Read the rows with a figure that meet conditions ``COLUMN=VALUE``, each run once.

    Paths are CSV tables with the required columns, and folders of runs. The row of a run also has
    the seconds of a step that wait for gradients.
    """
    rows = mark_copies(
        row
        for path in paths
        for row in ([_row_of_run(path)] if path.is_dir() else read_figures(path, required=required))
    )
    rows = select_rows(rows, where)
    rows = [
        row
        for row in rows
        if row.get("status") in (None, "ok")
        and row["images_per_second"] is not None
        and row["num_gpus"]
    ]
    if not rows:
        raise ConfigError(
            "no row has a figure of a GPU",
            value=" ".join(map(str, paths)),
            allowed="rows with num_gpus and images_per_second whose status is ok",
            flag="TABLE and --where",
        )
    _check_each_once(rows)
    return rows


def _row_of_run(folder: Path) -> Row:
    record = read_record(folder, flag="TABLE")
    if kind_of(record) != BENCHMARK:
        raise ConfigError(
            "a run that does not measure training has no figure for the law",
            value=f"{folder}: {kind_of(record)}",
            allowed="runs of benchmark.py",
            flag="TABLE",
        )
    row = make_row(record)
    seconds = phase_seconds(record)
    if seconds is not None and record["ranks"]["world_size"] > 1:
        row[COMMUNICATION_S] = seconds[phases.GRADIENT_COMMUNICATION]
    return row


def phase_seconds(record: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the seconds of each phase of a measured step; None if the run was not profiled.

    Timing the phases makes a step slower, so their shares are scaled to a measured step.
    """
    summary = record["summary"] or {}
    breakdown = summary.get("breakdown")
    if record["status"] != OK or not breakdown:
        return None
    step_time_s = record["config"]["batch_size"] / summary["images_per_second"]
    factor = step_time_s / breakdown["step_time_s"]
    # A record of an older version may lack a phase.
    return {name: factor * breakdown["seconds"].get(name, 0.0) for name in phases.PHASES}


def _check_each_once(rows: Sequence[Row]) -> None:
    """Refuse a repeated figure, which the law would count twice."""
    seen = set()
    for row in rows:
        cells = frozenset((column, cell) for column, cell in row.items() if cell is not None)
        if cells in seen:
            raise ConfigError(
                "a row stands twice, and would count as two figures",
                value=f"{row['images_per_second']} images/s of {row['num_gpus']} GPUs, "
                f"{as_text(row.get('source')) or 'without a source'}",
                allowed="each figure once; repeated measurements differ in a column, e.g. source",
                flag="TABLE",
            )
        seen.add(cells)


def check_one_kind(rows: Sequence[Row], columns: Sequence[str] = KIND_OF_WORK) -> None:
    """Refuse rows that differ in one of the columns. Empty cells do not count."""
    for column in columns:
        values = known_values(rows, column)
        if len(values) > 1:
            raise ConfigError(
                f"the figures mix several values of {column}, which have no law in common",
                value=" and ".join(map(as_text, values)),
                allowed=f"one {column}",
                flag=f"--where {column}=...",
            )


def known_values(rows: Sequence[Row], column: str) -> list[Any]:
    """Return the distinct values of a column without empty cells."""
    return list(dict.fromkeys(row[column] for row in rows if row.get(column) is not None))


def make_points(rows: Sequence[Row], *, micro_batch: int | None = None) -> list[Point]:
    """Make points for a law from rows of one kind of work and one image size.

    Modelled rows are left out. `micro_batch` is that of rows without one.
    """
    return [
        Point(
            _make_setup(row, micro_batch=micro_batch),
            float(row["images_per_second"]),
            _communication_s(row),
        )
        for row in rows
        if row.get("kind") != MODELLED
    ]


def _communication_s(row: Row) -> float | None:
    value = row.get(COMMUNICATION_S)
    if value is None:
        return None
    step_time_s = (row.get("images_per_step") or row["global_batch"]) / row["images_per_second"]
    if isinstance(value, int | float) and 0 <= value < step_time_s:
        return float(value)
    raise ConfigError(
        "the seconds that a step waits for gradients are not a part of the step",
        value=as_text(value),
        allowed=f"0 to {step_time_s:.4g}, the whole step (num_gpus {row['num_gpus']})",
        flag=f"the column {COMMUNICATION_S}",
    )


def split_batch(*, global_batch: int, num_gpus: int, micro_batch: int) -> Setup:
    """Divide a global batch evenly among GPUs; the remainder is dropped."""
    if global_batch < num_gpus:
        raise ConfigError(
            "a GPU would have no image in a step",
            value=f"{num_gpus} GPUs for a global batch of {global_batch}",
            allowed=f"at most {global_batch} GPUs, or a larger batch",
            flag="--num_gpus and --global_batch",
        )
    return Setup(num_gpus, global_batch // num_gpus, micro_batch)


def make_setups(
    gpu_counts: str, *, global_batch: int | None, device_batch: int | None, micro_batch: int
) -> list[Setup]:
    """Divide a step among each number of GPUs, in ascending order.

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
        else split_batch(global_batch=global_batch, num_gpus=num_gpus, micro_batch=micro_batch)
        for num_gpus in sorted(parse_counts(gpu_counts, flag="--num_gpus"))
    ]


def _make_setup(row: Row, *, micro_batch: int | None) -> Setup:
    size = row["micro_batch"] if row.get("micro_batch") is not None else micro_batch
    images = row.get("images_per_step") or row.get("global_batch")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise _missing(row, "micro_batch", flag="--micro_batch, for the rows that do not tell it")
    if images is None:
        raise _missing(row, "global_batch", flag="the column global_batch or images_per_step")
    num_gpus = row["num_gpus"]
    if row.get("images_per_step") and images % num_gpus:
        raise ConfigError(
            "the images of a step cannot be shared out among the GPUs",
            value=f"images_per_step {images} on {num_gpus} GPUs",
            allowed="a multiple of num_gpus",
            flag="the column images_per_step",
        )
    return split_batch(global_batch=images, num_gpus=num_gpus, micro_batch=size)


def _missing(row: Row, column: str, *, flag: str) -> ConfigError:
    return ConfigError(
        f"a row does not tell its {column} as a whole number above 0",
        value=as_text(row.get(column)),
        allowed=f"a {column} in every row (num_gpus {row['num_gpus']}, {row.get('source')})",
        flag=flag,
    )


def parse_rates(texts: Sequence[str], *, gpu_counts: Sequence[int]) -> Rates:
    """Parse texts ``IMAGE_SIZE=IMAGES_PER_SECOND`` of one number of GPUs."""
    given = parse_conditions(texts, flag="--images_per_second")
    try:
        rates = {int(size): make_amount(float(rate)) for size, rate in given.items()}
    except ValueError:
        rates = {}
    if not rates or not all(rate[0] > 0 and is_bounded(rate[0]) for rate in rates.values()):
        raise ConfigError(
            "a throughput is not a number",
            value=" ".join(texts),
            allowed="IMAGE_SIZE=IMAGES_PER_SECOND of all GPUs together, e.g. 256=1100 512=290",
            flag="--images_per_second",
        )
    if len(gpu_counts) != 1:
        raise ConfigError(
            "a given throughput is for one number of GPUs",
            value=list(gpu_counts),
            allowed="one number",
            flag="--num_gpus",
        )
    return {gpu_counts[0]: rates}


def find_rates(
    rows: Sequence[Row], sizes: Collection[int], *, gpu_counts: Sequence[int]
) -> tuple[Rates, list[str]]:
    """Find the throughput at each resolution, in pixels, for each number of GPUs; empty: for all.

    Returns:
        The rates for each number of GPUs with all resolutions, or for every number if none has all;
        and a line about each number of GPUs that is left out.
    """
    by_gpus = group(
        [row for row in rows if not gpu_counts or row["num_gpus"] in gpu_counts],
        key_of=lambda row: row["num_gpus"],
    )
    if not by_gpus:
        raise ConfigError(
            "no figure has this number of GPUs",
            value=list(gpu_counts),
            allowed=", ".join(map(as_text, known_values(rows, "num_gpus"))),
            flag="--num_gpus; python -m sdbench scaling predict makes figures of others",
        )
    rates: Rates = {}
    for num_gpus, of_gpus in by_gpus.items():
        by_size = group(of_gpus, key_of=lambda row: row.get(IMAGE_SIZE))
        rates[num_gpus] = {size: rate_of(runs) for size, runs in by_size.items() if size in sizes}
    complete = {count: found for count, found in rates.items() if found.keys() >= set(sizes)}
    left_out = [
        f"left out: {num_gpus} GPUs, without a figure at "
        + " and ".join(f"{size} px" for size in sorted(set(sizes) - found.keys()))
        for num_gpus, found in rates.items()
        if num_gpus not in complete
    ]
    return (complete, left_out) if complete else (rates, [])


def rate_of(rows: Sequence[Row]) -> Amount:
    """Return images/s of one configuration, with a between-runs interval for three or more runs."""
    check_one_kind(rows, ("kind", "micro_batch", "global_batch"))
    figures = [float(row["images_per_second"]) for row in rows]
    if len(rows) == 1:
        ends = (rows[0].get(f"images_per_second_{end}") for end in ("low", "high"))
        return make_amount(figures[0], *ends)
    if any(row.get("kind") != MEASURED for row in rows):
        check_one_kind(rows, ("source",))
    mean, interval = mean_rate(figures), between_runs_interval(figures)
    return make_amount(mean, interval.low, interval.high) if interval else make_amount(mean)


def parse_counts(text: str, *, flag: str) -> list[int]:
    """Parse ``8,16,32``, or ``8,16,...,512``, which continues by a factor of 2 or a difference."""
    try:
        return _expand(text.split(","))
    except ValueError:
        raise ConfigError(
            "GPU counts cannot be read",
            value=text,
            allowed=f"whole numbers above 0, e.g. 8,16,64 or 8,16,...,512; at most {MAX_COUNTS} of "
            f"them, up to {MAX_COUNT:,}",
            flag=flag,
        ) from None


def _expand(texts: Sequence[str]) -> list[int]:
    if "..." not in texts:
        counts = [int(text) for text in texts]
    else:
        *start, _, end = (text if text == "..." else int(text) for text in texts)
        if len(start) < 2 or texts[-2] != "...":
            raise ValueError
        before, last = start[-2:]
        doubles, step = last == 2 * before, last - before
        if step <= 0:
            raise ValueError
        counts = start
        while (following := 2 * counts[-1] if doubles else counts[-1] + step) <= end:
            counts.append(following)
            if len(counts) > MAX_COUNTS:
                raise ValueError
    if len(counts) > MAX_COUNTS or not 1 <= min(counts) <= max(counts) <= MAX_COUNT:
        raise ValueError
    return counts
