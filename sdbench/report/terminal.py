"""The printed result of a training run, and the format of rates and numbers in every output."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sdbench.base.output import fit
from sdbench.base.units import counted
from sdbench.statistics.intervals import RULE_OF_THREE, between_runs_interval

NOT_KNOWN = "n/a"

FLAG_MEANINGS = {
    "drift": "the step time had not settled when the window ended",
    "noisy": "the steps vary by more than 10 %",
    "throttled": "heat, a power limit or the hardware held the GPU's clock down",
    "shared": "other processes computed on the GPU",
    "busy": "other processes used the CPUs before the measurement",
    "other_time": "more than 5 % of a profiled step lies outside the phases",
    "straggler": "a rank was slower than the others by a fifth or more",
    "sockets": "NCCL found no faster network between the machines than TCP sockets",
    "graph_breaks": "the model was compiled in pieces: TORCH_LOGS=graph_breaks tells where",
    "shapes": "the window has fewer than two steps of a shape",
    "precision_not_reached": "the longest window was not enough for --target_precision",
}


def format_summary(record: dict[str, Any]) -> str:
    """Format the result of a run that ended well as lines of name and value."""
    return align(list_figures(record))


def list_figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The names and values of the result of a run that ended well."""
    summary = record["summary"]
    times_s = [f"{summary[name]:.4g} s" for name in ("step_time_p50_s", "step_time_p95_s")]
    rows = [
        ("images/s", format_rate(summary)),
        *_lines_of_shapes(summary),
        ("images/s per device", f"{summary['images_per_second_per_device']:.4g}"),
        ("step time p50 / p95", " / ".join(times_s)),
        ("data wait", f"{summary['data_wait_percent']:.1f} %"),
        ("peak memory", f"{summary['peak_memory_gib']:.1f} GiB per rank"),
        ("GPU utilisation", _percent(summary["gpu_utilization_percent"])),
        ("MFU", _mfu(record)),
        *_optional_lines(summary),
        ("loss first / last", f"{summary['loss_first']:.4f} / {summary['loss_last']:.4f}"),
    ]
    for name, meaning in (("bad", "replaced by others"), ("dropped", "left out of the data set")):
        if number := record["workload"][f"num_{name}_samples"]:
            rows.append((f"{name} samples", f"{number}, {meaning}"))
    return rows


def align(rows: Sequence[tuple[str, str]]) -> str:
    """Lines of name and value, the values below each other."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(fit(f"  {name:<{width}}  {value}", hanging=width + 4) for name, value in rows)


def _lines_of_shapes(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines of a run with buckets."""
    if "shapes" not in summary:
        return []
    of_epoch = summary["images_per_second_of_epoch"]
    told = "n/a, the window lacks a shape" if of_epoch is None else f"{of_epoch:.4g}"
    by_shape = ", ".join(
        f"{row['shape']} {row['step_time_s']:.4g} s ({row['num_steps']})"
        for row in summary["shapes"]
        if row["num_steps"]
    )
    return [
        ("images/s of an epoch", told),
        ("megapixels/s", f"{summary['megapixels_per_second']:.4g}"),
        ("step time by shape", by_shape),
    ]


