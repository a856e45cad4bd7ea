"""Finds figures of a record that cannot all be true, such as a rate that its window does not give.

Derived figures have their formulas in `formulas`, by which runs write them. Others have bounds: a
window is no longer than its run, and a peak no larger than the memory.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sdbench.base.outside import is_bounded, parse_table
from sdbench.record import formulas
from sdbench.record.formulas import MEASURED, PROFILED
from sdbench.record.record_kinds import BENCHMARK, FEED, PRECOMPUTE, TRAIN, kind_of

# The host times the window, and on a GPU its events time the steps. In the 8 published records of a
# GPU, with windows of 10 s, both agree to 3e-6. How far they differ in a short window was not
# measured: this is an allowance. A CPU has one clock.
MAX_CLOCK_DIFFERENCE = 0.1
# Figures are written as they were computed, and the memory of a machine to 0.01 GiB.
EXACT, ROUNDED = 1e-6, 0.01


class Derived(NamedTuple):
    """Figures of a field of the record, by name, as the `source` gives them."""

    source: str
    field: str
    figures: Mapping[str, Any]
    tolerance: float = EXACT


class Bound(NamedTuple):
    """A figure, in words, that is at most another one; None: not known."""

    name: str
    value: float | None
    other: str
    largest: float | None
    tolerance: float = EXACT


class Step(NamedTuple):
    """A row of the steps.csv of a measurement, as the formulas take it."""

    phase: str
    step_time_s: float
    data_wait_s: float
    loss: float
    shape: str | None


def find_contradictions(record: Mapping[str, Any], steps_csv: str) -> Iterator[str]:
    """Yield a sentence for each figure of a record that others contradict.

    The record satisfies its schema; the text of its run's steps.csv may be empty. Null is not
    known, and contradicts nothing.
    """
    of_kind = OF_KINDS[kind_of(record)] if record["summary"] is not None else lambda *_: ()
    for relation in itertools.chain(_of_every_kind(record), of_kind(record, steps_csv)):
        if isinstance(relation, Derived):
            source, field, derived, tolerance = relation
            for name, value, other in _find_different(record[field], derived, tolerance):
                yield f"{name} is {_in_words(value)}, but {source} give {_in_words(other)}"
        else:
            name, value, other, largest, tolerance = relation
            if value is not None and largest is not None and value > largest * (1 + tolerance):
                yield f"{name} is {value:.6g}, more than {other}, {largest:.6g}"


def _find_different(
    recorded: Any, derived: Any, tolerance: float, name: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the recorded and the derived value of each figure that differs."""
    if recorded is None:
        return
    if isinstance(derived, Mapping) and isinstance(recorded, Mapping):
        for key, value in derived.items():
            place = f"{name}.{key}" if name else key
            yield from _find_different(recorded.get(key), value, tolerance, place)
    elif isinstance(derived, Sequence) and not isinstance(derived, str):
        if len(recorded) != len(derived):
            yield name, recorded, derived
            return
        for index, (one, value) in enumerate(zip(recorded, derived, strict=True)):
            yield from _find_different(one, value, tolerance, f"{name}[{index}]")
    elif isinstance(derived, float):
        if not math.isclose(recorded, derived, rel_tol=tolerance, abs_tol=1e-12):
            yield name, recorded, derived
    elif recorded != derived and derived is not None:
        yield name, recorded, derived


