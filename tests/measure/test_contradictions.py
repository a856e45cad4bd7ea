"""A figure of a record that was changed by hand contradicts the figures that it comes from."""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

from sdbench.cli import main
from sdbench.record.store import load_record
from tests.report.results_folder import RESULTS

RUNS = {
    "benchmark": "runs/*_1x-nvidia-h200_sd2-base-512px-fast",
    "feed": "runs/*_feed-mds-512px",
    "precompute": "runs/*_precompute-mds-512px",
    "train": "runs/*_small-128px-fast-dreambooth",
}
# Numbers that nothing else in a record decides: counts, times and readings as they were measured.
MEASURED = {
    "benchmark": """
        summary.startup.compile_s summary.gpu.power_w summary.gpu.temperature_c
        summary.gpu.sm_clock_mhz summary.gpu.power_limit_w summary.gpu.energy_j
        summary.gpu.max_sm_clock_mhz workload.drawing workload.num_parameters
        workload.num_bad_samples workload.num_dropped_samples workload.num_failed_blocks
        ranks.restarts""",
    "feed": """
        summary.megabytes_per_second summary.ms_per_image.read summary.ms_per_image.decode
        summary.ms_per_image.transform summary.ms_per_image.tokenize summary.ms_per_image.collate
        summary.num_bad_samples summary.num_dropped_samples""",
    "precompute": """
        summary.megabytes_per_second summary.ms_per_image.read summary.ms_per_image.decode
        summary.ms_per_image.transform summary.ms_per_image.tokenize summary.ms_per_image.collate
        summary.num_dropped_samples""",
    "train": """
        summary.num_saved summary.loss_last summary.num_restarts workload.num_parameters
        workload.flops_per_image workload.num_bad_samples workload.num_dropped_samples
        workload.num_failed_blocks workload.drawing ranks.restarts""",
}
# Numbers that are bounded alone: only a large change is found.
BOUNDED = {
    "benchmark": "summary.peak_memory_gib",
    "feed": "summary.images_per_second_interval.num_samples",
    "precompute": """
        summary.images_per_second_interval.num_samples summary.num_measured_steps
        summary.peak_memory_gib""",
    "train": "summary.other_s.save summary.peak_memory_gib workload.num_trainable_parameters",
}
# Its level is the only one that the schema allows, and what kernels ran is no figure.
APART = ("level", "attention_kernels")


def published(kind: str) -> Path:
    return min(RESULTS.glob(RUNS[kind]))