def _optional_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for figures that were not measured in every run."""
    rows = []
    if summary["matmul_tflops"] is not None:
        share, product = mfu_of_matmul(summary), format_number(summary["matmul_tflops"])
        text = f"{_percent(share)} of the {product} TFLOP/s measured before the run"
        if share is None:
            text = f"{NOT_KNOWN}: other work slowed the product down, {product} TFLOP/s"
        rows.append(("MFU of a matrix product", text))
    if summary["gpu"] is not None:
        rows.append(("GPU", _gpu_state(summary["gpu"])))
    if (breakdown := summary["breakdown"]) is not None:
        name = f"of a profiled step, {breakdown['step_time_s']:.3g} s"
        rows += [(name, format_breakdown(breakdown)), ("largest part", summary["bottleneck"])]
    if summary["attention_kernels"]:
        rows.append(("attention kernels", _attention_kernels(summary["attention_kernels"])))
    for rank in summary["stragglers"] or []:
        who = f"rank {rank['rank']} on node {rank['node']}"
        own = f"{rank['own_step_time_s']:.3g} s a step without its waits for others"
        rows.append(
            ("straggler", f"{who}: {own}, {rank['times_median']:.2f} times the median rank")
        )
    if summary["startup"] is not None:
        rows.append(("start-up", _startup(summary["startup"])))
    if summary["num_outliers"]:
        rows.append(("outliers", f"{summary['num_outliers']} of the measured steps, kept"))
    elif summary["images_per_second_interval"] is not None:
        # Rule of three: n steps miss what happens in a share of 3 / n of all steps with 5 %.
        share = f"1 step in {summary['num_measured_steps'] // RULE_OF_THREE}"
        rows.append(("outliers", f"none seen; pauses rarer than {share} may have been missed"))
    rows += [(f"caution: {flag}", FLAG_MEANINGS[flag]) for flag in summary["flags"] or ()]
    return rows


def mfu_of_matmul(summary: Mapping[str, Any]) -> float | None:
    """Percent of the rate of the matrix product before the run; None if the step was faster.

    No step is faster than the largest product alone: other work had slowed that down.
    """
    share = summary["mfu_of_matmul_percent"]
    return None if share is None or share > 100 else share


def format_breakdown(breakdown: dict[str, Any]) -> str:
    """Shares of a profiled step by phase in percent, largest first, without those below 0.5."""
    shares = {
        phase: 100 * seconds / breakdown["step_time_s"]
        for phase, seconds in breakdown["seconds"].items()
        if seconds is not None
    }
    largest_first = sorted(shares.items(), key=lambda share: -share[1])
    return ", ".join(
        f"{phase.replace('_', ' ')} {percent:.0f} %"
        for phase, percent in largest_first
        if percent >= 0.5
    )


def _attention_kernels(kernels: Sequence[dict[str, Any]]) -> str:
    """Each kernel with the widths of the heads that it ran for."""
    widths: dict[str, set[int]] = {}
    for kernel in kernels:
        widths.setdefault(kernel["kernel"], set()).add(kernel["head_width"])
    return "; ".join(
        f"{name} for heads of {', '.join(map(str, sorted(of_kernel)))}"
        for name, of_kernel in widths.items()
    )


def _startup(startup: dict[str, Any]) -> str:
    """Seconds to the first measured step by phase, without those below 0.01 s."""
    parts = [
        f"{phase.replace('_', ' ')} {seconds:.2f}"
        for phase, seconds in startup["seconds"].items()
        if seconds >= 0.01
    ]
    total = f"{startup['total_s']:.2f} s to the first measured step: {', '.join(parts)}"
    return f"{total}; compilation {startup['compile_s']:.2f}"


def _gpu_state(gpu: dict[str, Any]) -> str:
    parts = [
        f"{format_number(gpu[name], num_digits=3)} {unit}"
        for name, unit in (("power_w", "W"), ("temperature_c", "C"), ("sm_clock_mhz", "MHz"))
        if gpu[name] is not None
    ]
    if gpu["throttle_reasons"]:
        parts.append(f"clock held down by {', '.join(gpu['throttle_reasons'])}")
    return ", ".join(parts) or NOT_KNOWN


def format_rate(summary: dict[str, Any]) -> str:
    """Images/s of a run, to four significant figures; of a measurement with its interval."""
    rate = format_number(summary["images_per_second"])
    if "num_measured_steps" not in summary:  # a training run
        return rate
    interval = summary["images_per_second_interval"]
    if interval is None:
        num_steps = counted(summary["num_measured_steps"], "measured step")
        return f"{rate} (no interval: {num_steps}, 10 needed)"
    high = "unbounded" if interval["high"] is None else format_number(interval["high"])
    return f"{rate} ({format_number(interval['low'])} to {high}, 95 % {interval['kind']})"


def format_rates(summaries: Sequence[dict[str, Any]]) -> str:
    """The median of three or more runs with its interval; of fewer, each run with its own."""
    # A run that encoded too few batches has none.
    summaries = [summary for summary in summaries if summary["images_per_second"] is not None]
    if not summaries:
        return NOT_KNOWN
    median = describe_median([summary["images_per_second"] for summary in summaries])
    return median or "; ".join(format_rate(summary) for summary in summaries)


def describe_median(figures: Sequence[float], *, num_digits: int = 4) -> str | None:
    """The median of three or more runs with its interval; of fewer None."""
    interval = between_runs_interval(figures)
    if interval is None:
        return None
    median = format_number(statistics.median(figures), num_digits=num_digits)
    low, high = format_number(interval.low), format_number(interval.high)
    return f"median {median} ({low} to {high}, {interval.kind})"


def format_number(value: float, *, num_digits: int = 4) -> str:
    """A number to `num_digits` significant figures, without an exponent below a million."""
    return f"{float(f'{value:.{num_digits}g}'):g}"


def _percent(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.1f} %"


def _mfu(record: dict[str, Any]) -> str:
    mfu_percent = record["summary"]["mfu_percent"]
    if mfu_percent is not None:
        return _percent(mfu_percent)
    return (
        f"{NOT_KNOWN} (no peak known for {record['machine']['device_name']} in "
        f"{record['config']['precision']}: add a row to sdbench/measure/peaks.json)"
    )