def _in_words(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _of_every_kind(record: Mapping[str, Any]) -> Iterator[Derived | Bound]:
    """What holds in records of every kind and every end."""
    if estimate := record.get("memory_estimate_gib"):
        parts = {name: gib for name, gib in estimate.items() if name not in ("phase", "total_gib")}
        total = {"total_gib": float(sum(parts.values()))}
        yield Derived("its parts", "memory_estimate_gib", total)
    machine = record["machine"]
    if ranks := record.get("ranks"):
        world_size, per_node = ranks["world_size"], ranks["ranks_per_node"]
        num_nodes = {"num_nodes": world_size // per_node}
        yield Derived(f"{world_size} ranks, {per_node} of them on a node,", "ranks", num_nodes)
        if machine["device_type"] == "cuda":
            num_gpus = machine["num_devices"]
            yield Bound("ranks.ranks_per_node", per_node, "the GPUs of a node", num_gpus)
    workload = record.get("workload", {})
    trained, whole = (workload.get(f"num_{kind}parameters") for kind in ("trainable_", ""))
    yield Bound("num_trainable_parameters", trained, "num_parameters", whole)
    summary = record["summary"]
    if summary is None:
        return
    # Other nodes may have more memory than the one that the record describes.
    if ranks is None or ranks["num_nodes"] == 1:
        memory_gib, peak_gib = machine["device_memory_gib"], summary.get("peak_memory_gib")
        yield Bound("peak_memory_gib", peak_gib, "the memory of the device", memory_gib, ROUNDED)
    yield Bound("window_s", summary.get("window_s"), "duration_s", record["duration_s"])
    rate = summary["images_per_second"]
    if rate is not None:
        interval = summary.get("images_per_second_interval")
        clocks = _clock_difference(record)
        yield from _of_interval("images_per_second", rate, interval, tolerance=clocks)
        if interval is not None:
            num_blocks, num_steps = interval["num_samples"], summary["num_measured_steps"]
            yield Bound("num_samples of its interval", num_blocks, "num_measured_steps", num_steps)


def _clock_difference(record: Mapping[str, Any]) -> float:
    """By how much the time of the window may differ from that of its steps."""
    return MAX_CLOCK_DIFFERENCE if record["machine"]["device_type"] == "cuda" else ROUNDED


def _of_interval(
    name: str, rate: float, interval: Mapping[str, Any] | None, *, tolerance: float
) -> Iterator[Bound]:
    """A rate lies in its interval.

    The interval is one of the mean step time, which is in its middle, or below where pauses make
    the step times skew.
    """
    if interval is None:
        return
    low, high = interval["low"], interval["high"]
    yield Bound(f"the low end of {name}", low, "the rate", rate, tolerance)
    yield Bound(name, rate, "the high end of its interval", high, tolerance)
    middle = 2 / (1 / low + (1 / high if high else 0))
    yield Bound(f"the rate in the middle of the interval of {name}", middle, "it", rate, tolerance)


def _of_benchmark(record: Mapping[str, Any], steps_csv: str) -> Iterator[Derived | Bound]:
    summary, config, workload = record["summary"], record["config"], record["workload"]
    ranks, batch_size = record["ranks"], record["config"]["batch_size"]
    num_steps, window_s = summary["num_measured_steps"], summary["window_s"]
    rate = formulas.rate_of(batch_size * num_steps, window_s)
    source = f"{num_steps} steps of {batch_size} images in {window_s:.6g} s"
    yield Derived(source, "summary", {"images_per_second": rate})
    num_images = {"num_images": batch_size * workload["num_steps"]}
    yield Derived("its num_steps and batch_size", "workload", num_images)
    if workload["flops_per_image"] is not None:
        yield Derived(
            "images_per_second, the ranks, flops_per_image and the peaks",
            "summary",
            formulas.of_devices(
                summary["images_per_second"],
                num_devices=ranks["world_size"],
                flops_per_image=workload["flops_per_image"],
                peak=formulas.peak_tflops(record["machine"]["device_name"], config["precision"]),
                matmul=summary["matmul_tflops"],
                images_per_second_of_epoch=summary.get("images_per_second_of_epoch"),
            ),
        )
    clocks = _clock_difference(record)
    median_s, slow_s = summary["step_time_p50_s"], summary["step_time_p95_s"]
    yield Bound("step_time_p50_s", median_s, "step_time_p95_s", slow_s)
    yield Bound("step_time_p95_s", slow_s, "window_s", window_s, clocks)
    half_s = num_steps // 2 * median_s
    yield Bound("half of the steps at step_time_p50_s", half_s, "window_s", window_s, clocks)
    for name in ("breakdown", "startup"):
        if (split := summary[name]) is not None:
            whole = "step_time_s" if name == "breakdown" else "total_s"
            of_parts = {name: {whole: float(formulas.total_s(split["seconds"]))}}
            yield Derived("its parts", "summary", of_parts)
    if (gpu := summary["gpu"]) is not None:
        utilization = {"gpu_utilization_percent": gpu["utilization_percent"]}
        yield Derived("the readings of the GPU", "summary", utilization)
    stragglers = summary["stragglers"] or ()
    nodes = [{"node": one["rank"] // ranks["ranks_per_node"]} for one in stragglers]
    yield Derived("its rank and ranks_per_node", "summary", {"stragglers": nodes})
    for one in stragglers:
        yield Bound("the rank of a straggler", one["rank"], "the last", ranks["world_size"] - 1)
    if shapes := summary.get("shapes"):
        source = "the steps of its shapes"
        num_of_shapes = sum(shape["num_steps"] for shape in shapes)
        num_timed = sum(shape["num_steps"] for shape in shapes if shape["step_time_s"])
        yield Derived(source, "summary", {"num_measured_steps": num_of_shapes})
        if num_timed:
            rates = formulas.of_shapes(shapes, images_per_step=batch_size)
            yield Derived(source, "summary", rates)
    if (flags := summary["flags"]) is not None:
        raised = formulas.raise_flags(summary, network=ranks["network"], others=flags)
        if set(raised) != set(flags):
            yield Derived("the other figures", "summary", {"flags": raised})
    if steps := parse_steps(steps_csv):
        yield from _of_steps(record, steps, source="the steps of steps.csv")


def _of_steps(
    record: Mapping[str, Any], steps: Sequence[Step], *, source: str
) -> Iterator[Derived | Bound]:
    """What the steps of a measurement say about its summary."""
    summary, batch_size = record["summary"], record["config"]["batch_size"]
    yield Derived(source, "workload", {"num_steps": len(steps)})
    times_s = [step.step_time_s for step in steps if step.phase == MEASURED]
    yield Derived(source, "summary", {"num_measured_steps": len(times_s)})
    if len(times_s) != summary["num_measured_steps"]:
        return
    rate = formulas.rate_of(batch_size * len(times_s), sum(times_s))
    clocks = _clock_difference(record)
    yield Derived(source, "summary", {"images_per_second": rate}, clocks)
    derived = formulas.of_steps(steps, images_per_step=batch_size, window_s=summary["window_s"])
    yield Derived(source, "summary", derived)
    # By the clock of the steps, as the interval is.
    interval = summary["images_per_second_interval"]
    yield from _of_interval("the rate of its steps", rate, interval, tolerance=EXACT)
    if summary["breakdown"] is not None:
        num_profiled = sum(step.phase == PROFILED for step in steps)
        yield Derived(source, "summary", {"breakdown": {"num_steps": num_profiled}})
    if (buckets := record["workload"]["buckets"]) is not None:
        rows = formulas.rows_of_shapes(steps, buckets["num_samples"])
        yield Derived(source, "summary", {"shapes": rows})
    all_s = sum(step.step_time_s for step in steps)
    yield Bound(source, all_s, "duration_s", record["duration_s"], clocks)


def _of_feed(record: Mapping[str, Any], _: str) -> Iterator[Derived | Bound]:
    summary, config = record["summary"], record["config"]
    num_steps, rate = summary["num_measured_steps"], summary["images_per_second"]
    source = f"{num_steps} steps of {config['batch_size']} images"
    yield Derived(source, "summary", {"num_images": num_steps * config["batch_size"]})
    of_window = formulas.rate_of(summary["num_images"], summary["window_s"])
    yield Derived("num_images and window_s", "summary", {"images_per_second": of_window})
    yield Bound("num_measured_steps", num_steps, "num_batches", config["num_batches"])
    stages = summary.get("ray")
    num_workers, num_cores = config["num_workers"], record["machine"]["num_cpu_cores"]
    if stages is not None:
        num_workers = num_cores = config["num_decoders"] or 1
    target = config["target_images_per_second"] if stages is None else None
    num_processes = max(num_workers or 0, 1)
    yield Derived(
        "images_per_second, the workers and the cores",
        "summary",
        formulas.of_processes(
            rate, num_processes=num_processes, num_cores=num_cores, target=target
        ),
    )
    for worker in ("decoder", "encoder") if stages is not None else ():
        number, rate_of_one = f"num_{worker}s", stages[f"images_per_second_per_{worker}"]
        enough = formulas.num_for_target(stages["target_images_per_second"], rate_of_one)
        derived = {number: config[number], f"{number}_for_target": enough}
        yield Derived("the settings and rates", "summary", {"ray": derived})
        if rate_of_one is not None:
            name = f"images_per_second_per_{worker}"
            interval = stages[f"{name}_interval"]
            yield from _of_interval(name, rate_of_one, interval, tolerance=ROUNDED)


def _of_precompute(record: Mapping[str, Any], _: str) -> Iterator[Derived | Bound]:
    summary, config, workload = record["summary"], record["config"], record["workload"]
    num_written, num_bad = summary["num_images_written"], summary["num_bad_samples"]
    num_samples, num_images = workload["num_samples"], summary["num_images"]
    yield Bound("num_images", num_images, "the images of the data set", num_written + num_bad)
    yield Bound("the images of the data set", num_written + num_bad, "num_samples", num_samples)
    if config["buckets"] is None and config["samples_per_shard"] is not None:
        of_samples = {"num_images_written": num_samples - num_bad}
        yield Derived("num_samples and num_bad_samples", "summary", of_samples)
        num_shards = {"num_shards": -(-num_samples // config["samples_per_shard"])}
        yield Derived("num_samples and samples_per_shard", "workload", num_shards)
    rate, rate_of_one = summary["images_per_second"], summary["images_per_second_per_device"]
    if None in (rate, rate_of_one, summary["window_s"], summary["step_ms_per_image"]):
        return
    # Ranks without a shard of their own do not count.
    num_ranks = min(max(round(rate / rate_of_one), 1), record["ranks"]["world_size"])
    of_ranks = {"images_per_second_per_device": rate / num_ranks}
    yield Derived(f"images_per_second of {num_ranks} ranks", "summary", of_ranks)
    in_window = rate * summary["window_s"]
    yield Bound("the images of the window", in_window, "num_images", num_images)
    in_batches = summary["num_measured_steps"] * config["batch_size"] * num_ranks
    yield Bound("the images of the window", in_window, "those of its batches", in_batches)
    # The last batch of each shard may have as few as one.
    least = in_batches - workload["num_shards"] * (config["batch_size"] - 1)
    yield Bound("the least images of these batches", least, "those of the window", in_window)
    # The window is as long as its slowest rank takes, and the parts are means of all ranks.
    ms_per_image = formulas.total_s(summary["step_ms_per_image"])
    yield Bound("step_ms_per_image", ms_per_image, "the time of a rank", 1000 / rate_of_one)
    if num_ranks == 1:
        yield Bound("the time of a rank", 1000 / rate_of_one, "step_ms_per_image", ms_per_image)


def _of_train(record: Mapping[str, Any], steps_csv: str) -> Iterator[Derived | Bound]:
    summary, workload = record["summary"], record["workload"]
    batch_size, num_steps = record["config"]["batch_size"], workload["num_steps"]
    first_step, train_s, lost_s = (summary[name] for name in ("first_step", "train_s", "lost_s"))
    total_s, trained = summary["total_train_s"], num_steps - first_step
    yield Bound("first_step", first_step, "num_steps", num_steps)
    source = f"{num_steps} steps of {batch_size} images"
    yield Derived(source, "workload", {"num_images": num_steps * batch_size})
    to_target = summary.get("samples_to_target")
    yield Bound("samples_to_target", to_target, source, num_steps * batch_size)
    if train_s:
        rate = formulas.rate_of(trained * batch_size, train_s)
        source = f"{trained} steps of {batch_size} images in train_s"
        yield Derived(source, "summary", {"images_per_second": rate})
    # One of them may lie within another: a bad loss may make a run save.
    for name, seconds in {"train_s": train_s, **summary["other_s"]}.items():
        yield Bound(name, seconds, "duration_s", record["duration_s"], ROUNDED)
    yield Bound("lost_s", lost_s, "total_train_s", total_s)
    if first_step == 0:
        kept_s = total_s - lost_s
        yield Bound("total_train_s without lost_s", kept_s, "train_s", train_s, ROUNDED)
    if summary["num_restarts"] == 0:
        nothing = {"num_lost_steps": 0, "lost_s": 0.0, "down_s": 0.0}
        yield Derived("0 restarts", "summary", nothing)
    if summary["num_lost_steps"] == 0:
        yield Derived("0 lost steps", "summary", {"lost_s": 0.0})
    rows = _parse_rows(steps_csv, ("images_per_second",))
    if rates := [float(row["images_per_second"]) for row in rows]:
        kept_s = formulas.time_of_training(rates, images_per_step=batch_size)
        source = "lost_s and the steps of steps.csv"
        yield Derived(source, "summary", {"total_train_s": kept_s + lost_s}, ROUNDED)


OF_KINDS = {
    BENCHMARK: _of_benchmark,
    FEED: _of_feed,
    PRECOMPUTE: _of_precompute,
    TRAIN: _of_train,
}


def parse_steps(text: str) -> list[Step]:
    """The steps of a measurement, from its steps.csv; empty if that is no table of them."""
    rows = _parse_rows(text, ("step_time_s", "data_wait_s", "loss"), text=("phase",))
    return [
        Step(
            row["phase"],
            float(row["step_time_s"]),
            float(row["data_wait_s"]),
            float(row["loss"]),
            row.get("shape") or None,
        )
        for row in rows
    ]


def _parse_rows(
    table: str, numbers: Sequence[str], *, text: Sequence[str] = ()
) -> list[dict[str, str]]:
    """The rows of a table with these columns, the first of them above 0; else an empty list."""
    try:
        rows = list(parse_table(table, required=(*text, *numbers)))
        for row in rows:
            values = [float(row[name]) for name in numbers]
            if not (all(map(is_bounded, values)) and values[0] > 0):
                return []
    except (ValueError, TypeError, csv.Error):
        return []  # the code that draws the steps reports the fault
    return rows
