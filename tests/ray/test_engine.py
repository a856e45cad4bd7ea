"""--engine ray in ranks that Ray Train has started: losses and ends as with other engines."""

from __future__ import annotations

import csv
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import benchmark
import train
from sdbench.engines import load_engine
from sdbench.record.store import load_record
from sdbench.settings.setting import SAME_FP32
from tests.forked import exit_codes, forked_ranks, log_of

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
TINY = ("--model_name", "tiny", "--use_synth_data", "--batch_size", "8")
FP32 = ("--precision", "fp32", "--no_measure_peak", "--num_threads", "1")
STEPS = ("--warmup_batches", "1", "--measure_batches", "4", "--profile_batches", "0")


def run(program: str, *argv: str, expects: int = 0) -> str:
    """Run a program of the top level, and return what it printed."""
    command = [sys.executable, program, *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == expects, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses_of(results: Path) -> list[float]:
    """The losses of the one run in a folder."""
    (folder,) = (path.parent for path in results.glob("*/record.json"))
    with (folder / "steps.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def record_of(results: Path) -> dict:
    (file,) = results.glob("*/record.json")
    return load_record(file)


def losses_of_launched(engine: str, results: Path, *argv: str) -> list[float]:
    """The losses of two ranks that know of no Ray."""
    load_engine(engine)  # here, and not once in each rank
    arguments = [*TINY, *FP32, *STEPS, "--engine", engine, "--results_dir", str(results), *argv]
    program = functools.partial(benchmark.main, arguments)
    results.mkdir()
    with forked_ranks(program, results) as ranks:
        codes = exit_codes(ranks, timeout_s=240)
        assert codes == [0, 0], [log_of(results, rank).read_text() for rank in range(2)]
    return losses_of(results)


# Without sharding: tests/ray/test_faults.py.
def test_two_workers_have_the_losses_of_another_engine(tmp_path):
    argv = ("--device_train_microbatch_size", "2", "--sharding", "grad_op")
    options = ("--engine", "ray", "--num_ray_workers", "2", "--results_dir", str(tmp_path / "ray"))
    run("benchmark.py", *TINY, *FP32, *STEPS, *argv, *options)
    found = losses_of(tmp_path / "ray")
    assert len(found) == 5
    expected = losses_of_launched("composer", tmp_path / "composer", *argv)
    assert found == pytest.approx(expected, rel=SAME_FP32)
    record = record_of(tmp_path / "ray")
    assert record["ranks"]["world_size"] == 2
    assert record["workload"]["num_images"] == 40
    assert record["summary"]["startup"]["seconds"]["launcher"] > 0


def test_bad_input_ends_with_two_and_leaves_no_record(tmp_path):
    argv = ("--engine", "ray", "--num_ray_workers", "2", "--results_dir", str(tmp_path))
    printed = run("benchmark.py", *TINY, "--batch_size", "7", *argv, expects=2)
    assert printed.count("error:") == 1
    assert "--batch_size" in printed
    assert not list(tmp_path.iterdir())


def test_a_run_begun_by_composer_goes_on_under_ray_and_back(tmp_path):
    argv = (*TINY, "--precision", "fp32", "--num_threads", "1", "--log_every_batches", "1")
    argv += ("--use_ema", "--ema_impl", "foreach", "--results_dir", str(tmp_path))
    whole = ("--run_name", "whole", "--engine", "composer", "--max_duration", "6ba")
    assert train.main([*argv, *whole]) == 0
    turns = (*argv, "--run_name", "turns", "--resume", "auto")
    assert train.main([*turns, "--engine", "composer", "--max_duration", "2ba"]) == 0
    storage = ("--ray_storage_path", str(tmp_path / "storage"))
    run("train.py", *turns, *storage, "--engine", "ray", "--max_duration", "4ba")
    assert train.main([*turns, "--engine", "composer", "--max_duration", "6ba"]) == 0
    expected, found = (_losses_of_training(tmp_path / name) for name in ("whole", "turns"))
    assert len(found) == 6
    assert found == pytest.approx(expected, rel=SAME_FP32)
    copies = [path.name for path in (tmp_path / "storage" / "turns").glob("step_*")]
    assert copies == ["step_00000004"]


def _losses_of_training(folder: Path) -> list[float]:
    with (folder / "steps.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]
