"""Where the time of a step goes, proven: a sleep planted in a phase shows in that phase alone."""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch._subclasses.fake_tensor import FakeTensor
from transformers import CLIPTextModel

import benchmark
from sdbench.data.batches.loader import CheckedLoader
from sdbench.engines.device_batches import Batches
from sdbench.engines.ema import ForeachEma
from sdbench.measure.bottleneck import name_bottleneck
from sdbench.measure.phases import PHASES, PhaseClock
from sdbench.plan import window
from tests.schemas import validate

# A different sleep in each phase, so that a mix-up shows. Communication has its test on two ranks,
# in tests/test_two_ranks.py.
SLEEPS_S = {
    "data_wait": 1,
    "host_to_device": 2,
    "vae_encode": 4,
    "text_encode": 8,
    "unet_forward": 16,
    "backward": 32,
    "optimizer": 64,
    "ema": 128,
    "other": 256,
}
# One rank has nobody to tell or to wait for.
OF_SEVERAL_RANKS = {"gradient_communication": 0, "rank_wait": 0}
PLACES = {
    "host_to_device": (Batches, "_copy"),
    "vae_encode": (AutoencoderKL, "encode"),
    "text_encode": (CLIPTextModel, "forward"),
    "unet_forward": (UNet2DConditionModel, "forward"),
    "backward": (torch.Tensor, "backward"),
    # Behind the closure with forward and backward pass that Composer makes of a step.
    "optimizer": (sys.modules["torch.optim.adam"], "adam"),
    "ema": (ForeachEma, "update"),
    "other": (torch.optim.lr_scheduler.LambdaLR, "step"),
}


pytestmark = pytest.mark.usefixtures("plain_replay")


def run(tmp_path, *argv):
    options = ("--model_name", "tiny", "--use_synth_data", "--num_workers", "0", "--use_ema")
    options += ("--no_measure_peak", "--batch_size", "1")
    steps = ("--warmup_batches", "0", "--measure_batches", "1", "--profile_batches", "1")
    assert benchmark.main([*options, *steps, *argv, "--results_dir", str(tmp_path)]) == 0
    # `load_record` would refuse a planted sleep: it makes the window longer than the run.
    (path,) = tmp_path.glob("*/record.json")
    record = json.loads(path.read_text())
    validate(record)
    return record["summary"]


def plant(monkeypatch, owner, name, sleep, seconds):
    original = getattr(owner, name)

    def slow(*args, **kwargs):
        sleep(seconds)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)


def plant_in_the_loader(monkeypatch, sleep, seconds):
    original = CheckedLoader.__iter__

    def slow(self):
        for batch in original(self):
            sleep(seconds)
            yield batch

    monkeypatch.setattr(CheckedLoader, "__iter__", slow)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["composer", "torch"])
def test_a_sleep_planted_in_each_phase_shows_in_that_phase(engine, tmp_path, monkeypatch, sleep):
    for phase, (owner, name) in PLACES.items():
        plant(monkeypatch, owner, name, sleep, SLEEPS_S[phase])
    plant_in_the_loader(monkeypatch, sleep, SLEEPS_S["data_wait"])
    summary = run(tmp_path, "--engine", engine)
    breakdown = summary["breakdown"]
    assert breakdown["seconds"] == {**SLEEPS_S, **OF_SEVERAL_RANKS}
    assert (breakdown["num_steps"], breakdown["step_time_s"]) == (1, sum(SLEEPS_S.values()))

    # Half of the time lies in no phase, which makes it the largest part, too.
    assert "other_time" in summary["flags"]
    assert "of the step is in none of the phases: --profile_trace" in summary["bottleneck"]


@pytest.mark.slow
def test_the_profile_leaves_the_measured_steps_alone(tmp_path, monkeypatch, sleep):
    plant(monkeypatch, PhaseClock, "start", sleep, 100)
    plant(monkeypatch, PhaseClock, "stop", sleep, 100)
    plant_in_the_loader(monkeypatch, sleep, 1)
    window = ("--warmup_batches", "1", "--measure_batches", "3", "--profile_batches", "2")
    summary = run(tmp_path, *window)
    assert summary["window_s"] == 3
    with next(tmp_path.glob("*/steps.csv")).open() as file:
        phases = [row["phase"] for row in csv.DictReader(file)]
    assert phases == ["warmup", *("measured",) * 3, "profiled", "profiled", "after"]


