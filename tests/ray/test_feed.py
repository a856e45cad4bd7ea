"""data.py --engine ray: Ray Data feeds trainers that sleep, and the record says how fast."""

from __future__ import annotations

import math

import pytest

import data as script
from sdbench.analysis.feed_table import format_feed
from sdbench.measuring.feed import Feed
from sdbench.measuring.ray_feed import StageTime, rate_of_one, read_stages
from sdbench.ranks.distributed import Ranks
from sdbench.record.store import load_record
from sdbench.settings.feed import FeedSettings
from sdbench.settings.request import parse
from sdbench.settings.rules import UNKNOWN, Unknown
from sdbench.training.training_task import RAY_DATA_NAME
from tests.data import datasets
from tests.machines import make_cpu_machine
from tests.refusals import PLACE_FLAGS, printed_refusal, refused
from tests.schemas import validate

TINY = ("--engine", "ray", "--model_name", "nano", "--image_size", "64")
NUM_STEPS, STEP_S = 20, 0.1


@pytest.mark.ray
def test_two_trainers_are_fed_by_as_many_actors_as_were_asked_for(tmp_path, capsys, on_cluster):
    datasets.write_parquet(tmp_path / "pictures")
    argv = (*TINY, "--remote", str(tmp_path / "pictures"), "--batch_size", "4")
    argv += ("--num_ray_workers", "2", "--num_decoders", "2", "--num_encoders", "1")
    argv += ("--num_batches", str(NUM_STEPS), "--emulate_step_seconds", str(STEP_S))
    code = script.main([*argv, "--results_dir", str(tmp_path / "runs")])
    output = "".join(capsys.readouterr())
    assert code == 0, output
    (path,) = (tmp_path / "runs").glob("*/record.json")
    record = load_record(path)
    validate(record)
    summary, stages = record["summary"], record["summary"]["ray"]
    assert summary["num_images"] == 4 * NUM_STEPS
    assert summary["num_measured_steps"] == NUM_STEPS
    assert (stages["num_trainers"], stages["num_decoders"], stages["num_encoders"]) == (2, 2, 1)
    assert stages["num_failed_blocks"] == 0
    # What is not sleep is waiting.
    assert summary["window_s"] >= NUM_STEPS * STEP_S
    assert summary["images_per_second"] == pytest.approx(4 * NUM_STEPS / summary["window_s"])
    waited = 1 - NUM_STEPS * STEP_S / summary["window_s"]
    assert summary["data_wait_percent"] == pytest.approx(100 * waited, abs=3)
    # Steps of 4 images in a tenth of a second take 40 a second.
    assert stages["target_images_per_second"] == pytest.approx(40)
    for worker in ("decoder", "encoder"):
        rate = stages[f"images_per_second_per_{worker}"]
        assert stages[f"num_{worker}s_for_target"] == math.ceil(40 / rate)
    assert summary["ms_per_image"]["decode"] > 0
    assert read_stages((path.parent / RAY_DATA_NAME).read_text()).keys() == {
        "DecodeStage",
        "EncodeStage",
    }
    assert format_feed(record) in output


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ("--num_workers 2", "--num_workers or --engine"),
        ("--latents precomputed", "--latents or --engine"),
        ("", "RANK (in the environment)"),
    ],
)
def test_what_ray_data_does_not_do_is_refused_in_a_rank(argv, flag, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    if argv:  # else it is a rank of another launcher
        monkeypatch.setenv("SDBENCH_RAY_RESTARTS", "0")
    assert script.main([*TINY, "--use_synth_data", *argv.split()]) == 2
    assert printed_refusal(capsys.readouterr().err).flag == flag


WARMUP_FLAGS = "--num_warmup_batches, --num_workers or --prefetch_factor"


@pytest.mark.parametrize(
    ("argv", "num_ranks", "flag", "value"),
    [
        ("--batch_size 3", 2, "--batch_size or --num_ray_workers", 3),
        ("--max_seconds 1", 2, "--max_seconds or --num_ray_workers", 1),
        (
            "--num_warmup_batches 0",
            2,
            "--num_warmup_batches, --num_workers or --prefetch_factor",
            0,
        ),
        ("--image_size 100", None, "--image_size", 100),
        ("--remote pictures", None, f"--use_synth_data, --data_format, {PLACE_FLAGS}", "pictures"),
    ],
)
def test_what_no_cluster_can_do_is_refused_ahead_and_by_ranks(
    argv, num_ranks, flag, value, monkeypatch
):
    monkeypatch.setenv("SDBENCH_RAY_RESTARTS", "0")
    words = [*TINY, "--use_synth_data", *argv.split()]
    request = parse(FeedSettings, words, description="", epilog="")
    with refused(flag, value=value):
        Feed(request, None).check_ahead(Unknown(world_size=num_ranks) if num_ranks else UNKNOWN)
    ranks = Ranks(0, num_ranks or 1, 0, num_ranks or 1)
    with refused(flag, value=value):
        Feed(request, None).resolve(make_cpu_machine(), ranks)


@pytest.mark.parametrize("flag", ["--num_decoders=2", "--num_ray_workers=2", "--model_name=nano"])
def test_without_ray_its_flags_are_refused(flag, capsys):
    assert script.main(["--use_synth_data", flag]) == 2
    assert printed_refusal(capsys.readouterr().err).value in (2, "nano")


def test_actors_that_take_turns_are_one_stage():
    text = "".join(
        f"Operator {number} ReadNumbers->MapBatches(DecodeStage{number}): 1 tasks executed\n"
        f"* Total output num rows: {num_rows} rows\n"
        f"\t* Estimated single task throughput: {rate} rows/s\n"
        for number, (num_rows, rate) in enumerate([(6, 2.0), (5, 2.5)])
    )
    assert read_stages(text) == {"DecodeStage": (11, 5.0)}


def test_a_rate_is_in_the_middle_of_its_interval_though_some_parts_have_few_rows():
    """The mean time per row of parts, 0.03 s, is 2.5 times that of a row, 0.012 s."""
    parts = [StageTime(1, 0.05), StageTime(19, 0.19)] * 6
    times = [StageTime(0, 0.0)]
    for part in parts:
        times.append(StageTime(times[-1].num_rows + part.num_rows, times[-1].busy_s + part.busy_s))
    rate, interval = rate_of_one(times, images_per_row=2)
    assert rate == pytest.approx(2 / 0.012)
    assert interval is not None and interval["high"] is not None
    assert 1 / interval["low"] + 1 / interval["high"] == pytest.approx(2 / rate)
