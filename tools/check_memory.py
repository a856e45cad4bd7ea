"""Compares the memory estimate with measured peaks of records, and with published fits.

Each published case has the flags of benchmark.py for what its source did, as far as it tells it;
nothing of it was measured here. Both tables, in minutes:

    python tools/check_memory.py results/runs/*/record.json > tables.md
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.forecast.memory_tables import CARDS
from sdbench.measure.hardware import inspect_machine
from sdbench.models.architecture import resolve_architecture
from sdbench.models.memory import estimate_peak_memory
from sdbench.models.replay import Step
from sdbench.plan.memory_limit import MICROBATCH, find_need
from sdbench.plan.resolve import plan_step
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import load_record
from sdbench.report.tables import make_table, to_markdown
from sdbench.settings.config import PRESETS, SETTINGS, BenchmarkConfig, parse_request
from sdbench.settings.setting import GPU


class Case(NamedTuple):
    """A published run.

    Attributes:
        source: Who published it.
        gpu: The card, as its source names it.
        size: Key of `CARDS`.
        flags: Of benchmark.py.
        num_gpus: GPUs that share the batch.
        fits: Whether it ran.
        peak_gib: The peak that torch had allocated, where it was published.
    """

    source: str
    gpu: str
    size: int
    flags: str
    num_gpus: int = 1
    fits: bool = True
    peak_gib: float | None = None


AWS = "AWS, MosaicML Stable Diffusion, section 1.5"
SEED = "--preset seed --batch_size 2048 --device_train_microbatch_size"
MILABENCH = "milabench, diffusion-single"
# bf16 autocast by Hugging Face diffusers, encoders in bf16, a step of one micro-batch.
MILA = "--encoder_dtype bf16 --compile none --batch_size {0} --device_train_microbatch_size {0}"
FLUX = "--model_name flux-schnell --compile none --batch_size 4 --device_train_microbatch_size 1"
OPEN_DIFFUSION = "mlfoundations/open-diffusion, README"
CHECKPOINTED = (
    "--model_name sd1-base --use_ema --compile none --activation_checkpointing full "
    "--image_size {0} --batch_size {1} --device_train_microbatch_size {1}"
)
CASES = (
    *(
        Case(AWS, gpu, 80, f"{SEED} {microbatch} --use_ema", num_gpus=8)
        for gpu in ("A100 80 GB", "H100 80 GB")
        for microbatch in (4, 16, 32)
    ),
    Case("mosaicml/diffusion-benchmark", "A100 40 GB", 40, f"{SEED} 4 --use_ema", num_gpus=8),
    Case(
        "mosaicml/diffusion",
        "A100 40 GB",
        40,
        "--latents precomputed --sharding grad_op --compile none --batch_size 2048 "
        "--device_train_microbatch_size 16",
        num_gpus=8,
    ),
    Case(MILABENCH, "H100 80 GB", 80, MILA.format(48)),
    Case(MILABENCH, "H200", 141, MILA.format(80)),
    Case(MILABENCH, "MI355X", 288, MILA.format(32), peak_gib=51.1),
    Case(MILABENCH, "MI355X", 288, MILA.format(64), peak_gib=89.6),
    Case(MILABENCH, "MI355X", 288, MILA.format(96), peak_gib=128.0),
    Case(OPEN_DIFFUSION, "A100 80 GB", 80, CHECKPOINTED.format(512, 64)),
    Case(OPEN_DIFFUSION, "A100 80 GB", 80, CHECKPOINTED.format(256, 256)),
    Case(
        "huggingface/diffusers#10196: all weights of Flux.1",
        "80 GB",
        80,
        f"{FLUX} --image_size 1024",
        fits=False,
    ),
    Case(
        "huggingface/diffusers#9156: LoRA of Flux.1, encoders beside it",
        "A100 40 GB",
        40,
        f"{FLUX} --image_size 512 --lora_rank 4 --precision bf16 --encoder_dtype bf16",
        fits=False,
    ),
)


def estimate_gib(case: Case) -> float:
    """Estimate the peak of a rank."""
    size_gib = CARDS[case.size]
    machine = dataclasses.replace(
        inspect_machine(),
        device_type=GPU,
        device_name=case.gpu,
        num_devices=case.num_gpus,
        device_memory_gib=size_gib,
        free_memory_gib=size_gib,
    )
    ranks = Ranks(0, case.num_gpus, 0, case.num_gpus)
    request = parse_request(case.flags.split(), description="", epilog="")
    return find_need(plan_step(request, machine=machine, ranks=ranks)).total_gib


def make_row(case: Case) -> dict[str, object]:
    """Make the row of a case: a hit is what fits and is said to, or neither."""
    found_gib, size_gib = estimate_gib(case), CARDS[case.size]
    return {
        "source": case.source,
        "GPU": case.gpu,
        "flags": case.flags,
        "GPUs": case.num_gpus,
        "GPU has, GiB": size_gib,
        "estimate, GiB": round(found_gib, 1),
        "published": "fits" if case.fits else "does not fit",
        "hit": (found_gib <= size_gib) == case.fits,
        "published peak, GiB": case.peak_gib,
    }


# What a row of measured peaks tells apart.
TOLD = ("model_name", "image_size", "latents", "precision", "master_weights", "use_ema")
TOLD += ("lora_rank", "frozen_bits", "activation_checkpointing", "batch_size", MICROBATCH)
TOLD += ("optimizer", "update_in_backward", "cpu_allocator", "attention", "encoder_dtype")
TOLD += ("sharding", "engine")


def group_records(paths: Iterable[Path]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Group the records of trainings on CPUs by what decides their memory.

    Records of an older commit are left out where there are newer ones: the program may have
    changed. So are runs that train a text encoder: `BenchmarkConfig` cannot say that they do.
    """
    groups = defaultdict(list)
    for record in map(load_record, paths):
        config, summary = record["config"], record.get("summary") or {}
        is_training = record.get("memory_estimate_gib") and summary.get("peak_memory_gib")
        # Some records do not know their speed-ups.
        is_whole = is_training and None not in map(config.get, PRESETS["seed"])
        is_one = is_whole and not config["train_text_encoder"]
        if is_one and record["machine"]["device_type"] == "cpu":
            key = (*(config[name] for name in TOLD), record["ranks"]["world_size"])
            groups[key].append(record)
    return {key: _newest(records) for key, records in groups.items()}


