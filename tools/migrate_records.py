"""Brings the committed records from schema version 1 to 2: run once by hand, then of no use.

    python -m tools.migrate_records results
    python -m tools.migrate_records --check BEFORE AFTER

A setting that a record lacks gets the value that runs had before it existed, where that is known,
and null where it is not. Every other key that is written today is added as null. No value changes:
each one is compared as text before a record is written, and `--check` compares two folders. Either
exits with 1 and names the first path that differs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sdbench.settings.config import BenchmarkConfig
from sdbench.settings.feed import FeedSettings
from sdbench.settings.recipe import TrainConfig
from sdbench.tasks.encode.precompute import PrecomputeSettings
from sdbench.tasks.profile import ProfileSettings

SETTINGS = {
    "benchmark": BenchmarkConfig,
    "feed": FeedSettings,
    "precompute": PrecomputeSettings,
    "profile": ProfileSettings,
    "train": TrainConfig,
}
# What a run did before it had a choice, by setting. Of others that is unknown, or null says it.
VALUES_BEFORE = {
    "compile_unit": "model",
    "convolution": "torch",
    "empty_captions": "bad",
    "encode_ahead": False,
    "encoder_accelerator_type": "any",
    "frozen_bits": "same",
    "gather_ahead": False,
    "keep_layout": False,
    "linear_dtype": "same",
    "lora_layers": "to_q,to_k,to_v,to_out.0",
    "lora_text_encoder_layers": "q_proj,k_proj,v_proj,out_proj",
    "max_aspect_ratio": 2.0,
    "max_failed_blocks": 0,
    "missing_latents": "error",
    "num_decoders": 1,
    "num_encoders": 1,
    "online_encoder_batch_size": 32,
    "online_preprocessing": False,
    "prior_loss_weight": 1.0,
    "random_weights": False,
    "read_avif": False,
    "refresh": False,
    "remote_files": "copy",
    "small_pictures": "enlarge",
    "task": "pretrain",
    "train_text_encoder": False,
    "update_in_backward": False,
    "vae_attention": "same",
    "validation_times": "middles",
}
# Keys by the path of their object, and the kinds of records that have them.
TRAINED = ("benchmark", "profile", "train")
KEYS = (
    ("", SETTINGS, ("other_versions",)),
    ("", (*TRAINED, "feed"), ("data",)),
    ("machine", SETTINGS, ("cudnn_version",)),
    ("ranks", (*TRAINED, "precompute"), ("restarts", "launcher", "network")),
    (
        "workload",
        TRAINED,
        (
            *("drawing", "buckets", "num_parameters", "num_trainable_parameters"),
            *("flops_per_image", "num_images", "num_bad_samples", "num_dropped_samples"),
            "num_failed_blocks",
        ),
    ),
    (
        "summary",
        ("benchmark",),
        (
            *("num_warmup_steps", "step_time_cv_percent", "num_outliers", "stability", "flags"),
            *("breakdown", "stragglers", "attention_kernels", "bottleneck", "startup", "gpu"),
            *("matmul_tflops", "mfu_of_matmul_percent"),
        ),
    ),
    ("summary.breakdown.seconds", ("benchmark",), ("rank_wait",)),
    ("", ("profile",), ("schema_version", "status", "reason", "summary")),
)
# Version 1 had no key for the first way in which a seed drew weights.
DRAWING = "workload.drawing"
# The U-Net was all that was trained then.
RENAMED = {
    "memory_estimate_gib.unet_weights": "memory_estimate_gib.trained_weights",
    "memory_estimate_gib.encoder_weights": "memory_estimate_gib.frozen_weights",
}
# Settings that are gone, with the one value that they had: what every run does today.
GONE = {
    ("train", "config.text_encoder_lr_factor"): "1.0",
    ("train", "origin.text_encoder_lr_factor"): '"default"',
}


class NumberText(str):
    """A number as it is written in a file."""


def main(argv: list[str]) -> int:
    """Rewrite the records of a folder, or compare those of two; returns the exit code."""
    if argv[:1] == ["--check"]:
        before, after = map(Path, argv[1:])
        files = [file.relative_to(before) for file in find_records(before)]
        faults = [] if files else [f"{before} has no records"]
        faults += [
            f"{it}: it is new"
            for it in find_records(after)
            if not (before / it.relative_to(after)).exists()
        ]
        for file in files:
            text = (after / file).read_text() if (after / file).exists() else "{}"
            faults += [f"{file}: {it}" for it in find_changes((before / file).read_text(), text)]
        print(*faults, f"{len(files)} records, {len(faults)} faults", sep="\n")
        return int(bool(faults))
    for file in find_records(Path(argv[0])):
        text = file.read_text()
        record = json.loads(text)
        migrate(record)
        new = json.dumps(record, indent=2) + "\n"
        for fault in find_changes(text, new):
            print(f"{file}: {fault}")
            return 1
        file.write_text(new)
    return 0


def find_records(folder: Path) -> list[Path]:
    """The records of all kinds below a folder."""
    return sorted([*folder.rglob("record.json"), *folder.rglob("profile.json")])


def migrate(record: dict[str, Any]) -> None:
    """Bring a record to schema version 2, in place."""
    kind = record.get("kind", "benchmark")
    for old, new in RENAMED.items():
        parent, _, name = old.rpartition(".")
        if name in (group := _find(record, parent) or {}):
            record[parent] = {
                new.rpartition(".")[2] if one == name else one: value
                for one, value in group.items()
            }
    for of_kind, path in GONE:
        parent, _, name = path.rpartition(".")
        if of_kind == kind:
            record[parent].pop(name, None)
    for parent, kinds, names in KEYS:
        group = _find(record, parent)
        for name in names if kind in kinds and group is not None else ():
            path = f"{parent}.{name}"
            group.setdefault(name, 1 if path == DRAWING else None)
    for field in dataclasses.fields(SETTINGS[kind]):
        record["config"].setdefault(field.name, VALUES_BEFORE.get(field.name))
    record["schema_version"] = 2


def _find(record: dict[str, Any], path: str) -> dict[str, Any] | None:
    found: Any = record
    for name in filter(None, path.split(".")):
        found = None if found is None else found.get(name)
    return found


def find_changes(before: str, after: str) -> Iterator[str]:
    """Yield what differs between the texts of a record before and after, beyond `migrate`."""
    kind = json.loads(before).get("kind", "benchmark")
    old, new = (
        dict(_leaves(json.loads(text, parse_float=NumberText, parse_int=NumberText)))
        for text in (before, after)
    )
    old.pop("schema_version", None)
    if (version := new.pop("schema_version", None)) != "2":
        yield f"schema_version: {version}"
    for path, value in old.items():
        if (kind, path) in GONE:
            if value != GONE[kind, path] or path in new:
                yield f"{path}: {value} cannot be left out"
            continue
        found = new.pop(RENAMED.get(path, path), "nothing")
        if found != value:
            yield f"{path}: {value} -> {found}"
    for path, value in new.items():
        expected = (
            VALUES_BEFORE.get(path.removeprefix("config.")) if path.startswith("config.") else None
        )
        if value != json.dumps(1 if path == DRAWING else expected):
            yield f"{path}: nothing -> {value}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The path and the text of each value that is no object or list with content."""
    if isinstance(value, (dict, list)) and value:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inner in items:
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value if isinstance(value, NumberText) else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
