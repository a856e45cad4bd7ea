"""What does a person read when a run has ended?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sdbench.statistics import between_runs_interval

NOT_KNOWN = "n/a"


def format_summary(record: dict[str, Any]) -> str:
    """The short table at the end of a run.

    Args:
        record: A record with the status ok.

    Returns:
        Lines of name and value; unknown is n/a.
    """
    summary = record["summary"]
    rows = [
        ("images/s", format_rate(summary)),
        ("images/s per device", f"{summary['images_per_second_per_device']:.4g}"),
        ("step time p50 / p95", _step_times(summary)),
        ("data wait", f"{summary['data_wait_percent']:.1f} %"),
        ("peak memory", f"{summary['peak_memory_gib']:.1f} GiB per rank"),
        ("GPU utilisation", _percent(summary["gpu_utilization_percent"])),
        ("MFU", _mfu(record)),
        ("loss first / last", f"{summary['loss_first']:.4f} / {summary['loss_last']:.4f}"),
    ]
    # Records made before samples were counted have neither.
    for name, meaning in (("bad", "replaced by others"), ("dropped", "left out by the filters")):
        number = record["workload"].get(f"num_{name}_samples")
        if number:
            rows.append((f"{name} samples", f"{number}, {meaning}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def format_rate(summary: dict[str, Any]) -> str:
    """Images/s with its interval, to four significant figures."""
    rate = format_number(summary["images_per_second"])
    interval = summary["images_per_second_interval"]
    if interval is None:
        return f"{rate} (no interval: {summary['num_measured_steps']} measured steps, 10 needed)"
    high = "unbounded" if interval["high"] is None else format_number(interval["high"])
    return f"{rate} ({format_number(interval['low'])} to {high}, 95 % {interval['kind']})"


def format_rates(summaries: Sequence[dict[str, Any]]) -> str:
    """Images/s of runs of one configuration.

    Three or more have a median and a between-runs interval; fewer have the within-run one each.
    """
    # A run that encoded too few batches has none.
    summaries = [summary for summary in summaries if summary["images_per_second"] is not None]
    if not summaries:
        return NOT_KNOWN
    interval = between_runs_interval([summary["images_per_second"] for summary in summaries])
    if interval is None:
        return "; ".join(format_rate(summary) for summary in summaries)
    median = statistics.median(summary["images_per_second"] for summary in summaries)
    low, high = format_number(interval.low), format_number(interval.high)
    return f"median {format_number(median)} ({low} to {high}, {interval.kind})"


def format_number(value: float, *, num_digits: int = 4) -> str:
    """A number to so many significant figures, and without an exponent up to a million."""
    return f"{float(f'{value:.{num_digits}g}'):g}"


def _step_times(summary: dict[str, Any]) -> str:
    return f"{summary['step_time_p50_s']:.4g} s / {summary['step_time_p95_s']:.4g} s"


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
