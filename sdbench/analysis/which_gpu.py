"""The rows of the question "which GPU?": what was measured, published and predicted of each GPU.

The page asks and answers it (sdbench/report/which_gpu.html.j2). Of the figures of one source for
the same GPUs and the same work the fastest is a row.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdbench.base.units import counted
from sdbench.forecast.cost import find_prices
from sdbench.forecast.law import find_card, load_work
from sdbench.record.configuration import WORK, describe_place, group
from sdbench.record.store import RECORD_NAME
from sdbench.report.figures import as_text, describe_source, device_of, read_figures
from sdbench.report.runs import describe_configuration, group_runs, notes_cell, use_each
from sdbench.results.frame import PREDICTIONS
from sdbench.statistics.intervals import between_runs_interval

SOURCES = "sources.csv"
# What their rows must have.
COLUMNS = {
    PREDICTIONS: (
        *("gpu", "num_gpus", *WORK, "lora_rank", "preset", "sharding", "precision", "why"),
        *("micro_batch", "global_batch", "images_per_second", "images_per_second_low"),
        *("images_per_second_high", "mfu_percent", "pool", "pool_tests", "predicted_on"),
        *("pool_median_error_percent", "tested_inside_percent"),
    ),
    SOURCES: ("source", "published", "torch", "address"),
}
PLACES = {
    "precomputed": "latents made beforehand",
    "online": "encoders in the step",
    "moments": "text encoder in the step",
}
# MFU counts with the peak in bf16, which arithmetic in fewer bits exceeds.
IN_16_BITS = (None, "bf16", "fp16", "amp_bf16", "amp_fp16")
# Their logs tell no precision but of some rows, and that is of 8 bits.
IN_8_BITS = ("MLPerf Training v5.1 logs (Flux.1)", "MLPerf Training v6.0 logs (Flux.1)")
FROM_LAW = "predictions.md"
Row = dict[str, Any]


def read_extras(results: Path) -> tuple[list[Row], dict[str, Row], list[Path]]:
    """The predictions of a results folder, what is known of its sources, and what cannot be read.

    A folder may have neither. Sources are by their names.
    """
    found, left_out = {}, []
    for name, columns in COLUMNS.items():
        read = functools.partial(read_figures, required=columns)
        tables, bad = use_each(filter(Path.is_file, [results / name]), read)
        found[name] = [row for table in tables for row in table]
        left_out += bad
    return found[PREDICTIONS], {row["source"]: row for row in found[SOURCES]}, left_out


def make_gpu_rows(
    ended_well: Iterable[Row],
    figures: Iterable[Row],
    predicted: Iterable[Row],
    sources: Mapping[str, Row],
) -> list[Row]:
    """The rows of GPUs: measured, published, predicted.

    Args:
        ended_well: Records of runs that ended well.
        figures: Published figures that have a rate.
        predicted: The predictions of `read_extras`.
        sources: The sources of `read_extras`.
    """
    on_gpu = [record for record in ended_well if record["machine"]["device_type"] == "cuda"]
    rows = [*map(_measured_row, group_runs(on_gpu)), *_published_rows(figures, sources)]
    rows += map(_predicted_row, predicted)
    prices = find_prices([*dict.fromkeys(row["gpu"] for row in rows)])
    made = []
    for row in rows:
        price = prices[row["gpu"]]
        common = {"price": price and price.value, "price_source": price and price.source}
        common |= {"is_guess": False, "command": None}
        made.append({**common, **row, "gpu": row["gpu"].removeprefix("NVIDIA ")})
    return made


def _trained(place: str, lora_rank: int | None) -> str:
    what = "all weights" if lora_rank is None else f"LoRA of rank {lora_rank}"
    return f"{what}, {PLACES.get(place, place)}"


def _measured_row(runs: Sequence[Row]) -> Row:
    """A configuration of this suite on GPUs, with the interval between its runs or within them."""
    first, rates = runs[0], [run["summary"]["images_per_second"] for run in runs]
    between = between_runs_interval(rates)
    within = [run["summary"]["images_per_second_interval"] for run in runs]
    low = high = None
    sure = "no interval: too few steps"
    if between is not None:
        low, high, sure = between.low, between.high, f"95 % interval between {len(runs)} runs"
    elif all(one and one["high"] for one in within):
        low, high = min(one["low"] for one in within), max(one["high"] for one in within)
        sure = f"95 % interval within {counted(len(runs), 'run')}; the next may differ more"
    versions = sorted({as_text(run["versions"]["torch"]) for run in runs})
    shares = [run["summary"]["mfu_percent"] for run in runs]
    known = [share for share in shares if share is not None]
    config = first["config"]
    return {
        "kind": "measured",
        "gpu": first["machine"]["device_name"],
        "num_gpus": first["ranks"]["world_size"],
        "model": first["workload"]["architecture"],
        "image_size": config["image_size"],
        "trained": _trained(describe_place(config), config["lora_rank"]),
        "rate": statistics.median(rates),
        "low": low,
        "high": high,
        "sure": sure,
        "mfu_percent": statistics.median(known) if known else None,
        "settings": "; ".join(
            filter(None, (describe_configuration(first), notes_cell(runs).value))
        ),
        "date": " and ".join(sorted({run["started_utc"][:10] for run in runs})),
        "torch": f"torch {' and '.join(versions)}",
        "links": [
            (f"record {number}" if len(runs) > 1 else "record", _place_of(run))
            for number, run in enumerate(runs, 1)
        ],
    }


def _place_of(run: Row) -> str:
    return f"runs/{run['run_id']}/{RECORD_NAME}"


def _published_rows(figures: Iterable[Row], sources: Mapping[str, Row]) -> Iterator[Row]:
    """The fastest figure of each source, GPU, number of GPUs and work that is told in full."""
    told = ("gpu", "num_gpus", *WORK)
    whole = [row for row in figures if all(row.get(name) is not None for name in told)]
    by = (*told, "source", "submitter")
    for alike in group(whole, key_of=lambda row: tuple(map(row.get, by))).values():
        best = max(alike, key=lambda row: row["images_per_second"])
        card = find_card(device_of(best))
        known = sources.get(best.get("source") or "", {})
        address = known.get("address")
        settings = [
            f"micro-batch {best['micro_batch']}" if best.get("micro_batch") else None,
            f"global batch {best['global_batch']}" if best.get("global_batch") else None,
            {True: "EMA", False: "no EMA"}.get(best.get("ema")),
            best.get("precision"),
            f"the fastest of {len(alike)} figures" if len(alike) > 1 else None,
        ]
        name = describe_source(best) or "source not told"
        yield {
            "kind": "published",
            "gpu": card.name if card else device_of(best),
            **{name: best[name] for name in ("num_gpus", "model", "image_size")},
            "trained": _trained(best["latents"], None),
            "rate": best["images_per_second"],
            "low": best.get("images_per_second_low"),
            "high": best.get("images_per_second_high"),
            "sure": "no interval was published",
            "mfu_percent": _mfu_percent(best, card),
            "settings": ", ".join(filter(None, settings)),
            "date": as_text(known.get("published")) or "date not told",
            "torch": f"torch {as_text(known.get('torch')) or 'not told'}",
            "links": [(name, address or "quoted/README.md")],
        }


def _mfu_percent(figure: Row, card: Any) -> float | None:
    """Share of the peak in bf16; None in fewer bits, and of GPUs or work that are not known."""
    work = load_work().get(tuple(map(figure.get, WORK)))
    in_16_bits = figure.get("precision") in IN_16_BITS and figure.get("source") not in IN_8_BITS
    if card is None or work is None or not in_16_bits:
        return None
    rate = figure["images_per_second"] / figure["num_gpus"]
    return 100 * rate * work.tera_operations / card.tflops


def _predicted_row(row: Row) -> Row:
    """A prediction with the error of its kind; without an interval if that was not tested."""
    is_tested = row["tested_inside_percent"] is not None
    sure = (
        f"median error {row['pool_median_error_percent']:g} % of {row['pool_tests']} predictions "
        f"of {row['pool']}"
    )
    if is_tested:
        sure += f"; {row['tested_inside_percent']:g} % inside their intervals"
    else:
        sure += ": no interval"
    settings = [
        f"micro-batch {row['micro_batch']}",
        f"global batch {row['global_batch']}",
        f"preset {row['preset']}",
        row["precision"],
        f"sharding {row['sharding']}" if row["sharding"] != "none" else None,
    ]
    rate = row["images_per_second"]
    return {
        "kind": "predicted",
        **{name: row[name] for name in ("gpu", "num_gpus", "model", "image_size")},
        "trained": _trained(row["latents"], row["lora_rank"]),
        "rate": rate,
        "low": row["images_per_second_low"] if is_tested else None,
        "high": row["images_per_second_high"] if is_tested else None,
        "is_guess": not is_tested,
        "sure": sure if rate else f"does not fit its memory: {row['why']}",
        "mfu_percent": row["mfu_percent"],
        "settings": ", ".join(filter(None, settings)) if rate else "",
        "date": row["predicted_on"],
        "torch": "not run",
        "links": [("prediction", FROM_LAW)],
        "command": _command(row),
    }


def _command(row: Row) -> str:
    """What measures such a row on a machine that has the GPUs."""
    flags = {
        "model_name": row["model"],
        "image_size": row["image_size"],
        "latents": row["latents"],
        "precision": row["precision"],
        "device_train_microbatch_size": "auto",
        "lora_rank": row["lora_rank"],
        "sharding": row["sharding"] if row["sharding"] != "none" else None,
    }
    shown = " ".join(f"--{name} {value}" for name, value in flags.items() if value is not None)
    on_each = " (on each machine)" if row["num_gpus"] > 8 else ""
    return f"composer -n {min(row['num_gpus'], 8)} benchmark.py --use_synth_data {shown}{on_each}"
