"""Where the time of a step goes, proven: a sleep planted in a phase shows in that phase alone."""

from __future__ import annotations

import json
import sys
import time

import composer.devices
import jsonschema
import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel

import benchmark
from sdbench.engines.ema import ForeachEma
from sdbench.measure.bottleneck import name_bottleneck
from sdbench.measure.phases import PHASES
from sdbench.measure.record import SCHEMA_FILE, load_record
from sdbench.sources.loader import CheckedLoader

# A different sleep in each phase, further apart than a busy machine varies, so that a mix-up shows.
# Communication has its test on two ranks in tests/launch/test_processes.py.
SLEEPS_S = {
    "data_wait": 0.2,
    "host_to_device": 0.4,
    "vae_encode": 0.6,
    "text_encode": 0.8,
    "unet_forward": 1.0,
    "backward": 1.2,
    "optimizer": 1.4,
    "ema": 1.6,
    "other": 1.8,
}
PLACES = {
    "host_to_device": (composer.devices.DeviceCPU, "batch_to_device"),
    "vae_encode": (AutoencoderKL, "encode"),
    "text_encode": (CLIPTextModel, "forward"),
    "unet_forward": (UNet2DConditionModel, "forward"),
    "backward": (torch.Tensor, "backward"),
    # Behind the closure with forward and backward pass that Composer makes of a step.
    "optimizer": (sys.modules["torch.optim.adam"], "adam"),
    "ema": (ForeachEma, "update"),
    "other": (torch.optim.lr_scheduler.LambdaLR, "step"),
}


def run(tmp_path, *argv):
    options = ("--model_name", "tiny", "--use_synth_data", "--num_workers", "0", "--use_ema")
    steps = ("--warmup_batches", "0", "--measure_batches", "1", "--profile_batches", "1")
    assert benchmark.main([*options, *steps, *argv, "--results_dir", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/record.json")
    record = load_record(path)
    jsonschema.validate(record, json.loads(SCHEMA_FILE.read_text()))
    return record["summary"]


def plant(monkeypatch, owner, name, seconds):
    original = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)


def plant_in_the_loader(monkeypatch, seconds):
    original = CheckedLoader.__iter__

    def slow(self):
        for batch in original(self):
            time.sleep(seconds)
            yield batch

    monkeypatch.setattr(CheckedLoader, "__iter__", slow)


def test_a_sleep_planted_in_each_phase_shows_in_that_phase(tmp_path, monkeypatch):
    before = run(tmp_path / "before")["breakdown"]
    assert set(before["seconds"]) == set(PHASES) and before["num_steps"] == 1
    assert sum(before["seconds"].values()) == pytest.approx(before["step_time_s"], rel=1e-9)
    assert all(before["seconds"][phase] > 0 for phase in SLEEPS_S)
    assert before["seconds"]["gradient_communication"] == 0  # one rank has nobody to tell

    for phase, (owner, name) in PLACES.items():
        plant(monkeypatch, owner, name, SLEEPS_S[phase])
    plant_in_the_loader(monkeypatch, SLEEPS_S["data_wait"])
    summary = run(tmp_path / "planted")
    seconds = summary["breakdown"]["seconds"]
    added_s = {phase: seconds[phase] - before["seconds"][phase] for phase in SLEEPS_S}
    assert added_s == pytest.approx(SLEEPS_S, abs=0.18)

    # 1.8 s of 9 s lie in no phase, and they are the largest part.
    assert "other_time" in summary["flags"]
    assert "of the step is in none of the phases: --profile_trace" in summary["bottleneck"]


def test_the_profile_leaves_the_measured_steps_alone(tmp_path, monkeypatch):
    import csv

    from sdbench.measure.phases import PhaseClock

    plant(monkeypatch, PhaseClock, "start", 1.5)
    plant(monkeypatch, PhaseClock, "stop", 1.5)
    window = ("--warmup_batches", "1", "--measure_batches", "3", "--profile_batches", "2")
    summary = run(tmp_path, *window)
    assert summary["window_s"] < 1.5
    with next(tmp_path.glob("*/steps.csv")).open() as file:
        phases = [row["phase"] for row in csv.DictReader(file)]
    assert phases == ["warmup", "measured", "measured", "measured", "profiled", "profiled"]


def test_without_profiled_steps_there_is_no_breakdown(tmp_path):
    summary = run(tmp_path, "--profile_batches", "0")
    assert (summary["breakdown"], summary["bottleneck"]) == (None, None)


def test_a_trace_is_written_on_request(tmp_path):
    import gzip

    run(tmp_path, "--profile_trace", "--profile_batches", "0")
    (file,) = tmp_path.glob("*/trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert "aten::convolution" in names and any("AdamW.step" in str(name) for name in names)


@pytest.mark.parametrize(
    ("phase", "config", "sentence"),
    [
        ("vae_encode", {"latents": "online"}, "62 % of the step is VAE encode: --latents precom"),
        ("ema", {"ema_impl": "composer"}, "62 % of the step is the moving average: --ema_impl fo"),
        ("ema", {"ema_impl": "foreach"}, "62 % of the step is the moving average: a larger --bat"),
        ("data_wait", {}, "62 % of the step is waiting for data: more --num_workers"),
        ("other", {"profile_trace": True}, "62 % of the step is in none of the phases: no flag"),
    ],
)
def test_the_largest_part_is_named_with_the_flag_that_addresses_it(phase, config, sentence):
    rest = {name: 0.38 / 9 for name in PHASES}
    breakdown = {"num_steps": 1, "step_time_s": 1.0, "seconds": {**rest, phase: 0.62}}
    assert name_bottleneck(breakdown, config).startswith(sentence)