def _newest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    newest = max(records, key=lambda record: record["started_utc"])
    return [one for one in records if one["git"]["commit"] == newest["git"]["commit"]]


def compare_measured(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield a row for each configuration: the estimate of today's code, and the median peak."""
    for key, records in group_records(paths).items():
        first = records[0]
        values = {name: first["config"][name] for name in SETTINGS}
        config = BenchmarkConfig(**{name: it for name, it in values.items() if it is not None})
        world_size = first["ranks"]["world_size"]
        ranks = Ranks(0, world_size, 0, world_size // first["ranks"]["num_nodes"])
        step = Step.of(config, resolve_architecture(config.model_name), on_cuda=False)
        estimate = estimate_peak_memory(
            step, config, ranks, micro_batch=getattr(config, MICROBATCH)
        )
        peak_gib = statistics.median(one["summary"]["peak_memory_gib"] for one in records)
        names = [name.replace("device_train_", "") for name in (*TOLD, "ranks")]
        yield {
            **{name: "none" if it is None else it for name, it in zip(names, key, strict=True)},
            "runs": len(records),
            "peak, GiB": peak_gib,
            "estimate, GiB": round(estimate.total_gib, 2),
            "peak / estimate": round(peak_gib / estimate.total_gib, 3),
        }


if __name__ == "__main__":
    rows = sorted(compare_measured(map(Path, sys.argv[1:])), key=lambda row: row["peak / estimate"])
    near = sum(abs(row["peak / estimate"] - 1) <= 0.05 for row in rows)
    print(f"{near} of {len(rows)} configurations within 5 %\n")
    print(to_markdown(make_table(rows)))
    print()
    print(to_markdown(make_table(map(make_row, CASES))))
