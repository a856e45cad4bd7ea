"""Which rows of a table say how fast one kind of GPU does one kind of work?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdbench.base.errors import ConfigError
from sdbench.report.figures import as_text, mark_copies, parse_conditions, read_figures, select_rows
from sdbench.statistics.law import Point, Setup

Row = dict[str, Any]

# Figures that differ in one of these follow different laws.
KIND_OF_WORK = ("gpu", "latents", "precision", "ema", "model", "preset", "engine")
IMAGE_SIZE = "image_size"
MODELLED = "modelled"


def read_rows(paths: Sequence[Path], *, where: Sequence[str], required: Sequence[str]) -> list[Row]:
    """Rows with a figure that meet the conditions, each run once.

    Args:
        paths: Tables in CSV.
        where: Conditions as the user gave them, ``COLUMN=VALUE``.
        required: Columns that every table must have.

    Raises:
        ConfigError: If a file is no such table, or no row is left.
    """
    rows = mark_copies(row for path in paths for row in read_figures(path, required=required))
    rows = select_rows(rows, parse_conditions(where, flag="--where"), flag="--where")
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
    return rows


def check_one_kind(rows: Sequence[Row], columns: Sequence[str] = KIND_OF_WORK) -> None:
    """See that rows are of one kind of work; an empty cell contradicts nothing.

    Raises:
        ConfigError: If one of the columns has two values.
    """
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
    """The different values of a column, without empty cells."""
    return list(dict.fromkeys(row[column] for row in rows if row.get(column) is not None))


def make_points(rows: Sequence[Row], *, micro_batch: int | None = None) -> list[Point]:
    """Figures as the law needs them; predictions are left out, since a law is no evidence.

    Args:
        rows: Rows of one kind of work and one image size.
        micro_batch: That of rows that do not tell theirs.

    Raises:
        ConfigError: If a row does not tell how its step was made.
    """
    return [
        Point(_make_setup(row, micro_batch=micro_batch), float(row["images_per_second"]))
        for row in rows
        if row.get("kind") != MODELLED
    ]


def split_batch(*, global_batch: int, num_gpus: int, micro_batch: int) -> Setup:
    """The step that a global batch really makes: every GPU gets the same whole number of images.

    Raises:
        ConfigError: If there are more GPUs than images.
    """
    if global_batch < num_gpus:
        raise ConfigError(
            "a GPU would have no image in a step",
            value=f"{num_gpus} GPUs for a global batch of {global_batch}",
            allowed=f"at most {global_batch} GPUs, or a larger batch",
            flag="--num_gpus and --global_batch",
        )
    return Setup(num_gpus, global_batch // num_gpus, micro_batch)


def _make_setup(row: Row, *, micro_batch: int | None) -> Setup:
    size = row.get("micro_batch") or micro_batch
    images = row.get("images_per_step") or row.get("global_batch")
    if not isinstance(size, int):
        raise _untold(row, "micro_batch", flag="--micro_batch, for the rows that do not tell it")
    if images is None:
        raise _untold(row, "global_batch", flag="the column global_batch or images_per_step")
    num_gpus = row["num_gpus"]
    if row.get("images_per_step") and images % num_gpus:
        raise ConfigError(
            "the images of a step cannot be shared out among the GPUs",
            value=f"images_per_step {images} on {num_gpus} GPUs",
            allowed="a multiple of num_gpus",
            flag="the column images_per_step",
        )
    return split_batch(global_batch=images, num_gpus=num_gpus, micro_batch=size)


def _untold(row: Row, column: str, *, flag: str) -> ConfigError:
    return ConfigError(
        f"a row does not tell its {column} as a whole number",
        value=as_text(row.get(column)),
        allowed=f"a {column} in every row (num_gpus {row['num_gpus']}, {row.get('source')})",
        flag=flag,
    )


def parse_counts(text: str, *, flag: str) -> list[int]:
    """GPU counts from ``8,16,32`` or ``8,16,...,512``, which goes on doubling or adding.

    Raises:
        ConfigError: For anything else.
    """
    try:
        return _expand(text.split(","))
    except ValueError:
        raise ConfigError(
            "these are no GPU counts",
            value=text,
            allowed="whole numbers above 0, e.g. 8,16,64 or 8,16,...,512",
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
    if min(counts) < 1:
        raise ValueError
    return counts
