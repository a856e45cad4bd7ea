"""`COLUMNS`: the columns of tables of results, each declared once.

Tables in CSV, the frame of `sdbench.results.load`, comparisons and charts use these names. A table
may have further columns: a comparison takes such a column for a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sdbench.record.configuration import describe_model, describe_other_settings, describe_place

Record = Mapping[str, Any]

# What a column says of a figure: what was asked for, what was found, or where that comes from.
SETTING, FIGURE, ORIGIN = "setting", "figure", "origin"
# What its cells hold. A name stays text even if one looks like a number: a GPU called 4090.
# Counts are whole and at least 0; positive numbers are above 0.
NAME, SWITCH, COUNT, POSITIVE, NUMBER = "name", "switch", "count", "positive", "number"


class Column(NamedTuple):
    """A column.

    Attributes:
        kind: `SETTING`, `FIGURE` or `ORIGIN`.
        holds: `NAME`, `SWITCH`, `COUNT`, `POSITIVE` or `NUMBER`.
        meaning: What it holds, with the unit.
        place: Where a record of benchmark.py has the value, such as ``summary.gpu.power_w``, or
            what makes it of the record; None: such a run has no value.
    """

    kind: str
    holds: str
    meaning: str
    place: str | Callable[[Record], Any] | None = None


def value_at(record: Record, path: str) -> Any:
    """The value at a path such as ``summary.gpu.power_w``; None if a part of it is missing."""
    value: Any = record
    for name in path.split("."):
        value = None if value is None else value.get(name)
    return value


def _is_on_gpu(record: Record) -> bool:
    return record["machine"]["device_type"] == "cuda"


def _energy_j_per_image(record: Record) -> float | None:
    energy_j = value_at(record, "summary.gpu.energy_j")
    if not energy_j:
        return energy_j
    return energy_j / (record["summary"]["num_measured_steps"] * record["config"]["batch_size"])


COLUMNS: dict[str, Column] = {
    "source": Column(ORIGIN, NAME, "run id, or who published the figure", "run_id"),
    "kind": Column(
        ORIGIN, NAME, "measured, submitted, quoted or predicted", lambda record: "measured"
    ),
    "gpu": Column(
        SETTING,
        NAME,
        "GPU, as its driver or the source names it; none: a CPU",
        lambda record: record["machine"]["device_name"] if _is_on_gpu(record) else None,
    ),
    "num_gpus": Column(
        SETTING,
        COUNT,
        "GPUs of the run",
        lambda record: record["ranks"]["world_size"] if _is_on_gpu(record) else 0,
    ),
    "image_size": Column(SETTING, COUNT, "side of the square picture, px", "config.image_size"),
    "latents": Column(
        SETTING,
        NAME,
        "where latents and text states are made",
        lambda record: describe_place(record["config"]),
    ),
    "ema": Column(SETTING, SWITCH, "whether an average of the weights is kept", "config.use_ema"),
    "micro_batch": Column(
        SETTING, COUNT, "images of a device in one pass", "config.device_train_microbatch_size"
    ),
    "num_workers": Column(SETTING, COUNT, "loader processes of a device", "config.num_workers"),
    "global_batch": Column(
        SETTING, COUNT, "images of an optimizer step, as configured", "config.batch_size"
    ),
    "images_per_step": Column(
        FIGURE, COUNT, "images of an optimizer step, as trained", "config.batch_size"
    ),
    "images_per_second": Column(
        FIGURE, POSITIVE, "images/s over all devices", "summary.images_per_second"
    ),
    "images_per_second_low": Column(
        FIGURE, POSITIVE, "lower end of its 95 % interval", "summary.images_per_second_interval.low"
    ),
    "images_per_second_high": Column(
        FIGURE,
        POSITIVE,
        "upper end of its 95 % interval",
        "summary.images_per_second_interval.high",
    ),
    "precision": Column(SETTING, NAME, "number format of the step", "config.precision"),
    "engine": Column(SETTING, NAME, "engine that trained", "config.engine"),
    "status": Column(FIGURE, NAME, "how the run ended", "status"),
    "model": Column(
        SETTING, NAME, "model that is trained, with the rank of its LoRA", describe_model
    ),
    "preset": Column(SETTING, NAME, "preset of the settings", "config.preset"),
    "data_format": Column(SETTING, NAME, "format of the data", "config.data_format"),
    "device": Column(SETTING, NAME, "GPU or CPU", "machine.device_name"),
    "num_devices": Column(SETTING, COUNT, "ranks", "ranks.world_size"),
    "num_cpu_cores": Column(SETTING, COUNT, "CPU cores of a machine", "machine.num_cpu_cores"),
    "num_nodes": Column(SETTING, COUNT, "machines", "ranks.num_nodes"),
    "other_settings": Column(
        SETTING, NAME, "settings of the user without a column", describe_other_settings
    ),
    "step_time_p50_s": Column(
        FIGURE, NUMBER, "median time of a step, s", "summary.step_time_p50_s"
    ),
    "step_time_p95_s": Column(
        FIGURE, NUMBER, "time below which 95 % of the steps are, s", "summary.step_time_p95_s"
    ),
    "data_wait_percent": Column(
        FIGURE,
        NUMBER,
        "share of the time in which data were waited for",
        "summary.data_wait_percent",
    ),
    "peak_memory_gib": Column(
        FIGURE, NUMBER, "peak memory of a rank, GiB", "summary.peak_memory_gib"
    ),
    "mfu_percent": Column(
        FIGURE, NUMBER, "share of the peak in the data sheet", "summary.mfu_percent"
    ),
    "num_measured_steps": Column(
        FIGURE, NUMBER, "steps of the measured window", "summary.num_measured_steps"
    ),
    "num_warmup_steps": Column(FIGURE, NUMBER, "steps before it", "summary.num_warmup_steps"),
    "stability": Column(FIGURE, NAME, "whether the step time had settled", "summary.stability"),
    "flags": Column(
        FIGURE,
        NAME,
        "what makes the figure doubtful",
        lambda record: ";".join(value_at(record, "summary.flags") or ()) or None,
    ),
    "step_time_cv_percent": Column(
        FIGURE, NUMBER, "standard deviation over mean of the steps", "summary.step_time_cv_percent"
    ),
    "num_outliers": Column(
        FIGURE, NUMBER, "steps far from the others, which are kept", "summary.num_outliers"
    ),
    "matmul_tflops": Column(
        FIGURE, POSITIVE, "TFLOP/s of a matrix product before the run", "summary.matmul_tflops"
    ),
    "mfu_of_matmul_percent": Column(
        FIGURE, NUMBER, "share of that product's rate", "summary.mfu_of_matmul_percent"
    ),
    "power_w": Column(FIGURE, NUMBER, "power of a GPU, W", "summary.gpu.power_w"),
    "energy_j_per_image": Column(
        FIGURE, NUMBER, "energy of an image on all GPUs, J", _energy_j_per_image
    ),
    "loss_first": Column(FIGURE, NUMBER, "loss of the first step", "summary.loss_first"),
    "loss_last": Column(FIGURE, NUMBER, "loss of the last step", "summary.loss_last"),
    "started_utc": Column(ORIGIN, NAME, "when the run began", "started_utc"),
    "git_commit": Column(ORIGIN, NAME, "commit of the suite", "git.commit"),
    "reason": Column(FIGURE, NAME, "why the run did not end well", "reason"),
    # Of quoted figures.
    "read_from": Column(ORIGIN, NAME, "how the figure was read, if not from text"),
    "submitter": Column(SETTING, NAME, "who submitted the figure"),
    "tensor_parallel": Column(SETTING, NUMBER, "GPUs that share one copy of the model"),
    "teraflop_per_image": Column(FIGURE, POSITIVE, "arithmetic of a trained image, TFLOP"),
    "minutes_to_target": Column(FIGURE, POSITIVE, "minutes until the validation loss is reached"),
    # Of whole trainings.
    "what": Column(SETTING, NAME, "task of the training"),
    "run_time_s": Column(FIGURE, POSITIVE, "time of the whole run, s"),
    "num_images": Column(SETTING, COUNT, "images that were trained or delivered"),
    "num_runs": Column(FIGURE, COUNT, "runs of a quoted figure"),
    # Of predictions.
    "lora_rank": Column(SETTING, COUNT, "rank of LoRA; none: all weights are trained"),
    "sharding": Column(SETTING, NAME, "how ranks share weights"),
    "step_time_s": Column(FIGURE, NUMBER, "time of a step, s"),
    "device_percent": Column(FIGURE, NUMBER, "share of the step in which the GPU limits it"),
    "start_percent": Column(FIGURE, NUMBER, "share in which the start of operators does"),
    "exchange_percent": Column(FIGURE, NUMBER, "share in which the exchange between GPUs does"),
    "memory_gib": Column(FIGURE, NUMBER, "estimated peak memory of a GPU, GiB"),
    "why": Column(FIGURE, NAME, "why there is no figure"),
    "pool": Column(ORIGIN, NAME, "kind of prediction, whose errors were tested together"),
    "pool_tests": Column(ORIGIN, COUNT, "figures that were predicted to test it"),
    "pool_median_error_percent": Column(ORIGIN, NUMBER, "median of their errors"),
    "tested_inside_percent": Column(ORIGIN, NUMBER, "share of them inside their intervals"),
    "predicted_on": Column(ORIGIN, NAME, "day of the prediction"),
    # Of runs that load or encode data.
    "job": Column(SETTING, NAME, "feed: data were loaded; precompute: they were encoded"),
    "data": Column(SETTING, NAME, "folder or address of the data"),
    "batch_size": Column(SETTING, COUNT, "images of a batch of the loader"),
    "images_per_second_per_core": Column(FIGURE, NUMBER, "images/s of a CPU core"),
    "megabytes_per_second": Column(FIGURE, NUMBER, "read from storage, MB/s"),
    "read_ms_per_image": Column(FIGURE, NUMBER, "time to read an image, ms of a process"),
    "decode_ms_per_image": Column(FIGURE, NUMBER, "time to decode it"),
    "transform_ms_per_image": Column(FIGURE, NUMBER, "time to resize and crop it"),
    "tokenize_ms_per_image": Column(FIGURE, NUMBER, "time to tokenize its caption"),
    "collate_ms_per_image": Column(FIGURE, NUMBER, "time to put it into a batch"),
    "emulate_step_seconds": Column(SETTING, NUMBER, "time of an emulated training step, s"),
    "num_bad_samples": Column(FIGURE, COUNT, "samples that were replaced by others"),
    "num_dropped_samples": Column(FIGURE, COUNT, "samples left out of the data set"),
}
