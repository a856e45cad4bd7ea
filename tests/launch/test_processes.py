"""Real launchers, real processes, real signals: how a run starts on several ranks, and how it ends.

Each test starts `composer` or `torchrun` as a user would, on the tiny model.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sdbench.cli import main
from sdbench.measure.phases import PHASES
from sdbench.record.store import load_record

BIN = Path(sys.executable).parent
TINY = ("--model_name", "tiny", "--use_synth_data", "--num_workers", "0")
# The engine that is ready in a third of the time, where Composer is not what is tested.
LEAN = ("--engine", "torch")
SHORT = ("--warmup_batches", "1", "--measure_batches", "2", "--profile_batches", "0")
# A run of many minutes, to be stopped in the middle.
LONG = ("--warmup_batches", "1", "--measure_batches", "100000")
TIMEOUT_S = 120
# "Within a minute" is the promise for a rank that dies.
END_WITHIN_S = 60

COMPOSER_2 = (str(BIN / "composer"), "-n", "2")
TORCHRUN_2 = (str(BIN / "torchrun"), "--nproc_per_node", "2")


def run(launcher, *argv, results, timeout_s=TIMEOUT_S):
    return subprocess.run(
        [*launcher, *argv, "--results_dir", str(results)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def only_record(results):
    (path,) = results.glob("*/record.json")
    return load_record(path)


def estimate_gib(record):
    return record["memory_estimate_gib"]["total_gib"]


def test_two_ranks_of_torchrun_train_as_one_run(tmp_path):
    completed = run(TORCHRUN_2, "benchmark.py", *LEAN, *TINY, *SHORT, results=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("Model has") == 1
    check_one_run(only_record(tmp_path), num_steps=3)


def test_two_ranks_of_composer_train_as_one_run(spied):
    check_one_run(only_record(spied / "runs"), num_steps=4)


def check_one_run(record, *, num_steps):
    ranks = {"world_size": 2, "num_nodes": 1, "ranks_per_node": 2, "restarts": 0}
    assert record["ranks"] == ranks
    # No GPU: one micro-batch of 2 images per rank and step.
    assert record["config"]["batch_size"] == 4
    assert record["workload"]["num_images"] == num_steps * 4
    summary = record["summary"]
    assert summary["images_per_second"] == pytest.approx(2 * 4 / summary["window_s"])
    assert summary["images_per_second_per_device"] == summary["images_per_second"] / 2
    assert summary["peak_memory_gib"] == pytest.approx(estimate_gib(record), rel=0.15)


@pytest.mark.slow  # tests/launch/test_sources.py has one that always runs
def test_two_ranks_train_on_real_images(tmp_path, picture_folder):
    data_set = tmp_path / "mds"
    assert main(["convert", str(picture_folder), str(data_set)]) == 0
    argv = ("--model_name", "tiny", "--remote", str(data_set), "--num_workers", "1")
    # 10 pictures are two global batches of 4 an epoch, so that 3 steps go into a second epoch.
    completed = run(COMPOSER_2, "benchmark.py", *argv, *SHORT, results=tmp_path / "runs")
    assert completed.returncode == 0, completed.stderr
    record = only_record(tmp_path / "runs")
    assert record["config"]["data_format"] == "mds"
    assert record["workload"]["num_images"] == 3 * 4


@pytest.mark.slow  # test_readme.py starts the launcher, too
def test_one_rank_through_the_composer_launcher_as_in_the_readme(tmp_path):
    launcher = (str(BIN / "composer"),)
    argv = ("--use_ema", "--use_synth_data", "--device_train_microbatch_size", "4")
    completed = run(
        launcher, "benchmark.py", *argv, "--model_name", "tiny", *SHORT, results=tmp_path
    )
    assert completed.returncode == 0, completed.stderr
    record = only_record(tmp_path)
    assert record["config"]["device_train_microbatch_size"] == 4
    assert record["summary"]["peak_memory_gib"] == pytest.approx(estimate_gib(record), rel=0.15)


@pytest.fixture(scope="module")
def spied(tmp_path_factory):
    """A run on two ranks with a spy on each; its last step of four is profiled."""
    folder = tmp_path_factory.mktemp("spied")
    completed = run(
        COMPOSER_2,
        str(Path(__file__).with_name("spy_on_ranks.py")),
        str(folder),
        *(*TINY, "--warmup_batches", "1", "--measure_batches", "2", "--profile_batches", "1"),
        results=folder / "runs",
    )
    assert completed.returncode == 0, completed.stderr
    return folder


def test_communication_that_nothing_hides_is_told_apart_from_the_backward_pass(spied):
    # The spy's clock moves where it sends the last gradients, when all of them are computed, and
    # 0.125 and 0.375 s in the forward passes of its two ranks.
    summary = only_record(spied / "runs")["summary"]
    seconds = summary["breakdown"]["seconds"]
    assert seconds == {**dict.fromkeys(PHASES, 0), "other": 0.25, "gradient_communication": 0.25}


def test_a_rank_that_is_slower_than_the_other_is_named(spied):
    summary = only_record(spied / "runs")["summary"]
    assert summary["stragglers"] == [
        {"rank": 1, "node": 0, "own_step_time_s": 0.375, "times_median": 3.0}
    ]
    assert "straggler" in summary["flags"]


def test_two_ranks_draw_different_noise_and_see_different_samples(spied):
    first, second = ((spied / f"rank{rank}.txt").read_text().splitlines() for rank in range(2))
    assert len(first) == len(second) == 4
    for one, other in zip(first, second, strict=True):
        noise, sample, weights = one.split()
        other_noise, other_sample, other_weights = other.split()
        assert noise != other_noise
        assert sample != other_sample
        assert weights == other_weights  # gradients are averaged: both ranks keep one model


def test_an_uneven_global_batch_is_the_same_error_on_every_rank(tmp_path):
    completed = run(COMPOSER_2, "benchmark.py", *TINY, "--batch_size", "7", results=tmp_path)
    assert completed.returncode == 2
    assert completed.stderr.count("does not divide over 2 ranks: got 7") == 1
    assert not list(tmp_path.glob("*/record.json"))


@pytest.mark.slow
def test_torchrun_fails_on_bad_input_too(tmp_path):
    completed = run(TORCHRUN_2, "benchmark.py", *TINY, "--batch_size", "7", results=tmp_path)
    assert completed.returncode == 1  # torchrun turns every failure into 1
    assert completed.stderr.count("does not divide over 2 ranks: got 7") == 1


def start_long_run(launcher, results):
    """A run that is some steps into training, in a process group of its own."""
    engine = () if launcher is COMPOSER_2 else LEAN
    log = (results / "log.txt").open("w")
    process = subprocess.Popen(
        [*launcher, "benchmark.py", *engine, *TINY, *LONG, "--results_dir", str(results)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + TIMEOUT_S
    while "step 1/" not in (results / "log.txt").read_text():
        assert process.poll() is None, (results / "log.txt").read_text()
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    return process


def find_rank(process, rank):
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank) and "benchmark.py" in " ".join(child.cmdline()):
            return child
    raise AssertionError(f"no rank {rank}")


# Each launcher and each rank once; the other two pairs tell nothing new and take ten seconds each.
@pytest.mark.parametrize(
    ("launcher", "rank"),
    [
        pytest.param(COMPOSER_2, 0, id="composer-0"),
        pytest.param(TORCHRUN_2, 1, id="torchrun-1"),
        pytest.param(COMPOSER_2, 1, id="composer-1", marks=pytest.mark.slow),
        pytest.param(TORCHRUN_2, 0, id="torchrun-0", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_ends_the_run_and_the_record_says_why(tmp_path, launcher, rank):
    process = start_long_run(launcher, tmp_path)
    find_rank(process, rank).kill()
    assert process.wait(timeout=END_WITHIN_S) != 0
    record = only_record(tmp_path)
    assert record["status"] == "failed"
    assert f"rank {rank} on node 0 has been silent" in record["reason"]
    # As of its last beat, half a second before.
    assert re.search(r"last heard of after \d+ steps", record["reason"])
    assert record["summary"] is None


def test_a_lone_process_that_is_killed_leaves_a_record_that_says_so(tmp_path):
    process = start_long_run((sys.executable,), tmp_path)
    process.kill()
    process.wait(timeout=END_WITHIN_S)
    record = only_record(tmp_path)
    assert record["status"] == "failed"
    assert "killed before it could say why" in record["reason"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ema", ["--use_ema", "--no_use_ema"])
@pytest.mark.parametrize("microbatch", ["2", "8"])
@pytest.mark.parametrize("preset", ["seed", "fast"])
def test_the_memory_estimate_of_the_full_model_is_near_its_peak(tmp_path, preset, microbatch, ema):
    if (preset, microbatch, ema) == ("seed", "8", "--use_ema"):
        pytest.skip("24 GiB must refuse this one")
    argv = ("--use_synth_data", "--preset", preset, "--device_train_microbatch_size", microbatch)
    completed = run(
        (sys.executable, "benchmark.py"),
        *(*argv, ema, "--warmup_batches", "1", "--measure_batches", "1"),
        results=tmp_path,
        timeout_s=800,
    )
    assert completed.returncode == 0, completed.stderr
    record = only_record(tmp_path)
    assert record["summary"]["peak_memory_gib"] == pytest.approx(estimate_gib(record), rel=0.15)


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        pytest.param((sys.executable,), (130,), id="python"),
        pytest.param(COMPOSER_2, tuple(range(1, 256)), id="composer", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_the_run_and_the_record_says_so(tmp_path, launcher, expected):
    process = start_long_run(launcher, tmp_path)
    # A terminal sends the signal to the whole group.
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=END_WITHIN_S) in expected
    record = only_record(tmp_path)
    assert record["status"] == "interrupted"
    assert "Ctrl-C" in record["reason"]


def test_sigterm_ends_the_run_and_the_record_says_so(tmp_path):
    process = start_long_run((sys.executable,), tmp_path)
    process.terminate()
    assert process.wait(timeout=END_WITHIN_S) == 1
    record = only_record(tmp_path)
    assert record["status"] == "interrupted"
    assert "SIGTERM" in record["reason"]
