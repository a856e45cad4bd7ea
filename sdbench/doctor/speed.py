"""`doctor --speed`: what each GPU or the cores of a node reach, and verdicts on it."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sdbench
from sdbench.base.carried import THROUGHPUT
from sdbench.base.units import counted
from sdbench.doctor.finding import ERROR, OK, SKIPPED, WARNING, Job, Seen, bounded, describe
from sdbench.doctor.gpus import Gpu, find_gpu
from sdbench.measure.neighbours import Neighbours
from sdbench.record.formulas import facts_of
from sdbench.record.row import RUN_COLUMNS
from sdbench.record.store import utc_now
from sdbench.report.figures import MEASURED, read_figures
from sdbench.report.runs import use_each
from sdbench.report.tables import Field, tabulate, to_terminal
from sdbench.report.terminal import NOT_KNOWN, align, format_number

# The most measurements of a node, each of which may take the doctor's timeout: 5 of 16 GPUs.
MAX_MEASUREMENTS = 5 * 16
# Below these shares of other rates a GPU is slow. The 6 products of an H200 in results/ differ by
# 1.5 %; GPUs of one model in one cluster by 8 % on the average (Sinha et al., "Not All GPUs Are
# Created Equal", SC22). 5 % is a rule that SuperBench's guide has (Data Diagnosis).
LEAST = {"elsewhere": 0.9, "median_of_node": 0.95}
# Bytes of a gradient whose all-reduce takes little of its time to begin.
MIN_REDUCED_BYTES = 1e9
SLOW, FAILED = "slow", "failed"
PRODUCT = "_product_tflops"
CPU = "CPU"
RULE = (
    f"A GPU is slow below {LEAST['elsewhere']:.0%} of what others reached, or below "
    f"{LEAST['median_of_node']:.0%} of the median of its node. No program reaches the peak of a "
    "data sheet. Cores get no verdict: in clouds, CPUs of one name differ."
)
ADVICE = (
    "measure again while nothing else runs; look at clocks and power (nvidia-smi -q -d "
    "PERFORMANCE) and at the links (nvidia-smi nvlink --status, nvidia-smi -q: GPU Link Info); "
    "reset the GPU, or refuse the node"
)
Row = dict[str, Any]


def measure_node(job: Job) -> dict[str, list[Any]]:
    """Measure the GPUs of this node one after the other, or its cores.

    Each figure has the job's timeout. Return `devices`, `figures`, and `seen`, which has levels and
    texts about what would spoil them.
    """
    import torch

    devices: list[Row] = []
    figures: list[Row] = []
    seen = [(WARNING, others) for others in [Neighbours().describe([os.getpid()])] if others]
    try:
        num_gpus = bounded(torch.cuda.device_count, timeout_s=job.timeout_s)
        if 0 < num_gpus < job.ranks.local_world_size:
            found = f"the first rank sees {num_gpus} of {job.ranks.local_world_size} GPUs"
            seen.append((ERROR, found))
        for index in range(num_gpus) or [None]:
            prepare = functools.partial(_prepare, index, num_gpus)
            device, measures = bounded(prepare, timeout_s=job.timeout_s)
            devices.append(device)
            for name, measure in measures.items():
                reached, problem = None, None
                try:
                    reached = bounded(measure, timeout_s=job.timeout_s)
                except Exception as error:
                    problem = describe(error)
                known = find_known(device, name)
                figures.append(make_figure(device["device"], name, reached, problem, known))
    except Exception as error:
        seen.append((ERROR, describe(error)))
    judge(figures)
    return {"devices": devices, "figures": figures, "seen": seen}


def _prepare(index: int | None, num_gpus: int) -> tuple[Row, dict[str, Callable[[], float]]]:
    """Describe a GPU, or the cores for None; return that, and what measures each figure of it."""
    import torch

    from sdbench.measure.ceilings import measure_bandwidth, measure_copy, measure_matmul_tflops
    from sdbench.measure.hardware import inspect_machine

    machine = inspect_machine(local_rank=index or 0)
    kind, uuid, gpu, here = machine.device_type, None, None, f"cuda:{index}"
    precisions = [machine.fast_dtype(kind, on_ray=False)]
    if index is None:
        torch.set_num_threads(sdbench.NUM_CPUS)  # torchrun starts ranks with one thread
        precisions = list(dict.fromkeys(["fp32", *precisions]))
    else:
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        gpu = find_gpu(uuid)
    measures: dict[str, Callable[[], float]] = {
        f"{one}{PRODUCT}": functools.partial(measure_matmul_tflops, one, device_type=kind)
        for one in precisions
    }
    measures["memory_gb_per_s"] = lambda: measure_bandwidth(device_type=kind).rate
    if index is not None:
        measures["from_host_gb_per_s"] = functools.partial(measure_copy, "cpu", here)
        measures["to_host_gb_per_s"] = functools.partial(measure_copy, here, "cpu")
    if num_gpus > 1:
        others = [f"cuda:{other}" for other in range(num_gpus) if other != index]
        # The same bytes to each: a slow link of one GPU tells most in the figure of that GPU.
        measures["to_peers_gb_per_s"] = lambda: statistics.harmonic_mean(
            measure_copy(here, other) for other in others
        )
    device = {
        "device": CPU if index is None else f"GPU {index if gpu is None else gpu.index}",
        "name": machine.device_name,
        "num_cpu_cores": machine.num_cpu_cores,
        "uuid": None if uuid is None else f"GPU-{uuid}",
        "serial_number": None if gpu is None else gpu.ask("Serial"),
    }
    return device, {
        name: functools.partial(_measure_on, index, gpu, measure)
        for name, measure in measures.items()
    }


def _measure_on(index: int | None, gpu: Gpu | None, measure: Callable[[], float]) -> float:
    """Measure with this GPU as the current one, and with memory of the host that is next to it."""
    import torch

    if gpu is not None:
        gpu.bind_thread()
    with contextlib.nullcontext() if index is None else torch.cuda.device(index):
        try:
            return measure()
        finally:
            if index is not None:
                torch.cuda.empty_cache()  # the all-reduce needs memory


def make_figure(
    device: str, name: str, reached: float | None, problem: str | None, known: Row
) -> Row:
    """A figure, named with its unit, beside what is `known` of it."""
    return {
        "device": device,
        "figure": name,
        "reached": reached,
        **dict.fromkeys(("data_sheet", "elsewhere", "elsewhere_from", "median_of_node")),
        **known,
        "verdict": None if problem is None else FAILED,
        "problem": problem,
    }


def find_known(device: Row, figure: str) -> Row:
    """What a data sheet and others say of a figure of such a device, as far as that is known."""
    facts = facts_of(device["name"])
    accepted = facts.get("accepted", {})
    if figure in accepted:
        source = f"the least that is accepted by {accepted['source']}"
        return {"elsewhere": accepted[figure], "elsewhere_from": source}
    if not figure.endswith(PRODUCT):
        return {"data_sheet": facts.get("gb_per_s")} if figure == "memory_gb_per_s" else {}
    precision = figure.removesuffix(PRODUCT)
    known = {"data_sheet": facts.get("peaks", {}).get(precision)}
    rates = [
        row["matmul_tflops"]
        for row in _read_published()
        if (row["kind"], row["device"]) == (MEASURED, device["name"])
        and (device["device"] != CPU or row["num_cpu_cores"] == device["num_cpu_cores"])
        and (row["precision"] or "").removeprefix("amp_") == precision
        and row["matmul_tflops"] is not None
    ]
    if not rates:
        return known
    source = f"the median of {counted(len(rates), 'run')} in results/"
    return known | {"elsewhere": statistics.median(rates), "elsewhere_from": source}


def _read_published() -> list[Row]:
    read = functools.partial(read_figures, required=RUN_COLUMNS)
    tables, _ = use_each(filter(Path.is_file, [THROUGHPUT]), read)
    return [row for table in tables for row in table]


def judge(figures: Sequence[Row]) -> None:
    """Set the median and the verdict of each figure of a node."""
    for figure in figures:
        rates = [
            one["reached"]
            for one in figures
            if one["figure"] == figure["figure"] and one["reached"] is not None
        ]
        if len(rates) > 1:
            figure["median_of_node"] = statistics.median(rates)
        limits = [
            least * figure[beside] for beside, least in LEAST.items() if figure[beside] is not None
        ]
        if limits and figure["reached"] is not None and figure["device"] != CPU:
            figure["verdict"] = OK if figure["reached"] >= max(limits) else SLOW


def report_speed(nodes: Sequence[Mapping[str, list[Any]]], job: Job) -> Row:
    """Return what the report has of all nodes, with the all-reduce if there was one."""
    devices, figures = (
        [{"node": number, **one} for number, node in enumerate(nodes) for one in node[key]]
        for key in ("devices", "figures")
    )
    if job.bus_gb_per_s is not None:
        figures.append({"node": None, **_judge_all_reduce(job, devices)})
    return {"measured_utc": utc_now(), "devices": devices, "figures": figures}


def _judge_all_reduce(job: Job, devices: Sequence[Row]) -> Row:
    """Return the figure of the all-reduce; it has a verdict where others did the same."""
    name, ranks, known = "all_reduce_gb_per_s", job.ranks, {}
    if ranks.num_nodes == 1 and 4 * (job.num_trainable or 0) >= MIN_REDUCED_BYTES:
        for device in devices[:1]:
            if facts_of(device["name"]).get("accepted", {}).get("num_gpus") == ranks.world_size:
                known = find_known(device, name)
    figure = make_figure(counted(ranks.world_size, "rank"), name, job.bus_gb_per_s, None, known)
    judge([figure])
    return figure


def look(speed: Row, nodes: Sequence[Mapping[str, list[Any]]]) -> Seen:
    """Yield the level and the text of what the nodes have seen, and of each bad verdict."""
    figures = speed["figures"]
    judged = [figure for figure in figures if figure["verdict"] is not None]
    found = f"{len(judged)} of {counted(len(figures), 'figure')} have a verdict"
    yield OK if judged else SKIPPED, found
    for number, node in enumerate(nodes):
        yield from ((level, f"node {number}: {found}") for level, found in node["seen"])
    for figure in judged:
        if figure["verdict"] != OK:
            where = "" if figure["node"] is None else f"node {figure['node']}, "
            elsewhere, node = (_share(figure, key) for key in ("elsewhere", "median_of_node"))
            why = figure["problem"] or f"{elsewhere} elsewhere, {node} in this node"
            yield ERROR, f"{where}{figure['device']}: {figure['figure']} {figure['verdict']}, {why}"


def _share(figure: Row, beside: str) -> str:
    """The share of another rate that a figure is."""
    if figure[beside] is None or figure["reached"] is None:
        return NOT_KNOWN
    return f"{figure['reached'] / figure[beside]:.0%} of {format_number(figure[beside])}"


FIELDS = (
    Field("node", "node", unknown="all"),
    Field("device", "device"),
    Field("figure", "figure"),
    Field("reached", "reached"),
    Field("data sheet", lambda figure: _share(figure, "data_sheet")),
    Field("elsewhere", lambda figure: _share(figure, "elsewhere")),
    Field("median of node", lambda figure: _share(figure, "median_of_node")),
    Field("verdict", "verdict", unknown="none"),
)


def format_speed(speed: Mapping[str, Any], *, hosts: Sequence[str]) -> str:
    """Format what was measured, when and where; `RULE` says how it was judged."""
    facts = [("measured", speed["measured_utc"])]
    facts += [(f"node {number}", host) for number, host in enumerate(hosts)]
    for device in speed["devices"]:
        label, what = f"node {device['node']}, {device['device']}", device["name"]
        if device["device"] == CPU:
            what += f", {counted(device['num_cpu_cores'], 'core')}"
        else:
            serial = device["serial_number"] or "not told"
            what += f", UUID {device['uuid']}, serial number {serial}"
        facts.append((label, what))
    # The same figure of all devices is together.
    names = [figure["figure"] for figure in speed["figures"]]
    figures = sorted(speed["figures"], key=lambda figure: names.index(figure["figure"]))
    parts = [align(facts), to_terminal(tabulate(FIELDS, figures))]
    sources = dict.fromkeys((one["figure"], one["elsewhere_from"]) for one in figures)
    if known := [(figure, source) for figure, source in sources if source is not None]:
        parts.append(f"Elsewhere:\n{align(known)}")
    return "\n\n".join(parts)