# (kernel, heads, width, queries, keys) and how often a step calls it: of the U-Net, ten blocks with
# two attentions each, on 8x8 latents among themselves and with the 77 tokens of a caption. The VAE
# has one attention, of the same size as the first.
TEXT = ("flash", 2, 16, 77, 77)
OF_UNET = {
    ("flash", 1, 16, 64, 64): 3,
    ("flash", 2, 16, 16, 16): 3,
    ("flash", 3, 16, 4, 4): 3,
    ("flash", 3, 16, 1, 1): 1,
    ("flash", 1, 16, 64, 77): 3,
    ("flash", 2, 16, 16, 77): 3,
    ("flash", 3, 16, 4, 77): 3,
    ("flash", 3, 16, 1, 77): 1,
}


@pytest.mark.parametrize(
    ("flags", "of_encoders"),
    [
        ((), {("flash", 1, 16, 64, 64): 4, TEXT: 2}),
        (("--latents", "precomputed"), {}),
        pytest.param(("--vae_attention", "eager"), {TEXT: 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_record_tells_which_attention_kernels_ran(
    flags, of_encoders, tmp_path, capsys, monkeypatch
):
    under_profiler, forward = [], UNet2DConditionModel.forward

    def spied(self, sample, *args, **kwargs):
        # The memory estimate replays a step, and FLOPs are counted on the meta device.
        if not (isinstance(sample, FakeTensor) or sample.is_meta):
            under_profiler.append(torch.autograd._profiler_enabled())
        return forward(self, sample, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", spied)
    summary = run(tmp_path, "--engine", "torch", "--attention", "sdpa", *flags)
    # No step that is measured or broken down is slowed down by the profiler that sees attention.
    assert under_profiler == [False, False, True]
    rows = [tuple(row.values()) for row in summary["attention_kernels"]]
    assert {row[:-1]: row[-1] for row in rows} == OF_UNET | of_encoders
    assert re.search(r"^  attention kernels +flash for heads of 16$", capsys.readouterr().out, re.M)


@pytest.mark.slow
def test_a_trace_is_written_and_no_step_of_too_many_micro_batches_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(window, "MAX_MICROBATCHES", 2)
    sizes = ("--batch_size", "3", "--device_train_microbatch_size", "1")
    summary = run(tmp_path, *sizes, "--engine", "torch", "--profile_trace")
    assert summary["attention_kernels"] is None
    with next(tmp_path.glob("*/steps.csv")).open() as file:
        assert [row["phase"] for row in csv.DictReader(file)] == ["measured", "profiled", "after"]
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
        ("rank_wait", {}, "62 % of the step is waiting for other ranks: no flag of the suite"),
        ("other", {"profile_trace": True}, "62 % of the step is in none of the phases: no flag"),
        (
            "backward",
            {"preset": "fast", "device_train_microbatch_size": 4},
            "62 % of the step is the backward pass: a larger --device_train_microbatch_size",
        ),
        (
            "backward",
            {"preset": "fast", "device_train_microbatch_size": 8},
            "62 % of the step is the backward pass: a larger --batch_size",
        ),
    ],
)
def test_the_largest_part_is_named_with_the_flag_that_addresses_it(phase, config, sentence):
    rest = {name: 0.38 / (len(PHASES) - 1) for name in PHASES}
    breakdown = {"num_steps": 1, "step_time_s": 1.0, "seconds": {**rest, phase: 0.62}}
    told = name_bottleneck(breakdown, config, device_batch_size=8, stragglers=[])
    assert told.startswith(sentence)


def test_a_slow_rank_goes_before_the_largest_part():
    breakdown = {"num_steps": 1, "step_time_s": 4.0, "seconds": {"backward": 3.0, "rank_wait": 1.0}}
    rank = {"rank": 3, "node": 1, "own_step_time_s": 3.0, "times_median": 1.5}
    slow = [{**rank, "slow_phase": "data_wait"}]
    sentence = name_bottleneck(breakdown, {}, device_batch_size=8, stragglers=slow)
    assert sentence == (
        "25 % of the step is lost to rank 3 on node 1, which is slower than the others, most in "
        "data wait: `python -m sdbench doctor` looks at its machine"
    )