def numbers_of(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all numbers in a part of a record."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_of(inner, (*place, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place


def change(record: dict[str, Any], place: tuple[Any, ...], factor: float) -> dict[str, Any]:
    """A copy with a larger number at a place."""
    record = copy.deepcopy(record)
    *parents, key = place
    inner = functools.reduce(lambda part, name: part[name], parents, record)
    inner[key] = (type(inner[key]))(inner[key] * factor) or 1
    if inner[key] == functools.reduce(lambda part, name: part[name], place, record):
        inner[key] += type(inner[key])(1)
    return record


@pytest.mark.parametrize("kind", RUNS)
def test_each_figure_that_others_decide_is_found_if_it_is_changed(tmp_path, kind):
    run = shutil.copytree(published(kind), tmp_path / published(kind).name)
    record = json.loads((run / "record.json").read_text())
    places = [
        place
        for field in ("summary", "workload", "memory_estimate_gib", "ranks")
        for place in numbers_of(record.get(field), (field,))
        if not set(place) & set(APART)
    ]

    def missed(factor: float) -> set[str]:
        names = set()
        for place in places:
            (run / "record.json").write_text(json.dumps(change(record, place, factor)))
            try:
                load_record(run)
            except ValueError:
                continue
            names.add(".".join(map(str, place)))
        return names

    measured = set(MEASURED[kind].split())
    assert missed(1e6) == measured
    assert missed(1.02) == measured | set(BOUNDED[kind].split())


def run_with(tmp_path: Path, kind: str, **summary: Any) -> Path:
    """A copy of a published run of a kind with other values in its summary."""
    run = shutil.copytree(published(kind), tmp_path / published(kind).name)
    record = json.loads((run / "record.json").read_text())
    record["summary"] |= summary
    (run / "record.json").write_text(json.dumps(record))
    return run


@pytest.mark.parametrize(
    ("kind", "summary", "told"),
    [
        ("benchmark", {"images_per_second": 1e5}, "images_per_second is 100000, more than"),
        ("benchmark", {"mfu_percent": 90.0}, "mfu_percent is 90, but"),
        ("benchmark", {"flags": ["noisy"]}, "flags is ['noisy'], but the other figures give []"),
        ("benchmark", {"peak_memory_gib": 200.0}, "more than the memory of the device, 139.8"),
        ("feed", {"window_s": 1e4}, "window_s is 10000, more than duration_s"),
        ("precompute", {"num_images_written": 1}, "num_images is 492, more than"),
        ("train", {"lost_s": 1.0}, "lost_s is 1, but 0 restarts give 0"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_or_left_out(
    tmp_path, capsys, kind, summary, told
):
    run = run_with(tmp_path, kind, **summary)
    assert main(["benchmark", "--config", str(run)]) == 2
    assert told in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("end", ["low", "high"])
def test_an_interval_on_the_other_side_of_the_rate_of_its_steps_is_found(tmp_path, end):
    """By 2 %, where clocks of a GPU's window and of its steps may differ by more."""
    summary = json.loads((published("benchmark") / "record.json").read_text())["summary"]
    factor = {"low": 1.02, "high": 0.98}[end]
    interval = {
        **summary["images_per_second_interval"],
        end: factor * summary["images_per_second"],
    }
    with pytest.raises(ValueError, match="the rate of its steps"):
        load_record(run_with(tmp_path, "benchmark", images_per_second_interval=interval))


def test_steps_that_are_not_those_of_the_record_are_found(tmp_path):
    run = run_with(tmp_path, "benchmark")
    rows = pandas.read_csv(run / "steps.csv")
    is_measured = rows["phase"] == "measured"
    for changed, told in (
        (rows.assign(step_time_s=rows["step_time_s"] / 2), "images_per_second is"),
        (rows[~is_measured], "num_steps is"),
        (rows.assign(phase=rows["phase"].where(~is_measured, "warmup")), "num_measured_steps is"),
        (
            rows.assign(step_time_s=rows["step_time_s"] * 1.0001),
            "step_time_p50_s is",
        ),
        (rows.assign(data_wait_s=rows["data_wait_s"] + 0.1), "data_wait_percent is"),
    ):
        changed.to_csv(run / "steps.csv", index=False)
        with pytest.raises(ValueError, match=re.escape(told)) as caught:
            load_record(run)
        assert "the steps of steps.csv give" in str(caught.value)


SHAPES = [
    {"shape": "256x512", "share": 0.25, "num_steps": 4, "step_time_s": 0.5},
    {"shape": "512x512", "share": 0.75, "num_steps": 6, "step_time_s": 1.5},
]


@pytest.mark.parametrize(
    ("name", "factor", "told"),
    [
        (None, 1.0, None),
        ("megapixels_per_second", 1.01, "megapixels_per_second is"),
        ("images_per_second_of_epoch", 1.01, "achieved_tflops_per_device is"),
        ("achieved_tflops_per_device", 1.01, "achieved_tflops_per_device is"),
        ("num_steps", 2, "num_measured_steps is 10, but the steps of its shapes give 14"),
        ("share", 2, "images_per_second_of_epoch is"),
        ("flags", 1, "flags is ['shapes'], but the other figures give []"),
    ],
)
def test_rates_of_shapes_follow_from_the_shapes(tmp_path, name, factor, told):
    run = run_with(tmp_path, "benchmark")
    (run / "steps.csv").unlink()
    record = json.loads((run / "record.json").read_text())
    rate, flops = record["summary"]["images_per_second"], record["workload"]["flops_per_image"]
    # 128 images a step, in 4 x 0.5 + 6 x 1.5 = 11 s, and 0.25 x 0.5 + 0.75 x 1.5 s by the shares.
    pixels = 128 * (4 * 256 * 512 + 6 * 512 * 512)
    summary = record["summary"] | {
        "shapes": copy.deepcopy(SHAPES),
        "megapixels_per_second": pixels / 1e6 / 11,
        "images_per_second_of_epoch": 128 / 1.25,
    }
    achieved = 128 / 1.25 * flops / 1e12
    summary["achieved_tflops_per_device"] = achieved
    summary["mfu_percent"] = 100 * achieved / 989
    summary["mfu_of_matmul_percent"] = 100 * achieved / summary["matmul_tflops"]
    assert summary["images_per_second"] == rate
    if name == "flags":
        summary["flags"] = ["shapes"]
    elif name in SHAPES[0]:
        summary["shapes"][0][name] *= factor
    elif name is not None:
        summary[name] *= factor
    (run / "record.json").write_text(json.dumps(record | {"summary": summary}))
    if told is None:
        load_record(run)
    else:
        with pytest.raises(ValueError, match=re.escape(told)):
            load_record(run)


def test_each_stage_of_ray_has_the_workers_of_its_settings_and_rates(tmp_path):
    run = run_with(tmp_path, "feed")
    record = json.loads((run / "record.json").read_text())
    config, summary = record["config"], record["summary"]
    config |= {"num_decoders": 2, "num_encoders": 3, "engine": "ray"}
    summary |= {"num_processes": 2, "images_per_second_per_core": None}
    summary["images_per_second_per_process"] = summary["images_per_second"] / 2
    stages = {"num_trainers": 1, "target_images_per_second": 100.0, "num_failed_blocks": 0}
    for worker, number, rate in (("decoder", 2, 30.0), ("encoder", 3, 7.0)):
        stages |= {f"num_{worker}s": number, f"images_per_second_per_{worker}": rate}
        stages |= {f"images_per_second_per_{worker}_interval": None}
    stages |= {"num_decoders_for_target": 4, "num_encoders_for_target": 15}
    summary["ray"] = stages
    (run / "record.json").write_text(json.dumps(record))
    load_record(run)
    for name in ("num_encoders", "num_decoders_for_target"):
        changed = record | {"summary": summary | {"ray": stages | {name: stages[name] + 1}}}
        (run / "record.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"ray.{name} is"):
            load_record(run)
